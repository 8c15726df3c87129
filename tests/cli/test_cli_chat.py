"""`kvasir chat` at a terminal and in scripts: Ctrl-C, several lines, forks, restarts, one-shot, completion."""

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from kvasir.cli.caller import Caller
from kvasir.cli.running.holding import led
from kvasir.cli.running.home import Home, Running
from kvasir.cli.showing.terminal import WrappedReply
from kvasir.cli.talking.chat import Conversation
from kvasir.clients import GenerateOptions, InferenceClient, StoreClient
from kvasir.errors import DeadlineExceeded
from kvasir.formats import manifest
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.cli.running import KVASIR, QUIET, Cli
from tests.made_models.synthetic import SyntheticAgent
from tests.running.programs import run
from tests.running.system_fixtures import House
from tests.running.waiting import eventually

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def _at_a_terminal() -> None:
    """Ctrl-C reaches a process only from its session's own terminal, and where a shell did not have it ignored.

    A shell without job control, as in a script, has it ignored by all that it starts in the background; nohup has
    SIGHUP ignored.
    """
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Terminal:
    """A `kvasir` at a pseudo-terminal, and what stands on its screen."""

    def __init__(self, *arguments: str | Path) -> None:
        self._ours, theirs = pty.openpty()
        environment = QUIET | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            [KVASIR, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_at_a_terminal,
        )
        os.close(theirs)
        self.screen = ""

    def type(self, text: str) -> None:
        self.screen = ""
        os.write(self._ours, text.encode())

    def until(self, wanted: str, within_s: float = 60) -> str:
        """Read until the screen shows it."""
        return self._read_until(lambda: wanted in self.screen, within_s)

    def _read_until(self, claim: Callable[[], bool], within_s: float) -> str:
        give_up = time.monotonic() + within_s
        while not claim():
            assert time.monotonic() < give_up, repr(self.screen)
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # it has ended
                    self.screen += _COLOURS.sub("", os.read(self._ours, 65536).decode("utf-8", "replace"))
        return self.screen

    def interrupt(self, wanted: str) -> None:
        """Press Ctrl-C, and wait for the answer."""
        self.type("\x03")
        self.until(wanted)

    def until_asked(self, agent: str) -> str:
        """Read until the prompt stands last: then a key is the prompt's, and not the terminal's."""
        return self._read_until(lambda: self.screen.endswith(f"{agent}> "), 60)

    def code(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    try:
        house.start()
        yield house
    finally:
        house.close()


@pytest.fixture
def options(house: House, tmp_path: Path) -> tuple[str, ...]:
    return ("--engine", house.engine.address, "--address", house.store.address)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def terminal(options: tuple[str, ...], tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("--home", tmp_path, *options, "chat", "ada", "--max-tokens", "8")
    yield terminal
    terminal.close()


@pytest.mark.long(3)
def test_a_person_stops_a_reply_forks_writes_lines_and_leaves(house: House, terminal: Terminal) -> None:
    assert "it remembers what you tell it" in terminal.until_asked("ada")
    terminal.type("Hello.\n")
    terminal.until("version 1")
    terminal.until_asked("ada")
    house.engine.freeze()  # a reply that takes long
    try:
        terminal.type("And then?\n")
        terminal.until("And then?\r\n")
        time.sleep(0.5)
        terminal.interrupt("stopped; ")
        terminal.until_asked("ada")
    finally:
        house.engine.thaw()  # or whoever comes next waits for it, and its failure hides this one
    terminal.type("/fork bo\n")
    terminal.until_asked("bo")
    terminal.type('"""first\n')
    terminal.until("... ")
    terminal.type('second"""\n')
    terminal.until("tokens cached")
    terminal.until_asked("bo")
    terminal.type("/rollback\n")
    assert "versions: " in terminal.until_asked("bo")
    terminal.interrupt("leaves.")
    terminal.until_asked("bo")
    terminal.type("/memory\n")
    assert "second" in terminal.until("versions")
    terminal.until_asked("bo")
    terminal.type("\x04")
    assert terminal.code() == 0


@pytest.mark.long(3)
def test_two_interrupts_at_the_prompt_leave(terminal: Terminal) -> None:
    terminal.until_asked("ada")
    terminal.interrupt("leaves.")
    terminal.until_asked("ada")
    terminal.interrupt("\n")  # the line that the shell's prompt begins on
    assert terminal.code() == 130


@pytest.mark.long(7)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_prompt_ends_the_chat_at_once(number: signal.Signals, terminal: Terminal) -> None:
    terminal.until_asked("ada")
    terminal.process.send_signal(number)
    assert terminal.code() == 128 + number
    assert "once more" not in terminal.screen


@pytest.mark.long(5)
def test_an_engine_that_is_started_again_is_waited_for_and_does_the_turn_once(house: House, cli: Cli) -> None:
    """The home's `up.json` and lock are what a `kvasir up` leaves there: it is alive, so the engine comes back."""
    home = Home(cli.home)
    home.make()
    home.write_running(Running(pid=1, store=house.store.address, engine=house.engine.address))
    with led(home):
        first = cli.done("chat", "eve", "--once", "Hello.", "--max-tokens", "4", "--json").value
        house.engine.kill()
        with cli.running("chat", "eve", "--once", "Are you there?", "--max-tokens", "4", "--json") as asked:
            eventually(lambda: asked.process.poll() is None and house.engine.log)
            time.sleep(1.0)
            assert asked.process.poll() is None, "it waits"
            house.engine.start()
            eventually(lambda: asked.out)
            second = json.loads(asked.out)
    assert (first["version"], second["version"], second["source"]) == (1, 2, "warm")
    house.engine.kill()
    try:
        gone = cli("chat", "eve", "--once", "Hello?", "--json")
        assert (gone.code, gone.value["error"]["reason"]) == (3, "UNAVAILABLE"), "nobody will start it again"
    finally:
        house.engine.start()


@pytest.mark.long(2)
def test_a_script_says_one_thing_and_gets_the_reply_alone(cli: Cli, options: tuple[str, ...]) -> None:
    said = cli.done(*options, "chat", "zoe", "--once", "Hello.", "--max-tokens", "4")
    assert (len(said.out.splitlines()), "version 1" in said.err) == (1, True)
    whole = cli.done(
        *options, "chat", "zoe", "--once", "-", "--max-tokens", "4", "--json", stdin="One.\n\nTwo.\n"
    ).value
    assert whole["version"] == 2, "several lines are one text"
    piped = cli.done(*options, "chat", "zoe", "--max-tokens", "4", "--json", stdin='"""One.\nTwo.\n"""\nThree.\n')
    assert [json.loads(line)["version"] for line in piped.out.splitlines()] == [3, 4]
    for nothing in ("-", "", " "):
        assert cli(*options, "chat", "zoe", "--once", nothing).code == 2


@pytest.mark.long(4)
def test_a_reply_that_takes_longer_than_a_script_allows_is_named_as_that(cli: Cli, options: tuple[str, ...]) -> None:
    asked = ("chat", "sue", "--once", "-", "--within", "1", "--json")
    slow = cli(*options, *asked, stdin="Hello there. " * 1_000)  # seconds of reading
    assert (slow.code, slow.value["error"]["reason"]) == (3, "TURN_TOO_SLOW"), slow


def test_a_reader_that_was_stopped_is_not_named_as_a_slow_reply(tmp_path: Path) -> None:
    """As by Ctrl-Z for minutes: nobody gave --within."""

    def generate(**_: object) -> Iterator[pb.GenerateResponse]:
        raise DeadlineExceeded("nothing was taken for 30 s", reason="READER_STALLED")
        yield

    engine = cast("InferenceClient", SimpleNamespace(generate=generate))
    talk = Conversation(Caller(Home(tmp_path)), engine, "ada", "", GenerateOptions())
    with pytest.raises(DeadlineExceeded, match="nothing was taken"):
        talk.say("Hello.")


def test_a_script_ends_with_1_when_its_turn_is_not_stored(house: House, cli: Cli, options: tuple[str, ...]) -> None:
    """The store takes nothing more."""
    house.store.kill()
    house.store.options += ["--free-disk-reserve-bytes", str(1 << 60)]
    house.store.start()
    house.repair()
    try:
        said = cli(*options, "chat", "ned", "--once", "Hello.", "--max-tokens", "4")
        assert (said.code, "not stored: ResourceExhausted: disk" in said.err) == (1, True), said.err
        assert said.out.strip()
    finally:
        house.store.kill()
        del house.store.options[-2:]
        house.store.start()
        house.repair()


def test_a_model_is_asked_to_think_or_not(cli: Cli, options: tuple[str, ...]) -> None:
    """kvasir-tiny does not, so that a budget has no effect and is refused."""
    said = cli.done(*options, "chat", "off", "--once", "Hello.", "--max-tokens", "4", "--think", "off", "--json")
    assert said.value["version"] == 1
    refused = cli(*options, "chat", "off", "--once", "Hello.", "--think", "9", "--json")
    assert refused.value["error"]["field"] == "thinking.budget_tokens"
    assert cli(*options, "chat", "off", "--once", "Hello.", "--think", "a lot").code == 2


def test_text_of_others_moves_no_cursor(cli: Cli, options: tuple[str, ...]) -> None:
    """A title, a colour, or a line written over: whoever makes an agent remember them did all that to its readers."""
    told = "\x1b]0;title\x07first\tsecond\nthird\rover\x9b31m\u202eback"
    cli.done(*options, "chat", "esc", "--once", told, "--max-tokens", "2")
    shown = cli.done(*options, "chat", "esc", stdin="/memory\n").err
    assert "\\x1b]0;title\\x07first" in shown
    assert "third\\rover\\x9b31m\\u202eback" in shown
    assert not set("\x1b\x07\r\x9b\u202e") & set(shown)
    assert "'\\x1b[2J'" in cli("\x1b[2J").err


def test_letters_that_spell_a_special_token_are_shown_as_they_were_said(
    house: House, cli: Cli, options: tuple[str, ...]
) -> None:
    turn = SyntheticAgent(seed=9).turn(30)
    known = manifest.parse(turn.manifest_bytes)
    known.messages.add(role="assistant", content="It ends with <\ufdd0|im_end|>", is_reply=True)
    data = known.SerializeToString(deterministic=True)
    with StoreClient.connect(house.store.address) as store:
        store.put_blobs(turn.new_blobs)
        store.put_manifest(data)
        store.commit("spelled", Digest.of(data), 0)
    assert "It ends with <|im_end|>" in cli.done(*options, "chat", "spelled", stdin="/memory\n").err


def test_a_reply_keeps_its_lines_and_loses_its_controls(capsys: pytest.CaptureFixture[str]) -> None:
    WrappedReply().write("one\n\ttwo\x1b[2J\r")
    WrappedReply().write("\x1b", is_dim=True)
    assert capsys.readouterr().out == "one\n\ttwo\\x1b[2J\\r\x1b[2m\\x1b\x1b[22m"


def _on_screen(written: str) -> list[str]:
    """The lines of a terminal that gets this."""
    lines, at = [""], 0
    for part in re.findall(r"\x1b\[K|.|\n", written):
        match part:
            case "\n":
                lines, at = [*lines, ""], 0
            case "\b":
                at -= 1
            case "\x1b[K":
                lines[-1] = lines[-1][:at]
            case _:
                lines[-1] = lines[-1][:at] + part
                at += 1
    return lines


def test_a_reply_breaks_no_word_at_the_edge_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    chance = random.Random(4)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 12))) for _ in range(400)]
    text, reply = " ".join(words), WrappedReply()
    while text:
        cut = chance.randint(1, 9)
        reply.write(text[:cut])
        text = text[cut:]
    lines = _on_screen(capsys.readouterr().out)
    assert [word for line in lines for word in line.split()] == words
    assert max(map(len, lines)) <= 23
    WrappedReply().write("x" * 60 + "\n" + "語" * 30)
    assert [len(line) for line in _on_screen(capsys.readouterr().out)] == [23, 23, 14, 11, 11, 8]


