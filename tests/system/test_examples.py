"""What people copy runs as it is, in a user's own home: `examples/`, and the first pages of the documentation."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.running import Cli, free_port
from tests.running import in_memory
from tests.running.waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MAX_LINES = 60
# What each prints, in this order.
PRINTED: Mapping[str, tuple[str, ...]] = {
    "openai_memory.py": ("(0 of ", "Rex", "Anna", " cached)"),
    "openai_append.py": ("memory new", "memory extended", "Oslo"),
    "anthropic_chat.py": ("(0 tokens read", "Lima", "tokens read from memory"),
    "curl_chat.sh": ("Luna", '"cached_tokens":'),
    "python_chat.py": ("[0 of ", "version 1", "Rex", "version 2"),
    "fork_and_compare.py": ("examples/plan: ", "blue", "examples/plan-b: ", "green"),
    "team_on_one_prefix.py": ("ada: ", "Anna", "(0 of ", "(1024 of ", "(1024 of "),
    "tool_loop.py": ('weather({"place": "Oslo"})', "sunny"),
    "structured_output.py": ("Favourite(colour='blue')",),
    "background_batch.py": ("50 of 50",),
    "resume_after_kill.py": ("(0 of ", "are killed", "4711"),
}
ALONE = {"move_between_homes.sh": ("ada has moved from studio: ", "Rex", "and at A she is not any more (exit 4)")}

# What people come for, in the order in which it is played, in at most five commands each, and what is printed. A move
# is an example of its own, and the walk through the page plays the same in a browser.
TASKS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "talk": (
        ('kvasir chat nora --once "My name is Anna."', 'kvasir chat nora --once "What is my name?"'),
        ("remember", "Anna"),
    ),
    "say it otherwise": (
        ("kvasir agents rollback nora 1", 'kvasir chat nora --once "I live in Oslo."', "kvasir agents history nora"),
        ("nora is at version 3, which is version 1 again", "remember", "4", "3", "2", "1"),
    ),
    "fork": (
        ("kvasir agents fork nora nora-b", 'kvasir chat nora-b --once "Where do I live?"'),
        ("nora-b remembers the same as nora", "Oslo"),
    ),
    "find a conversation": (
        ("kvasir agents label nora 'title=The trip to Oslo'", "kvasir agents ls --search 'oslo trip'"),
        ("nora", "The trip to Oslo", " ago"),
    ),
    "protect it": (("kvasir agents pin nora", "kvasir agents show nora"), ("nora: pinned, keeps ",)),
    "carry it away and back": (
        (
            'kvasir agents export nora "$HOME/nora.kva"',
            'kvasir agents import "$HOME/nora.kva" nora-c',
            'kvasir chat nora-c --once "What is my name?"',
        ),
        ("nora-c is here at version 1", "Anna"),
    ),
    "give a program a key": (
        ("kvasir tokens new ben --role client", "kvasir reload", "kvasir tokens ls"),
        ("ben.token", "ben"),
    ),
    "see how things are": (("kvasir status", "kvasir audit", "kvasir doctor"), ("engine  ready", "stored: ")),
    "restore a backup": (
        (
            'kvasir backup "$HOME/copy"',
            'kvasir --home "$HOME/new" restore "$HOME/copy"',
            'kvasir --home "$HOME/new" up -d --no-http',
            'kvasir --home "$HOME/new" chat nora --once "What is my name?"',
            'kvasir --home "$HOME/new" down',
        ),
        (" copied now", "findings", "Anna", "stopped"),
    ),
}


@pytest.fixture(scope="module")
def user() -> Iterator[Path]:
    """The home directory of a user where `kvasir up` runs."""
    directory = in_memory.home()
    home = directory / ".kvasir"
    with Cli(home).running("up", "--http", f"127.0.0.1:{free_port()}") as up:

        def is_ready() -> bool:
            assert up.process.poll() is None, up.err
            return (home / "run/up.json").exists() and '"is_ready": true' in (home / "run/up.json").read_text()

        eventually(is_ready, within_s=90)
        yield directory
    shutil.rmtree(directory)


def printed_by(home: Path, *command: str) -> str:
    """What a command prints, of which this is the home directory."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(home), "PATH": path, "NO_COLOR": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def example(name: str) -> tuple[str, str]:
    return sys.executable if name.endswith(".py") else "/bin/sh", str(EXAMPLES / name)


def in_order(words: tuple[str, ...], text: str) -> bool:
    at = 0
    for word in words:
        found = text.find(word, at)
        if found < 0:
            return False
        at = found + len(word)
    return True


def test_every_example_is_short_and_is_listed_and_has_its_words_here() -> None:
    programs = {path.name: path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    page = (EXAMPLES / "README.md").read_text()
    assert programs.keys() == PRINTED.keys() | ALONE.keys()
    assert [name for name in programs if f"[`{name}`]({name})" not in page] == []
    site = (ROOT / "docs/pages/examples.md").read_text()
    assert [name for name in programs if f"!include examples/{name}\n" not in site] == []
    assert [name for name, path in programs.items() if len(path.read_text().splitlines()) > MAX_LINES] == []


@pytest.mark.long(19)
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_promises(user: Path, name: str) -> None:
    printed = printed_by(user, *example(name))
    assert in_order(PRINTED[name], printed), printed


@pytest.mark.long(18)
@pytest.mark.parametrize("name", ALONE)
def test_an_example_of_two_homes_prints_what_it_promises_and_leaves_nothing(name: str) -> None:
    directory = in_memory.home()
    printed = printed_by(directory, "env", f"TMPDIR={directory}", *example(name))
    assert in_order(ALONE[name], printed), printed
    assert list(directory.rglob("A")) == []
    shutil.rmtree(directory)


@pytest.mark.long(33)
def test_a_newcomers_task_takes_at_most_five_commands(user: Path) -> None:
    for task, (commands, words) in TASKS.items():
        assert len(commands) <= 5, task
        printed = printed_by(user, "/bin/sh", "-euc", "\n".join(commands))
        assert in_order(words, printed), f"{task}: {printed}"


@pytest.mark.long(8)
def test_the_snippet_of_the_python_client_runs(user: Path) -> None:
    [snippet] = re.findall(r"```python\n(.*?)```", (ROOT / "clients/python/README.md").read_text(), re.DOTALL)
    printed = printed_by(user, sys.executable, "-c", snippet)
    assert len(printed.splitlines()) == 3
    assert all(line.startswith((" red", " green", " blue")) for line in printed.splitlines()[1:])


@pytest.mark.long(20)
def test_the_five_minutes_go_as_on_the_page() -> None:
    """The page's own blocks in one shell; README.md shows the same talk."""
    directory = in_memory.home()
    page = (ROOT / "docs/pages/five-minutes.md").read_text()
    _, talk, kill, look = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    try:
        printed = printed_by(directory, "/bin/sh", "-euc", f"kvasir up -d\n{talk}{kill}{look}")
        shown = re.findall(r"^(Your .+|I will .+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
        assert len(shown) == 3
        assert in_order((*shown, "engine", "ready", "ada"), printed), printed
    finally:
        printed_by(directory, "kvasir", "down")
    shutil.rmtree(directory)


def test_words_in_another_order_are_noticed() -> None:
    assert in_order(("a", "b"), "a b")
    assert not in_order(("b", "a"), "a b")
    assert not in_order(("a", "a"), "a b")
