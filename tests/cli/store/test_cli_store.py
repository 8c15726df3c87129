"""Every command about memories and the store, once, against a real store: tables, JSON, exit codes."""

import io
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import kvasir
import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.cachestore.v1.identity_pb2 import KvIdentity
from kvasir.cli import failures
from kvasir.cli.caller import Caller
from kvasir.cli.running.health import STORE_SERVICE
from kvasir.cli.running.home import Home
from kvasir.cli.showing.terminal import PlainConsole
from kvasir.cli.talking.chat import Conversation
from kvasir.clients import GenerateOptions, InferenceClient, StoreClient
from kvasir.formats.digest import Digest

from tests.cli.running import Cli, answers
from tests.cli.store.conftest import publish
from tests.made_models.synthetic import SMALL, TINY, SyntheticAgent, asleep
from tests.running import in_memory
from tests.running.waiting import eventually

SNAPSHOT_KEYS = {
    "agent_id",
    "kv_identity_hash",
    "version",
    "parent_version",
    "token_count",
    "total_bytes",
    "created_at",
    "origin",
    "origin_detail",
    "is_brought",
    "request_id",
    "manifest",
}
AGENT_KEYS = {
    *("expires_at", "agent_id", "labels", "is_pinned", "retained_versions", "created_at", "used_at", "lines"),
    "ownership",
}


def test_ls_shows_people_a_table_and_scripts_json(cli: Cli, ada: SyntheticAgent) -> None:
    table = cli.done("agents", "ls").out
    assert "ada" in table
    assert "340" in table
    rows = cli.done("agents", "ls", "--json").value
    assert [set(row) for row in rows] == [AGENT_KEYS | {"title", "temperature", "wake_ms", "is_woken_ahead"}]
    assert (rows[0]["temperature"], rows[0]["wake_ms"]) == ("warm", None)
    assert rows[0]["lines"][0]["token_count"] == 340
    assert set(rows[0]["lines"][0]) == SNAPSHOT_KEYS


def test_ls_begins_with_the_last_used_and_leaves_out_agents_without_names(
    cli: Cli, client: StoreClient, ada: SyntheticAgent
) -> None:
    for agent in ("conversation/0ed/1", "tokens/2", "bo"):
        client.fork_agent("ada", agent)
    publish(client, "bo", SyntheticAgent(seed=2).turn(700), 1)

    def names(*options: str) -> list[str]:
        return [row["agent_id"] for row in cli.done("agents", "ls", *options, "--json").value]

    assert names() == ["bo", "ada"]
    assert names("--sort", "name") == ["ada", "bo"]
    assert names("--limit", "1", "--sort", "size") == ["bo"]
    assert sorted(names("--all")) == ["ada", "bo", "conversation/0ed/1", "tokens/2"]
    assert names("--prefix", "tokens/") == ["tokens/2"]
    said = cli.done("agents", "ls", "--limit", "1").out
    assert "2 more that their callers did not name: --all lists them." in said
    assert "1 more by this order: --limit." in said
    assert cli("agents", "ls", "--sort", "age").code == 2
    assert cli("agents", "ls", "--limit", "0").code == 2


