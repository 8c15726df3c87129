"""What the command line says: help in plain words, refusals that name the thing and what to do."""

import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvasir.cli
import kvasir_gateway.page
import pytest
from kvasir.cli import failures
from kvasir.cli.caller import Caller
from kvasir.cli.failures import WrongUsage
from kvasir.cli.rows import counted
from kvasir.cli.running.home import Home
from kvasir.cli.showing import help_words
from kvasir.cli.showing.tables import table
from kvasir.cli.showing.terminal import PlainConsole
from kvasir.cli.talking import chat
from kvasir.cli.talking.turn import Stored, TurnResult
from kvasir.credentials import write_private_text
from kvasir.errors import DataLoss, FailedPrecondition, KvasirError, ResourceExhausted, Unauthenticated, Unavailable
from typer.core import TyperArgument, TyperOption

from tests.cli.running import QUIET, in_process
from tests.command_tree import TREE
from tests.running.programs import run


def commands(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """Every command of the tree, by its words."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *words, name)


# What there may be one of, in a sentence that a command prints. A prompt of one token is none.
_COUNTED = re.compile(
    r"\{(?!counted|size)[^{}]+\} (?:damaged |later |more |new |other |running )?"
    r"(?:agents|blobs|calls|files|findings|guesses|lines|memories|messages|minutes|outcomes|turns|versions)\b"
)
EVERY = [words for words in commands(TREE) if words != ("store", "serve")]


@pytest.mark.long(3)
def test_help_shows_options_whole_and_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(EVERY) > 30
    monkeypatch.setenv("COLUMNS", "80")
    for words in EVERY:
        in_process(*words, "--help")
        shown = capsys.readouterr().out
        command = functools.reduce(lambda above, word: above.commands[word], words, TREE)
        options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
        cut = [name for each in options for name in each.opts if not re.search(rf"^  .*{name}\b", shown, re.MULTILINE)]
        assert (cut, re.findall(r"(?m)\w\.\.\.$|\\\[", shown)) == ([], []), shown
        assert "Usage: kvasir" in shown
        assert not [part for part in ("<bool>", "<str>", "<path>", " range", "[[", "list[") if part in shown], shown
        flags = [line.split() for line in shown.splitlines() if line.startswith(("  --json ", "  --help "))]
        assert all(words[1] in ("Print", "Show") for words in flags), "a flag wants no value"


def test_an_import_whose_file_and_agent_change_places_is_shown_their_order(tmp_path: Path) -> None:
    file = tmp_path / "ada.tar"
    file.write_bytes(b"x")
    refused = in_process("agents", "import", "ada", file)
    assert refused.code == 2
    assert f"there is no file 'ada'. The file goes first: kvasir agents import {file} ada" in refused.err


def test_a_list_of_commands_has_the_first_sentence_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    in_process("agents", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "keep Set how many versions of an agent the store keeps. export Save one version" in shown
    in_process("agents", "keep", "--help")
    assert "The next turn removes older ones." in " ".join(capsys.readouterr().out.split())


def test_help_ends_lines_where_the_terminal_does(capsys: pytest.CaptureFixture[str]) -> None:
    in_process("backup", "--help")
    shown = capsys.readouterr().out
    words = shown[shown.index("The next backup") : shown.index("Arguments")].splitlines()[:-2]
    assert [line for line in words[:-1] if len(line.strip()) < 60] == []


def test_a_typer_that_names_types_in_another_way_keeps_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in {*TyperOption.__mro__, *TyperArgument.__mro__}:
        if "display_type" in vars(kind):
            monkeypatch.delattr(kind, "display_type")
    help_words.show_plain_words()
    assert not hasattr(TyperOption, "display_type")


def test_what_is_wider_than_its_column_is_whole_in_a_terminal_of_80_columns(tmp_path: Path) -> None:
    names = {"agent": "a" * 40, "source_agent": "b" * 40}
    line = {"at": "2026-11-23T05:24:55.123+00:00", "service": "engine", "who": "owner", "reason": "MODEL_NOT_FOUND"}
    file = Home(tmp_path).audit_file("store")
    file.parent.mkdir()
    file.write_text(json.dumps({**line, **names, "what": "AgentService/CollectGarbage", "outcome": "refused"}))
    shown = run("kvasir", "--home", str(tmp_path), "audit", env={**QUIET, "COLUMNS": "80"}).stdout
    assert "…" not in shown
    assert (shown.count("a" * 6) > 0, sum(shown.count(letter) for letter in "b") >= 40) == (True, True), shown


def test_times_are_whole_in_a_terminal_of_80_columns(tmp_path: Path) -> None:
    about = {"service": "store", "who": "owner", "what": "CacheStoreService/CommitSnapshot", "agent": "a" * 40}
    file = Home(tmp_path).audit_file("store")
    file.parent.mkdir()
    file.write_text(json.dumps({"at": "2026-11-23T05:24:55.123+00:00", **about, "outcome": "allowed"}))
    shown = run("kvasir", "--home", str(tmp_path), "audit", "--all", env={**QUIET, "COLUMNS": "80"}).stdout
    assert "2026-11-23 05:24:55" in shown, shown
    nothing = "nothing needs attention\n1 more line, of routine: --all shows them.\n"
    assert in_process("--home", tmp_path, "audit").out == nothing, "a turn's commit needs none"
    file.write_text(json.dumps({"at": "2026-11-23T05:24:55.123+00:00", **about, "outcome": "refused"}))
    assert "CommitSnapshot" in in_process("--home", tmp_path, "audit").out


def test_the_audit_shows_what_needs_attention_and_a_call_once(tmp_path: Path) -> None:
    home, at = Home(tmp_path), "2026-11-23T05:24:55.123+00:00"
    unnamed, delete = "conversation/1/2", {"what": "AgentService/DeleteAgent", "outcome": "allowed"}
    fork = {"what": "AgentService/ForkAgent", "agent": "eve", "source_agent": "ada", "outcome": "allowed"}
    of_engine = [
        {**delete, "agent": "bob", "who": "client", "request_id": "r1"},
        {**fork, "who": "client", "request_id": "r2"},
        {**delete, "agent": unnamed, "who": "client", "request_id": "r3"},
        {**fork, "who": "mallory", "outcome": "refused", "reason": "PERMISSION_DENIED", "request_id": "r4"},
    ]
    of_store = [
        *({**line, "who": "owner"} for line in of_engine[:3]),
        {**delete, "agent": "tom", "who": "owner", "request_id": "r5"},
        # Its caller chose the id of another call, which is routine.
        {**delete, "agent": "zoe", "who": "owner", "request_id": "r3"},
        {**delete, "agent": "bob", "who": "laptop", "outcome": "refused", "request_id": "r1"},
        {**delete, "what": "AgentService/MoveAgent", "agent": unnamed, "who": "owner", "request_id": "r6"},
        {"what": "keys/erase", "who": "owner", "outcome": "allowed", "request_id": ""},
        {"what": "pair", "who": "owner", "outcome": "allowed", "request_id": "", "peer": "studio"},
    ]
    for service, lines in (("engine", of_engine), ("store", of_store)):
        file = home.audit_file(service)
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps({"at": at, "service": service, **line}) + "\n" for line in lines))
    shown = in_process("--home", tmp_path, "--json", "audit").out.splitlines()
    assert sorted((line["who"], line["what"], line.get("agent")) for line in map(json.loads, shown)) == [
        ("client", "AgentService/DeleteAgent", "bob"),
        ("laptop", "AgentService/DeleteAgent", "bob"),
        ("mallory", "AgentService/ForkAgent", "eve"),
        ("owner", "AgentService/DeleteAgent", "tom"),
        ("owner", "AgentService/DeleteAgent", "zoe"),
        ("owner", "AgentService/MoveAgent", unnamed),
        ("owner", "keys/erase", None),
        ("owner", "pair", None),
    ]
    table = in_process("--home", tmp_path, "audit").out
    assert "ada → eve" in table
    assert "5 more lines, of routine: --all shows them." in table
    assert len(in_process("--home", tmp_path, "--json", "audit", "--all").out.splitlines()) == 13
    newest = in_process("--home", tmp_path, "--json", "audit", "--limit", "3").out.splitlines()
    assert newest == shown[-3:]
    assert "5 older lines: --limit." in in_process("--home", tmp_path, "audit", "--limit", "3").out


SEVERAL = str(Path(__file__).parents[2] / "tools/measured/h200-2026-11.json")
REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "a peer without an address": (("up", "--peer-store", "b=studio"), 2, "--peer-store: expected NAME=…, with --peer"),
    "a user that is none": (("--home", "~kvasir-nobody/x", "status"), 2, "--home: ~kvasir-nobody/x: there is no such"),
    "a home of no name": (("--home", "", "status"), 2, "expected a directory, got ''. See `kvasir --help`"),
    "a command that is none": (("agent", "ls"), 2, "Did you mean 'agents'? See `kvasir --help`."),
    "a command of a group": (("move", "ada"), 2, "'move'. Did you mean 'agents move'? See `kvasir --help`."),
    "a command of several groups": (("rm",), 2, "Did you mean 'models rm', 'agents rm', 'peers rm', 'tokens rm'?"),
    "a home that is a file": (
        ("--home", __file__, "up", "-d"),
        4,
        f"--home: {__file__} cannot be made: a file is there",
    ),
    "a version that is none": (("agents", "rollback", "ada", str(1 << 63)), 2, "is larger than"),
    "a label that is none": (("agents", "label", "ada", "red"), 2, "label: expected KEY=VALUE, got 'red'"),
    "an agent without a name": (("chat", "", "--once", "hello"), 2, "AGENT: the name is empty"),
    "an endless reply": (
        ("chat", "ada", "--once", "x", "--max-tokens", "99999999999"),
        2,
        "'--max-tokens': Input should",
    ),
    "words without --once": (("chat", "ada", "What is my name?"), 2, "the message comes after --once"),
    "a page without a gateway": (("open",), 3, " up -d` starts one.\n"),
    "a late option": (("agents", "ls", "--home", "/tmp/x"), 2, "before the command: kvasir --home … agents ls"),
    "a time before all": (("audit", "--since", "0001-01-01"), 2, "--since: expected 30m"),
    "results that are none": (("bench", "engine", "--results", __file__), 2, "expected what one run of `kvasir bench"),
    "results of several runs": (("bench", "engine", "--results", SEVERAL), 2, "expected what one run of `kvasir bench"),
    "mlx-lm's model that is none": (("bench", "load", "--mlx-lm", "nope"), 2, "--mlx-lm: expected a directory, a repo"),
    "pictures nowhere": (("bench", "quality", "--quick", "--plots", "/proc/kv-nowhere"), 5, "/proc/kv-nowhere: "),
    "a demo of two models": (("demo", "--agent", "--model", "x"), 2, "--agent has a model of its own"),
    "a demo nowhere": (("demo", "--out", "/proc/kv-nowhere"), 5, "/proc/kv-nowhere: "),
    "endless memory": (("doctor", "--memory-gib", "inf"), 2, "--memory-gib: expected a number above 0, got"),
    "layers that are none": (("doctor", "--kv-exact-layers", "x"), 2, "--kv-exact-layers: expected"),
    "no memory": (("bench", "engine", "--memory-gib", "-1"), 2, "--memory-gib"),
    "an address that is none": (("--engine", "nonsense", "models", "ls"), 2, "nonsense"),
    "a store's that is none": (("--address", "nonsense", "agents", "ls"), 2, "nonsense"),
    "a token's file nowhere": (("--token-file", "/tmp/kv-nowhere", "models", "ls"), 5, "--token-file: /tmp/kv-nowhere"),
    "a certificate nowhere": (("--ca-file", "/tmp/kv-nowhere", "models", "ls"), 5, "--ca-file: /tmp/kv-nowhere: there"),
    "no directory": (("agents", "export", "ada", "/tmp/kv-nowhere/ada.kva"), 5, "/tmp/kv-nowhere: there is no such"),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_what_is_wrong(refused: tuple[tuple[str, ...], int, str], tmp_path: Path) -> None:
    words, code, told = refused
    ended = in_process("--home", tmp_path, *words)
    assert (ended.code, told in ended.err) == (code, True), ended.err


@pytest.mark.parametrize(
    ("refusal", "step"),
    [
        (DataLoss("the index is damaged; run: kvasir store recover", reason="INDEX_DAMAGED"), "run: {} store recover."),
        (Unavailable("no store answers"), "`{} up`, or name it"),
        (Unavailable("not stored yet", reason="MEMORY_NOT_STORED"), "not stored yet. Try again; `{} status`"),
        (Unauthenticated("the token is none"), "after `{} reload`"),
        (FailedPrecondition("damaged", reason="MEMORY_DAMAGED"), "`{} agents rollback AGENT VERSION`"),
        (ResourceExhausted("KV memory", reason="MEMORY_EXCEEDED"), "`{} up --memory-gib GIB`"),
        (FailedPrecondition("is it 'memory-gib'?"), "kvasir: is it 'memory-gib'?\n"),
    ],
)
def test_a_services_refusal_names_the_next_step_in_its_home(
    refusal: KvasirError, step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures.report(refusal, Caller(home=Home(tmp_path)))
    assert step.format(f"kvasir --home {tmp_path}") in capsys.readouterr().err


# Commands that start or run something, or whose own program looks at the data, and commands of this machine alone.
STARTING = {"up", "demo", "prove", "bench", "pair", "doctor", "scenario", "keys", "peers", "backup", "restore"}
ALONE = {
    **dict.fromkeys([("down",), ("audit",), ("config", "show"), ("tokens", "new")], 0),
    **dict.fromkeys([("logs",), ("agents", "import")], 5),  # there is no log, and no file x
    **dict.fromkeys([("tokens", "ls"), ("tokens", "rm")], 4),  # there is no list of tokens to look at
    # x is no KEY=VALUE, and no OWNER/NAME; there is no --from and no --force.
    **dict.fromkeys([("agents", "label"), ("models", "pull"), ("models", "rm"), ("agents", "sync")], 2),
    ("agents", "claim"): 2,
    ("fleet", "config"): 2,  # x is no kind
    ("gateway",): 4,  # there are no keys
}


def _leaves(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
    for name, each in (below or {}).items():
        yield from _leaves(each, *words, name)


@pytest.mark.long(4)
@pytest.mark.parametrize("words", [words for words, _ in _leaves(TREE) if words != ("store", "serve")])
def test_an_unknown_option_ends_each_command_with_2_and_json(words: tuple[str, ...]) -> None:
    refused = in_process(*words, "--no-such-option", "--json")
    assert (refused.code, json.loads(refused.out or refused.err)["error"]["reason"]) == (2, "WRONG_USAGE")


@pytest.mark.long(4)
def test_without_services_each_command_ends_as_the_table_of_exit_codes_has_it(tmp_path: Path) -> None:
    others, count = {}, 0
    for number, (words, command) in enumerate(_leaves(TREE)):
        if words[0] in STARTING or words in {("store", "serve"), ("store", "check"), ("store", "recover")}:
            continue
        given = ["1" if each.name in ("version", "versions") else "x" for each in command.params if each.required]
        flags = ["--from", "x"] if words == ("agents", "move") else []
        code = in_process("--home", tmp_path / str(number), *words, *given, *flags).code
        others |= {words: code} if code != ALONE.get(words, 3) else {}
        count += 1
    assert others == {}
    assert count > 25


_OLD_PROTOBUF = "from google.protobuf import runtime_version\nruntime_version.MINOR = 1\n"
_OLD_GRPC = "import grpc\ngrpc.__version__ = '1.0.0'\n"


@pytest.mark.parametrize(
    ("old", "words"),
    [(_OLD_PROTOBUF, "--help"), (_OLD_PROTOBUF, "up -d"), (_OLD_GRPC, "up -d"), (_OLD_GRPC, "up -d --store")],
    ids=["protobuf", "protobuf, up -d", "gRPC, up -d", "gRPC, a store elsewhere"],
)
def test_libraries_older_than_the_messages_are_reported_in_a_line_and_not_by_a_traceback(
    old: str, words: str, tmp_path: Path
) -> None:
    """As after `git pull` without `make install`."""
    (tmp_path / "sitecustomize.py").write_text(old)
    found = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    write_private_text(tmp_path / "token", "kv_" + "a" * 43)
    with socket.create_server(("127.0.0.1", 0)) as store:
        at = f"127.0.0.1:{store.getsockname()[1]}"
        elsewhere = [at, "--store-token-file", str(tmp_path / "token")] if "--store" in words else []
        ended = subprocess.run(
            [sys.executable, "-m", "kvasir", "--home", str(tmp_path / "home"), *words.split(), *elsewhere],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": found},
        )
    assert (ended.returncode, len(ended.stderr.removeprefix("starting …\n").splitlines())) == (4, 1), ended.stderr
    assert "run `make install`" in ended.stderr


@pytest.mark.parametrize(("reason", "shown"), [("", "(cold)"), ("nothing is remembered", "(cold: nothing is")])
def test_a_turn_that_found_too_little_to_read_is_cold_without_a_colon(reason: str, shown: str) -> None:
    told = io.StringIO()
    conversation = chat.Conversation.__new__(chat.Conversation)
    conversation.caller = Caller(as_json=False, err=PlainConsole(file=told, width=200))
    conversation._show_reuse(TurnResult("Hi.", (), "cold", reason, 25, 0, 5, 0.04, Stored(2, "committed", "")))
    assert f"0 of 25 tokens cached {shown}" in told.getvalue()


def test_a_script_that_asks_for_one_log_is_told_whose_it_is(tmp_path: Path) -> None:
    _write_log(tmp_path, "a line")
    assert in_process("--home", tmp_path, "logs", "store").out == "a line\n"
    told = in_process("--home", tmp_path, "logs", "store", "--json").value
    assert told == {"service": "store", "line": "a line"}


@pytest.mark.long(2)
def test_letters_that_the_output_lacks_are_shown_as_escapes_and_end_nothing(tmp_path: Path) -> None:
    text = "Małgorzata, café, 😀"
    _write_log(tmp_path, text)
    command = [sys.executable, "-m", "kvasir", "--home", str(tmp_path), "logs", "store"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for_people = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    for_scripts = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, env=env)
    assert (for_people.returncode, for_people.stderr) == (0, "")
    assert for_people.stdout == "Ma\\u0142gorzata, caf\\xe9, \\U0001f600\n"
    assert json.loads(for_scripts.stdout)["line"] == text


def _write_log(home: Path, line: str) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "store.log").write_text(f"{line}\n", encoding="utf-8")


def test_a_text_of_several_lines_that_has_no_end_is_not_dropped_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('first\n"""\nI like tea.\n'))
    said = chat.texts(lambda: "", lambda _text: None)
    assert next(said) == "first"
    with pytest.raises(WrongUsage, match="is not sent"):
        next(said)


def test_a_file_of_results_is_not_looked_for_in_the_store(tmp_path: Path) -> None:
    ended = in_process("--home", tmp_path, "bench", "memory", "--results", __file__)
    assert (ended.code, "store scrub" in ended.err) == (6, False), ended.err


@pytest.mark.long(5)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path, as_json: tuple[str, ...]) -> None:
    _write_log(tmp_path, "a line")
    command = [sys.executable, "-m", "kvasir", "--home", str(tmp_path), "logs", "store", *as_json]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    assert "the disk is full: make room" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode not in (0, 1)


