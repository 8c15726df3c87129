"""Who may call, whose memory they reach, and how the service comes and goes."""

import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.credentials import CLIENT, ENGINE, PEER, Principal, hash_token, write_credentials, write_private_text
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.programs import run
from tests.running.system_fixtures import House
from tests.running.waiting import eventually

GREEDY = {"max_tokens": 8}
SECRET = "The word of the day is heliotrope, and nobody else may know it. " * 12


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, dict[str, str]]]:
    """A house whose store and engine ask for tokens: callers of two namespaces, and the engine's own in each. North is
    sealed."""
    root = tmp_path_factory.mktemp("guarded")
    house = House(root, model)
    people = [
        *(
            Principal(f"{space}-client", space, frozenset({CLIENT}))
            for space in ("north", "south", "storeless", "late")
        ),
        *(Principal(f"{space}-engine", space, frozenset({ENGINE})) for space in ("north", "south", "late")),
        Principal("north-peer", "north", frozenset({PEER})),
    ]
    tokens = write_credentials(root / "credentials.toml", people, lambda: secrets.token_urlsafe(32))
    for service in (house.store, house.engine):
        service.options += ["--credentials-file", str(root / "credentials.toml")]
    for space in ("north", "south"):
        path = root / f"{space}.token"
        path.write_text(tokens[f"{space}-engine"])
        path.chmod(0o600)
        house.engine.options += ["--store-token-file", f"{space}={path}"]
    house.engine.options += ["--store-token-dir", str(root / "engines")]
    key = f"--seal-key-file={root / 'seal.key'}"
    made = run("cachestore_svc", "keys", "new", "north", "--data-dir", str(house.data_dir), key)
    assert made.returncode == 0, made.stderr
    house.store.options.append(key)
    try:
        house.start()
        yield house, tokens
    finally:
        house.close()