@pytest.mark.long(2)
def test_titles_are_first_words_or_a_label_and_are_searched_and_reading_them_is_no_use(
    cli: Cli, client: StoreClient
) -> None:
    said = manifest_pb2.Message(role="user", content="Plan a trip to Porto in May,\nby train and with two children.")
    told = [manifest_pb2.Message(role="system", content="You are brief."), said]
    for number, name in enumerate(("conversation/0ed/1", "ada")):
        made = SyntheticAgent(seed=7 + number).turn(20)
        known = manifest_pb2.Manifest.FromString(made.manifest_bytes)
        known.messages.extend(told)
        data = known.SerializeToString(deterministic=True)
        publish(client, name, replace(made, manifest_bytes=data, manifest_digest=Digest.of(data)), 0)
    time.sleep(1.1)  # a use is noted once a second
    before = {row.agent_id: row.used_at for row in client.list_agents().agents}

    def titles(*options: str) -> dict[str, str]:
        rows = cli.done("agents", "ls", *(options or ("--all",)), "--json").value
        return {row["agent_id"]: row["title"] for row in rows}

    assert titles() == {"ada": "", "conversation/0ed/1": "Plan a trip to Porto in May, by train…"}
    assert list(titles("--search", "PORTO  trip")) == ["conversation/0ed/1"]
    assert (titles("--search", "AD"), titles("--search", "Porto Oslo")) == ({"ada": ""}, {})
    assert cli.done("agents", "ls", "--search", "Porto Oslo").out == "no agent is listed\n"
    assert {row.agent_id: row.used_at for row in client.list_agents().agents} == before
    assert "Plan a trip" not in cli.done("agents", "ls").out
    cli.done("agents", "label", "conversation/0ed/1", "title=Porto")
    assert titles()["conversation/0ed/1"] == "Porto"
    assert "title=" not in cli.done("agents", "ls", "--all").out, "it has a column"
    assert "Porto" in cli.done("agents", "ls", "--all").out
    for name in before:
        client.delete_agent(name)


def test_ls_finds_by_prefix_and_label(cli: Cli, ada: SyntheticAgent) -> None:
    cli.done("agents", "fork", "ada", "bo")
    cli.done("agents", "label", "bo", "team=red", "for=tests")
    names = [row["agent_id"] for row in cli.done("agents", "ls", "--prefix", "a", "--json").value]
    assert names == ["ada"]
    names = [row["agent_id"] for row in cli.done("agents", "ls", "--label", "team=red", "--json").value]
    assert names == ["bo"]


def test_show_and_history_tell_the_versions(cli: Cli, ada: SyntheticAgent) -> None:
    assert "keeps 8 versions" in cli.done("agents", "show", "ada").out
    assert set(cli.done("agents", "show", "ada", "--json").value) == AGENT_KEYS
    versions = cli.done("agents", "history", "ada", "--json").value
    assert [(row["version"], row["token_count"], row["origin"]) for row in versions] == [
        (2, 340, "turn"),
        (1, 300, "turn"),
    ]
    assert "turn" in cli.done("agents", "history", "ada").out


def test_a_fork_of_an_old_version_remembers_that_version(cli: Cli, ada: SyntheticAgent) -> None:
    line = cli.done("agents", "history", "ada", "--json").value[0]["kv_identity_hash"]
    made = cli.done("agents", "fork", "ada", "young ada", "--version", "1", "--kv-identity", line, "--json").value
    assert made["lines"][0]["token_count"] == 300
    assert "remembers" in cli.done("agents", "fork", "ada", "other ada").out


def test_rollback_makes_an_old_version_the_newest(cli: Cli, ada: SyntheticAgent) -> None:
    assert "version 3" in cli.done("agents", "rollback", "ada", "1").out
    newest = cli.done("agents", "history", "ada", "--json").value[0]
    assert (newest["version"], newest["token_count"], newest["origin"]) == (3, 300, "rollback")


def test_a_refusal_of_the_store_names_the_thing(cli: Cli, ada: SyntheticAgent, tmp_path: Path) -> None:
    archive = tmp_path / "ada.kva"
    cli.done("agents", "export", "ada", archive)
    told = {
        ("show", "nobody"): "there is no agent 'nobody'",
        ("rollback", "ada", "77"): "agent 'ada' has no version 77",
        ("fork", "ada", "ada"): "agent 'ada' exists. Choose another name.",
        ("import", str(archive)): "agent 'ada' exists; an import with `replace` (--replace) adds a version.",
        ("import", __file__): f"{__file__}: not an archive",
        ("pull", "studio", "ada"): "no peer 'studio' in this store's configuration",
    }
    assert {words: told[words] in cli("agents", *words).err for words in told} == dict.fromkeys(told, True)