def test_one_of_a_thing_is_in_the_singular() -> None:
    assert [counted(number, "line") for number in (0, 1, 2)] == ["0 lines", "1 line", "2 lines"]
    assert _COUNTED.search('f"{left_out} more lines"'), "the look at the code finds one"
    folders = [Path(kvasir.cli.__file__).parent, Path(kvasir_gateway.page.__file__).parent]
    texts = {
        file: file.read_text()
        for folder in folders
        for file in folder.rglob("*.*")
        if file.suffix in (".py", ".html") and file.parent.name != "demo"
    }
    assert len(texts) > 60
    assert [(file.name, found[0]) for file, text in texts.items() for found in _COUNTED.finditer(text)] == []


@pytest.mark.parametrize(("columns", "lines"), [({}, 2), ({"COLUMNS": "40"}, 4)])
def test_a_pipe_gets_each_row_on_one_line_unless_columns_are_given(
    columns: dict[str, str], lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, value in columns.items():
        monkeypatch.setenv(name, value)
    piped = io.StringIO()
    PlainConsole(file=piped).print(table(("agent",), [["conversation/" + "0" * 100]]))
    assert len(piped.getvalue().splitlines()) == lines
    assert all(len(line) < 200 for line in piped.getvalue().splitlines()), "no row is filled up to the edge"


def test_a_file_where_a_folder_is_wanted_is_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FileExistsError) as caught:
        file.mkdir()
    assert failures.refusal_of(caught.value).message.startswith(f"{file}: a file is there; expected a directory")