def test_a_system_message_is_for_new_agents(cli: Cli, options: tuple[str, ...]) -> None:
    chat = ("chat", "sys", "--max-tokens", "4", "--system", "You are Sys.", "--once")
    assert "--system is not used" not in cli.done(*options, *chat, "Hello.").err
    again = cli.done(*options, *chat, "Hello again.")
    assert "sys is no new agent: --system is not used" in again.err
    assert "version 2" in again.err


def test_the_shell_completes_agents_and_policies(cli: Cli, options: tuple[str, ...]) -> None:
    cli.done(*options, "chat", "completed", "--once", "Hello.", "--max-tokens", "2")

    def completions(*words: str) -> list[str]:
        asked = {
            "_KVASIR_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("kvasir", *words)),
            "COMP_CWORD": str(len(words)),
        }
        done = run("kvasir", env=QUIET | asked)
        return done.stdout.split()

    assert completions(*options, "agents", "show", "comp") == ["completed"]
    assert completions(*options, "chat", "comp") == ["completed"]
    assert completions("--address", "unix:/tmp/kv-nobody", "agents", "show", "comp") == []
    assert "q4-rotated" in completions("up", "--kv-policy", "q4")
    assert completions(*options, "models", "load", "kv") == ["kvasir-tiny"]


def test_a_talk_reports_where_its_prompt_parted_from_the_memory(
    house: House, cli: Cli, options: tuple[str, ...]
) -> None:
    with house.client() as engine:
        asked = [{"role": "user", "content": "Hello."}]
        engine.reply(agent_id="tooled", append_messages=asked, tools=[pb.Tool(name="look")], max_tokens=4)
    said = cli.done(*options, "chat", "tooled", "--max-tokens", "4", stdin="Go on.\n/memory\nAnd on.\n/memory\n").err
    parted = "parted at tools: 'user\\nHello.<|im_end|' in place of 'system\\nTools:\\n- look'"
    assert " ".join(said.split()).count(parted) == 2, said
    assert "the last prompt: parted" in said