def test_a_pinned_agent_is_not_forgotten_without_force(cli: Cli, ada: SyntheticAgent) -> None:
    kept = cli.done("agents", "keep", "ada", "3", "--json").value
    assert (kept["is_pinned"], kept["retained_versions"]) == (False, 3), (
        "what is kept and what is pinned are two things"
    )
    pinned = cli.done("agents", "pin", "ada", "--json").value
    assert (pinned["is_pinned"], pinned["retained_versions"]) == (True, 3)
    refused = cli("agents", "rm", "ada")
    assert refused.code == 4
    assert "agent 'ada' is pinned" in refused.err
    assert "--force deletes it" in refused.err
    assert cli.done("agents", "pin", "ada", "--off", "--json").value["is_pinned"] is False
    cli.done("agents", "pin", "ada")
    answer = cli.done("agents", "rm", "ada", "--force", "--json").value
    assert set(answer) == {"agent_id", "unshared_bytes", "bytes_gone_by"}
    assert cli("agents", "show", "ada").code == 5


def test_labels_are_set_and_removed(cli: Cli, ada: SyntheticAgent) -> None:
    assert cli.done("agents", "label", "ada", "a=1", "b=2", "--json").value["labels"] == {"a": "1", "b": "2"}
    assert "b=2" in cli.done("agents", "label", "ada", "a=").out
    cli.done("agents", "label", "ada", "b=[/b]:key:")
    assert "b=[/b]:key:" in cli.done("agents", "ls").out, "shown as it is"
    assert cli("agents", "label", "ada", "nonsense").code == 2
    cli.done("agents", "label", "ada", "kvasir.of_its_own=1", "kvasir.on_full=refuse")
    assert "of_its_own" not in (listed := cli.done("agents", "ls").out)
    assert "kvasir.on_full=refuse" in listed
    assert "kvasir.of_its_own=1" in cli.done("agents", "show", "ada").out
    assert "expected it left out" in cli("agents", "label", "ada", "kvasir.first_move=1").err


@pytest.mark.parametrize("identities", [(TINY, SMALL), (SMALL, TINY)], ids=["tiny first", "small first"])
def test_a_chat_tells_of_the_line_that_was_used_last(
    cli: Cli, client: StoreClient, identities: tuple[KvIdentity, KvIdentity]
) -> None:
    earlier, later = (SyntheticAgent(identity, seed=3) for identity in identities)
    for version in range(3):
        publish(client, "two models", earlier.turn(20), version)
    for version in range(2):
        publish(client, "two models", later.turn(300), 3 + version)
    said = io.StringIO()
    caller = Caller(home=Home(cli.home), err=PlainConsole(file=said, width=200))
    with InferenceClient.connect(f"unix:{cli.home}/nobody") as engine:
        talk = Conversation(caller, engine, "two models", "", GenerateOptions())
        talk.command("/memory")
        talk.command("/rollback")
    memory, rollback = said.getvalue().splitlines()[-2:]
    assert memory.startswith("600 tokens, ")
    assert memory.endswith("; versions: 4 (turn), 5 (turn)")
    assert rollback == "/rollback N, of versions: 4 (turn), 5 (turn)"
    client.delete_agent("two models")


def test_a_pull_from_a_peer_that_is_not_configured_reports_it(cli: Cli) -> None:
    refused = cli("agents", "pull", "nowhere", "ada", "--json")
    assert refused.code == 5
    assert refused.value["error"]["reason"] == "PEER_UNKNOWN"


def test_stats_gc_and_scrub_report_what_they_found(cli: Cli, ada: SyntheticAgent) -> None:
    stats = cli.done("store", "stats", "--json").value
    assert stats["agent_count"] == 1
    assert isinstance(stats["counters"], dict)
    assert "agent count" in cli.done("store", "stats").out
    swept = cli.done("store", "gc", "--dry-run", "--json").value
    assert set(swept) == {"blobs_marked", "blobs_swept", "bytes_freed", "is_dry_run"}
    assert "marked" in cli.done("store", "gc").out
    assert cli.done("store", "scrub", "ada", "--json").value["damaged"] == []
    assert "0 damaged" in cli.done("store", "scrub").out