def test_an_agent_of_another_namespace_does_not_exist(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    message = [{"role": "user", "content": SECRET}]
    with house.client(tokens["north-client"]) as north, house.client(tokens["south-client"]) as south:
        told = north.reply(agent_id="same name", messages=message, sampling=GREEDY)
        assert told.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
        with pytest.raises(errors.NotFound) as nothing:
            south.reply(agent_id="same name", append_messages=message, expect_existing=True, sampling=GREEDY)
        assert nothing.value.reason == "AGENT_NOT_FOUND"
        # Not even by its blocks: the same words are computed anew.
        cold = south.reply(agent_id="same name", messages=message, sampling=GREEDY)
        assert (cold.started.source, cold.started.cached_tokens) == (pb.CACHE_SOURCE_COLD, 0)
        assert cold.finished.snapshot.version == 1
        # Where they may be shared, they are.
        sharing = north.reply(agent_id="other name", messages=message, sampling=GREEDY)
        assert (sharing.started.source, sharing.started.cached_tokens) == (pb.CACHE_SOURCE_SHARED, 256)
        assert sharing.token_ids == cold.token_ids == told.token_ids


def test_an_agent_sleeps_at_the_word_of_its_own_namespace_alone(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    message, more = ([{"role": "user", "content": text}] for text in (SECRET, "and now?"))
    with house.client(tokens["north-client"]) as north:
        for agent in ("tired", "never tired"):
            north.reply(agent_id=agent, messages=message, sampling=GREEDY)
        refusals = {"south-client": "AGENT_NOT_FOUND", "storeless-client": "NO_STORE", "north-peer": "ROLE_REQUIRED"}
        for name, reason in refusals.items():
            with house.client(tokens[name]) as other, pytest.raises(errors.KvasirError) as refused:
                other.sleep("tired")
            assert refused.value.reason == reason
        assert north.sleep("tired").version == 2, "nobody else's call made a version, and a sealed store takes it"
        replies = [
            north.reply(agent_id=agent, append_messages=more, sampling=GREEDY) for agent in ("tired", "never tired")
        ]
    assert replies[0].token_ids == replies[1].token_ids
    assert [reply.started.source for reply in replies] == [pb.CACHE_SOURCE_WOKEN, pb.CACHE_SOURCE_HOT]

    def logged() -> bool:
        ends = [line for line in house.engine.log.splitlines() if "turn.finished" in line][-2:]
        return [re.findall(r"\b(?:woken|hot)\b", line) for line in ends] == [["woken"], ["hot"]]

    eventually(logged, 5)  # a line comes behind the last event


def test_the_engines_files_name_agents_of_no_sealed_namespace(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    for space in ("north", "south"):
        with house.client(tokens[f"{space}-client"]) as client:
            client.reply(agent_id=f"secretly {space}", prompt="hello", sampling=GREEDY)
    house.engine.stop()
    house.repair()
    kept = (house.root / "state" / "returns.json").read_text()
    assert ("secretly south" in kept, "secretly north" in kept) == (True, False)


def test_a_namespace_without_a_store_has_hot_memory_alone(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    with house.client(tokens["storeless-client"]) as client:
        message = [{"role": "user", "content": "Hello."}]
        client.reply(agent_id="a", messages=message, sampling=GREEDY)
        again = client.reply(agent_id="a", append_messages=message, sampling=GREEDY)
    assert again.started.source == pb.CACHE_SOURCE_HOT
    assert again.finished.snapshot.state == pb.SNAPSHOT_STATE_NONE
    assert "no store" in again.finished.snapshot.reason
    assert "`kvasir reload`" in again.finished.snapshot.reason, "what to do"


@pytest.mark.long(3)
def test_a_namespace_whose_token_comes_later_is_taken_up_with_a_reload(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    message = [{"role": "user", "content": "Hello."}]
    with house.client(tokens["late-client"]) as client:
        first = client.reply(agent_id="a", messages=message, sampling=GREEDY)
        assert first.finished.snapshot.state == pb.SNAPSHOT_STATE_NONE
        (house.root / "engines").mkdir(exist_ok=True)
        write_private_text(house.root / "engines" / "engine@late.token", tokens["late-engine"])
        before = house.engine.log.count("reload.done")
        os.kill(house.engine.pid, signal.SIGHUP)
        eventually(lambda: house.engine.log.count("reload.done") != before, 60)
        then = client.reply(agent_id="a", append_messages=message, sampling=GREEDY)
        assert then.started.source == pb.CACHE_SOURCE_HOT, "what it remembered in between is not lost"
        assert then.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
        [listed] = client.list_agents().agents
        assert listed.agent_id == "a"
    house.engine.kill()
    house.engine.start()
    with house.client(tokens["late-client"]) as client:
        warm = client.reply(agent_id="a", append_messages=message, sampling=GREEDY)
    assert warm.started.source == pb.CACHE_SOURCE_WARM


def test_wrong_tokens_and_roles_are_refused(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    with house.client("x" * 43) as stranger, pytest.raises(errors.Unauthenticated):
        stranger.reply(prompt="hello")
    with house.client(tokens["north-peer"]) as peer, pytest.raises(errors.PermissionDenied):
        peer.reply(prompt="hello")


def test_the_engines_own_token_at_its_store_is_read_again_with_a_reload(guarded: tuple[House, dict[str, str]]) -> None:
    house, tokens = guarded
    new = secrets.token_urlsafe(32)
    credentials = house.root / "credentials.toml"
    credentials.write_text(credentials.read_text().replace(hash_token(tokens["south-engine"]), hash_token(new)))
    (house.root / "south.token").write_text(new)
    for service in (house.store, house.engine):
        os.kill(service.pid, signal.SIGHUP)
    give_up = time.monotonic() + 60
    with house.client(tokens["south-client"]) as client:
        while client.reply(agent_id="b", prompt="Hi.", sampling=GREEDY).finished.snapshot.version < 1:
            assert time.monotonic() < give_up


def test_without_the_key_of_its_namespace_an_agent_is_refused_for_good(guarded: tuple[House, dict[str, str]]) -> None:
    """A retry would not help: who appends hears that, and what to do."""
    house, tokens = guarded
    message = [{"role": "user", "content": "Hello."}]
    options = house.store.options
    try:
        with house.client(tokens["north-client"]) as client:
            first = client.reply(agent_id="kept", messages=message, sampling=GREEDY)
            assert first.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
            house.store.kill()
            house.store.options = [option for option in options if "seal" not in option]
            house.store.start()

            def go_on_until_the_engine_hears_the_store() -> None:
                """Until then its lease proves the memory."""
                give_up = time.monotonic() + 60
                while time.monotonic() < give_up:
                    client.reply(agent_id="kept", append_messages=message, sampling=GREEDY)

            with pytest.raises(errors.FailedPrecondition, match=r"'north' is sealed.*no master key was given") as told:
                go_on_until_the_engine_hears_the_store()
            assert told.value.reason == "NAMESPACE_SEALED", "though its memory was hot, and the lease lasts"
    finally:
        house.store.options = options
        house.restart()


@pytest.mark.long(5)
def test_memories_of_a_namespace_whose_key_was_destroyed_leave_the_engine(model: Path, tmp_path: Path) -> None:
    """Those that no store ever had, too: `kvasir keys erase` says that nobody can read them again."""
    house, message = House(tmp_path / "h", model), [{"role": "user", "content": SECRET}]
    store, given = ("--data-dir", str(house.data_dir)), [f"--seal-key-file={tmp_path / 'seal.key'}"]
    assert run("cachestore_svc", "keys", "new", "default", *store, *given).returncode == 0
    house.store.options += given
    try:
        house.start()
        with house.client() as client:
            assert client.reply(agent_id="stored", messages=message, sampling=GREEDY).finished.snapshot.version == 1
            house.store.kill()
            lost = client.reply(agent_id="owed", messages=message, sampling=GREEDY)
            assert lost.finished.snapshot.state != pb.SNAPSHOT_STATE_COMMITTED
            assert len(client.list_hot_memories(["stored", "owed"])) == 2
            assert run("cachestore_svc", "keys", "erase", "default", *store).returncode == 0
            house.store.start()
            eventually(lambda: not client.list_hot_memories(["stored", "owed"]), 30)
    finally:
        house.close()


@pytest.mark.long(3)
def test_sigterm_lets_a_running_turn_end_and_its_memory_be_stored(own_house: House) -> None:
    replies: list[Reply] = []
    with own_house.client() as client:
        events = client.generate(agent_id="a", prompt="once upon a time", sampling={"max_tokens": 300})
        next(events)

        def listen() -> None:
            reply = Reply()
            for event in events:
                reply.add(event)
            replies.append(reply)

        listener = threading.Thread(target=listen)
        listener.start()
        time.sleep(0.1)
        assert own_house.engine.stop() == 0
        listener.join(60)
    assert replies[0].finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    own_house.engine.start()
    with own_house.client() as client:
        again = client.reply(agent_id="a", prompt="once upon a time" + replies[0].text, sampling=GREEDY)
    assert again.started.source == pb.CACHE_SOURCE_WARM


def _until_free(client: InferenceClient, turn: dict[str, Any]) -> Reply:
    give_up = time.monotonic() + 20
    while True:
        try:
            return client.reply(**turn, sampling=GREEDY)
        except errors.Unavailable as refused:
            if refused.reason != "AGENT_HELD_ELSEWHERE" or time.monotonic() > give_up:
                raise


@pytest.mark.long(4)
def test_of_two_engines_one_extends_an_agent_and_the_other_reports_it_and_goes_on_from_there(own_house: House) -> None:
    """Two engines, one store, one agent: who has the line's lease goes on; else the compare-and-swap decides. A turn
    that waited for the lease until the other's had ended goes on behind it.
    """
    other = House(own_house.root / "other", own_house.model)
    other.engine.options += ["--store", own_house.store.address]
    try:
        other.engine.start()
        with own_house.client() as here, other.client() as there:
            here.reply(agent_id="shared", messages=[{"role": "user", "content": "Hello."}], sampling=GREEDY)
            turn = {"agent_id": "shared", "append_messages": [{"role": "user", "content": "And then?"}]}
            slow = here.generate(**turn, sampling={"max_tokens": 400})  # type: ignore[arg-type]
            next(slow)
            told: list[pb.SnapshotOutcome] = []
            newest = 2
            try:
                beside = there.reply(**turn, sampling=GREEDY)  # type: ignore[arg-type]
                told.append(beside.finished.snapshot)
                newest = beside.started.parent_version + 1
            except errors.Unavailable as refused:
                if refused.reason != "AGENT_HELD_ELSEWHERE":
                    raise
            *_, last = slow
            told.append(last.finished.snapshot)
            kept = [each for each in told if each.state == pb.SNAPSHOT_STATE_COMMITTED]
            assert sorted(each.version for each in kept) == [*range(2, newest + 1)]
            assert all("version 2" in each.reason for each in told if each not in kept)
            for client, version in ((here, newest + 1), (there, newest + 2)):
                following = _until_free(client, turn)
                assert following.started.parent_version == version - 1
                assert following.finished.snapshot.version == version
    finally:
        other.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--listen", "127.0.0.1:0"], "credential"),
        (["--listen", "unix:/tmp/kv-none/s", "--memory-gib", "-1"], "--memory-gib"),
        ([], "--listen"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_reported_in_one_line(options: list[str], expected: str) -> None:
    ended = run("inference_svc", "serve", "--store", "unix:/tmp/kv-none/store", *options)
    assert ended.returncode == 78
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
