"""What the pages name exists: each `kvasir …`, `make …` and path of README, DESIGN and the pages that they lead to."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from kvasir.options.store import StoreTable
from kvasir.options.table import options_of
from packaging.specifiers import SpecifierSet

from tests.command_tree import TREE

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "DESIGN.md",
    "examples/README.md",
    "clients/python/README.md",
    "compose/README.md",
    "inference_svc/handover/README.md",
    "inference_svc/edge/neighbour/README.md",
    "cachestore_svc/moving/README.md",
    "cachestore_svc/pairing/README.md",
    "cachestore_svc/sealing/README.md",
    "clients/python/kvasir/server/README.md",
    "clients/python/kvasir/server/SHARED.md",
    "clients/python/kvasir_gateway/README.md",
    "clients/python/kvasir_orchestrator/README.md",
    "tests/CAMPAIGNS.md",
    "tools/measured/README.md",
    "tools/measured/kv-policies.md",
    "tools/measured/cpu.md",
    "tools/measured/gpu.md",
    "tools/measured/memory-path.md",
    "tools/measured/papers.md",
    "tools/measured/campaigns.md",
    "tools/measured/machines.md",
)
# Their links are those of the site (`tests/site`).
PAGES_OF_THE_SITE = ("docs/pages/five-minutes.md", "docs/pages/http.md", "docs/pages/fleet.md")
# Rules and no commands.
WITHOUT_COMMANDS = ("CONTRIBUTING.md", "clients/python/kvasir_gateway/README.md")
_CODE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`((?:kvasir|make) [^`]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)\)")
_LABEL = re.compile(r"\[[^\]]*\](?=\()")
_QUOTED = re.compile(r"`([\w./-]+)`")


def typed(text: str) -> Iterator[str]:
    """Commands of a page: lines of its shell blocks, and what stands between backticks."""
    for language, block in _CODE.findall(text):
        if language in ("sh", "bash", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|;|\|\s", line):
                    command = re.sub(r"^(\s*\$\s+|\s*[A-Z_]+=\S+\s+|\s*\.venv/bin/)", "", part.strip())
                    if command.startswith(("kvasir ", "make ")):
                        yield command.split("  #")[0]
    yield from (command.replace("\\|", "|") for command in _INLINE.findall(_CODE.sub("", text)))


def problem(command: str) -> str:
    """Why a command does not exist; empty when it does."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) | set(re.findall(r"\(([A-Z]+)\)", makefile))
        return next((f"no target {word}" for word in words[1:] if word.split("=")[0] not in known), "")
    return _problem(TREE, words[1:])


def _problem(command: Any, words: list[str]) -> str:
    """Walk down the tree; `ls|show` stands for several commands, and an option must be one."""
    for index, word in enumerate(words):
        if word.startswith("-"):
            known = {name for parameter in command.params for name in parameter.opts} | {"--help", "--show-completion"}
            if command.context_settings.get("ignore_unknown_options"):  # it hands them to the store
                known |= {option.flag for option in options_of(StoreTable).values()}
            if word.split("=")[0] not in known:
                return f"{command.name} has no option {word}"
        elif hasattr(command, "commands"):
            if index and _takes_value(command, words[index - 1]):
                continue
            problems = (
                _problem(command.commands[name], words[index + 1 :])
                if name in command.commands
                else f"no command {name}"
                for name in word.split("|")
                if name != "…"
            )
            return next(filter(None, problems), "")
    return ""


def _takes_value(command: Any, option: str) -> bool:
    return any(option in parameter.opts and not parameter.is_flag for parameter in command.params)


@pytest.mark.parametrize("page", [*PAGES, *PAGES_OF_THE_SITE])
def test_every_command_of_a_page_exists(page: str) -> None:
    commands = list(typed((ROOT / page).read_text()))
    assert commands or page in WITHOUT_COMMANDS
    assert [f"{command}: {why}" for command in commands if (why := problem(command))] == []


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert problem("kvasir agents nonsense ada")
    assert problem("kvasir agents ls|nonsense")
    assert problem("kvasir up --nonsense")
    assert problem("kvasir store serve --nonsense")
    assert problem("make nonsense")
    assert problem("make release NONSENSE=1")
    assert not problem("kvasir --home /tmp/x agents export ada ada.tar --format seed")


def test_every_pinned_package_takes_the_oldest_python_that_the_readme_names() -> None:
    """`make demo` installs them all. Those installed here as pinned tell which Pythons they take."""
    [oldest] = re.findall(r"and Python ≥ ([\d.]+);", (ROOT / "README.md").read_text())
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    installed = [each for each in metadata.distributions() if pinned.get(each.name) == each.version]
    assert len(installed) > 100
    takes = {each.name: SpecifierSet(each.metadata.get("Requires-Python") or "") for each in installed}
    assert [name for name, pythons in takes.items() if f"{oldest}.0" not in pythons] == []