@pytest.mark.long(2)
def test_scrub_names_a_damaged_blob_and_ends_with_its_own_code(
    cli: Cli, ada: SyntheticAgent, client: StoreClient
) -> None:
    blob = next(cli.home.glob(f"store/namespaces/*/blobs/*/{ada._blocks[0].hash}"))
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert Digest.of(data) != ada._blocks[0]
    found = cli("store", "scrub", "--json")
    assert found.code == 6
    assert found.value["damaged"] == [ada._blocks[0].hash]
    again = cli("store", "scrub", "--json")
    assert (again.code, again.value["damaged"], again.value["known_damaged"]) == (6, [], 1)
    assert "1 blob found damaged before" in cli("store", "scrub").out
    data[-1] ^= 1
    client.put_blobs({ada._blocks[0]: bytes(data)})
    assert cli.done("store", "scrub", "--json").value["known_damaged"] == 0


def test_an_unknown_agent_is_not_found(cli: Cli) -> None:
    missing = cli("agents", "show", "nobody", "--json")
    assert missing.code == 5
    assert set(missing.value["error"]) == {"reason", "message", "field", "metadata"}
    assert len(cli("agents", "show", "nobody").err.splitlines()) == 1


def test_a_store_that_does_not_run_is_reported_in_one_line(tmp_path: Path) -> None:
    nobody = Cli(tmp_path)("agents", "ls")
    assert nobody.code == 3
    assert nobody.err.startswith("kvasir: no store answers at unix:")
    assert f"Start it with `kvasir --home {tmp_path} up`" in nobody.err
    assert len(nobody.err.splitlines()) == 1


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o644)
    refused = Cli(tmp_path)("--address", "127.0.0.1:1", "--token-file", token, "agents", "ls")
    assert refused.code == 4
    assert "chmod 600" in refused.err


def test_wrong_usage_ends_with_2(cli: Cli) -> None:
    assert cli("agents", "nonsense").code == 2
    late = cli("agents", "ls", "--home", "x")
    assert (late.code, late.err) == (2, "kvasir: --home stands before the command: kvasir --home … agents ls.\n")
    told = cli("agents", "rollback", "ada", "--nonsense", "--json")
    assert (told.code, told.value["error"]["reason"], told.value["error"]["field"]) == (2, "WRONG_USAGE", "--nonsense")
    nowhere = cli("--address", ":x", "agents", "ls", "--json")
    assert (nowhere.code, nowhere.value["error"]["field"]) == (2, "--address")
    assert cli.done("--version", "--json").value == {"kvasir": kvasir.__version__}