def test_every_line_of_make_help_fits_into_100_columns() -> None:
    helped = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = helped.stdout.splitlines()
    assert len(lines) > 30
    assert [line for line in lines if len(line) > 100] == []


# What users import from; every other module of the SDK may move.
PUBLIC = {"kvasir.clients", "kvasir.credentials", "kvasir.errors"}


def _is_public(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif node.module == "kvasir":
        names = {f"kvasir.{alias.name}" for alias in node.names}
    else:
        names = {node.module or ""}
    return all(name in PUBLIC for name in names if name.split(".")[0] == "kvasir")


def test_python_examples_use_names_that_exist() -> None:
    for language, block in _CODE.findall((ROOT / "clients/python/README.md").read_text()):
        if language == "python":
            imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert imports
            assert [node for node in imports if not _is_public(node)] == []
            exec(compile(ast.Module(imports, []), "clients/python/README.md", "exec"), {})


def test_the_pages_name_every_public_module() -> None:
    for page in ("README.md", "clients/python/README.md", "CHANGELOG.md"):
        assert [name for name in sorted(PUBLIC) if name not in (ROOT / page).read_text()] == []


def test_a_path_that_may_move_is_noticed() -> None:
    for line in (
        "from kvasir.clients.store_client import StoreClient",
        "from kvasir import status",
        "import kvasir.cli",
    ):
        assert not all(
            _is_public(node) for node in ast.parse(line).body if isinstance(node, ast.Import | ast.ImportFrom)
        )
    for line in ("from kvasir.clients import StoreClient", "from kvasir import errors", "from pathlib import Path"):
        assert all(_is_public(node) for node in ast.parse(line).body if isinstance(node, ast.Import | ast.ImportFrom))


def named_paths(text: str) -> Iterator[str]:
    """Paths of this repository that a page names: targets of links, files of source, what begins with a top folder."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"out"}  # which tasks make
    prose = _CODE.sub("", text)
    yield from (target for target in _LINK.findall(prose) if "://" not in target)
    for name in _QUOTED.findall(_LABEL.sub("", prose)):
        if name.endswith((".py", ".proto", ".md")) or ("/" in name and name.split("/")[0] in folders):
            yield name


def is_there(name: str, page: str) -> bool:
    """Whether it lies beside the page, in the repository, or, of a file of source, at the end of exactly one path."""
    if (ROOT / page).parent.joinpath(name).exists() or (ROOT / name).exists():
        return True
    return name.endswith(".py") and sum(path.match(name) for path in python_files()) == 1


@cache
def python_files() -> list[Path]:
    folders = ("inference_svc", "cachestore_svc", "clients", "proto", "tests", "tools")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_of_a_page_exists(page: str) -> None:
    names = list(named_paths((ROOT / page).read_text()))
    assert names
    assert [name for name in names if not is_there(name, page)] == []


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", _CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_heading_leads_there(page: str) -> None:
    links = re.findall(r"\]\(([^)\s:#]*)#([^)\s]+)\)", (ROOT / page).read_text())
    targets = [((ROOT / page).parent / name if name else ROOT / page, anchor) for name, anchor in links]
    assert [(str(path), anchor) for path, anchor in targets if anchor not in anchors(path.read_text())] == []


def test_a_path_that_does_not_exist_or_means_two_files_is_noticed() -> None:
    assert list(named_paths("see `inference_svc/nowhere`, [it](nowhere.md), `gone.py`, `run/` and `a.tar`")) == [
        "nowhere.md",
        "inference_svc/nowhere",
        "gone.py",
    ]
    assert not is_there("gone.py", "README.md")
    assert not is_there("service.py", "README.md")
    assert is_there("scheduler.py", "DESIGN.md")


@pytest.mark.parametrize(
    "title", ["One request, from the wire to its first token", "One block, from the engine to the disk"]
)
def test_a_walk_has_ten_lines_and_opens_no_file_twice(title: str) -> None:
    walk = (ROOT / "DESIGN.md").read_text().split(f"### {title}\n")[1].split("\n#")[0]
    assert re.findall(r"^\d+\.", walk, re.MULTILINE) == [f"{line}." for line in range(1, 11)]
    names = list(named_paths(walk))
    assert len(names) > 10
    assert sorted(names) == sorted(set(names))


def test_every_room_stands_in_the_map_of_the_house() -> None:
    packages = ("inference_svc", "cachestore_svc", "clients/python/kvasir")
    rooms = {
        path.parent.relative_to(ROOT).as_posix() for each in packages for path in (ROOT / each).glob("*/__init__.py")
    }
    generated = {"clients/python/kvasir/cachestore", "clients/python/kvasir/inference"}
    assert sorted(rooms - generated - set(named_paths((ROOT / "DESIGN.md").read_text()))) == []