def test_what_the_system_or_a_bug_refuses_is_one_line(
    cli: Cli, ada: SyntheticAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(`Cli` sees to it that no trace is printed.)"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a trace that tests leave elsewhere is of a real fault
    file = tmp_path / "file"
    file.write_text("")
    for command, code in (
        ((Cli(file), "up"), 4),
        ((Cli(Path("/proc/nope")), "up"), 4),
        ((cli, "agents", "export", "ada", tmp_path / "nowhere" / "x"), 5),
        ((cli, "agents", "fork", "ada", "\udcff"), 2),
    ):
        ended = command[0](*command[1:])
        assert (ended.code, len(ended.err.splitlines())) == (code, 1), ended.err

    def broken() -> None:
        raise ZeroDivisionError("so")

    assert failures.code_of(broken, Caller()) == failures.BUG
    assert failures.refusal_of(ZeroDivisionError("so")).message.startswith("ZeroDivisionError: so (details: ")
    assert cli("agents", "rollback", "ada", "not-a-number").code == 2
    assert cli("agents", "rollback", "ada", str(1 << 63)).code == 2


def test_the_help_tells_every_exit_code(cli: Cli) -> None:
    text = " ".join(cli.done("--help").out.split())
    assert all(f"{code} " in text for code in (0, 1, 2, 3, 4, 5, 6, 70, 130, 143, 129))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for(shell: str, cli: Cli) -> None:
    assert "_KVASIR_COMPLETE" in cli.done("--show-completion", shell).out


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a store that has run, with one memory."""
    home = in_memory.home()
    with Cli(home).running("store", "serve") as serve:
        eventually(lambda: answers(f"unix:{home}/run/store.sock", STORE_SERVICE) or serve.process.poll() is not None)
        with StoreClient.connect(f"unix:{home}/run/store.sock") as client:
            publish(client, "ada", SyntheticAgent(seed=2).turn(300), 0)
    return Path(shutil.move(home, tmp_path_factory.mktemp("left") / "home"))


@pytest.fixture
def stopped(left: Path, tmp_path: Path) -> Cli:
    """A home of one's own, with a store that does not run."""
    return Cli(shutil.copytree(left, tmp_path / "home"))


@pytest.mark.long(2)
def test_recover_brings_a_lost_index_back(cli: Cli, stopped: Cli, tmp_path: Path) -> None:
    assert cli("store", "recover").code == 4, "a store that runs holds its lock"
    for path in stopped.home.glob("store/kvasir.sqlite3*"):
        path.unlink()
    refused = stopped("store", "check")
    assert refused.code == 4
    assert f"run: kvasir --home {stopped.home} store recover" in refused.err
    report = stopped.done("store", "recover", "--json").value
    assert report["is_complete"] is True
    assert report["namespaces"][0]["versions"] == 1
    assert "1 version of 1 agent came back" in stopped.done("store", "recover").out
    assert stopped.done("store", "check", "--json").value["snapshots"] == 1
    next(stopped.home.glob("store/namespaces/*/blobs/*/*")).unlink()
    assert stopped("store", "recover").code == 1


@pytest.mark.parametrize("command", ["check", "recover"])
def test_a_directory_that_is_no_store_is_said_to_be_none_and_stays_as_it_is(command: str, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "letter").write_text("mine")
    for folder in (tmp_path / "nowhere", others):
        refused = Cli(tmp_path)("store", command, "--data-dir", folder, "--json")
        error = refused.value["error"]
        assert (refused.code, error["reason"], error["field"]) == (5, "NO_STORE", "--data-dir")
        assert str(folder) in error["message"]
    assert Cli(tmp_path / "typo")("store", command).code == 5
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["letter", "others"]


@pytest.mark.long(4)
def test_check_walks_a_store_that_does_not_run(cli: Cli, stopped: Cli) -> None:
    running = cli("store", "check")
    assert (running.code, f"kvasir --home {cli.home} down" in running.err) == (4, True), (
        "a store that runs holds its lock"
    )
    assert cli.done("store", "check", "--read-only", "--json").value["is_clean"]
    assert "no namespace is sealed" in cli.done("keys", "ls").out
    assert stopped.done("store", "check").out.startswith("1 namespace, ")
    report = stopped.done("store", "check", "--json").value
    assert report["is_clean"] is True
    assert report["snapshots"] == 1
    next(stopped.home.glob("store/namespaces/*/blobs/*/*")).unlink()
    assert stopped("store", "check", "--json").code == 1
    assert ", 1 snapshot\n" in stopped("store", "check").out
    stopped("store", "check", "--repair")


def test_ls_lists_agents_asleep_and_the_time_to_wake_them(cli: Cli, client: StoreClient, ada: SyntheticAgent) -> None:
    known = manifest_pb2.Manifest.FromString(client.get_snapshot("ada")[1])
    data = asleep(known, wake_ms=2345)
    client.put_manifest(data)
    client.commit("ada", Digest.of(data), 2)
    [row] = cli.done("agents", "ls", "--json").value
    assert (row["temperature"], row["wake_ms"]) == ("asleep", 2345)
    assert "asleep, wakes in 2.3 s" in cli.done("agents", "ls").out
    client.fork_agent("ada", "ben")
    rows = {row["agent_id"]: row for row in cli.done("agents", "ls", "--json").value}
    assert (rows["ben"]["temperature"], rows["ben"]["wake_ms"]) == ("asleep", 2345)
