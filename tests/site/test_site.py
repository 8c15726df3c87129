"""The documentation site: its links lead somewhere, its references have everything, and it asks no other host."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from posixpath import normpath

import pytest
from kvasir.cachestore.v1 import cachestore_pb2, pairing_pb2
from kvasir.common.v1 import error_reason_pb2
from kvasir.inference.v1 import handover_pb2, inference_pb2
from kvasir_gateway.openapi import OPERATIONS

from tests.command_tree import TREE
from tests.test_readme import problem, typed
from tools.site import includes
from tools.site.__main__ import write

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_ID = re.compile(r"\{ #([^ }]+) \}")
_MODULE = re.compile(r"python3? -m ([\w.]+)")
_HEADER = re.compile(r"\bx-(?:agent|kvasir)-[a-z-]+\b")
_OUTSIDE = re.compile(
    r"<(?:script|img|iframe|source)[^>]*src=[\"']?https?:|<link[^>]*href=[\"']?https?:|url\([\"']?https?:"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site") / "pages"
    write(directory)
    return directory


def anchors(text: str) -> set[str]:
    titles = [heading[2] for heading in includes.headings(text)]
    return {found[1] if (found := _ID.search(title)) else includes.anchor_of(title) for title in titles}


def broken(directory: Path) -> Iterator[str]:
    """Links of pages that lead nowhere."""
    texts = {page.relative_to(directory).as_posix(): page.read_text() for page in directory.rglob("*.md")}
    known = {name: anchors(text) for name, text in texts.items()}
    for name, text in texts.items():
        prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))
        for target in _LINK.findall(prose):
            path, _, anchor = target.partition("#")
            page = normpath((Path(name).parent / path).as_posix()) if path else name
            is_there = "://" in target or (directory / page).exists()
            if not is_there or (anchor and anchor not in known.get(page, (anchor,))):
                yield f"{name}: {target}"


def test_every_link_leads_to_a_page_and_a_heading(pages: Path) -> None:
    assert list(broken(pages)) == []
    assert not [page for page in pages.rglob("*.md") if re.search(r"^!\w", page.read_text(), re.MULTILINE)]


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A\n\n[b](b.md) [c](c.md) [h](b.md#here) [n](b.md#nowhere) [a](#a) [o](https://x.y)\n"
    )
    (tmp_path / "b.md").write_text("# B\n\n## Here\n")
    assert list(broken(tmp_path)) == ["a.md: c.md", "a.md: b.md#nowhere"]


def test_a_section_moves_with_its_headings_and_its_links_become_those_of_the_site() -> None:
    known = includes.places()
    page = includes.expanded("two-macs.md", "!include compose/README.md#two-macs\n", known)
    assert page.startswith("# Two Macs\n")
    assert "# Backups" not in page
    assert (
        includes.expanded("x.md", "# X\n\n!include compose/README.md#two-macs\n", known).count("\n## Two Macs\n") == 1
    )
    readme = includes.expanded("index.md", "!include README.md\n", known)
    assert "[`compose`](operating.md)" in readme
    assert "[`service.py`](" not in readme
    with pytest.raises(KeyError):
        includes.expanded("x.md", "!include compose/README.md#nowhere\n", known)


def test_every_rpc_message_and_reason_is_in_the_reference_with_its_comment(pages: Path) -> None:
    for module in (cachestore_pb2, handover_pb2, inference_pb2, pairing_pb2):
        descriptor = module.DESCRIPTOR
        page = (pages / f"grpc/{Path(descriptor.name).stem}.md").read_text()
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                [said] = re.findall(rf"\{{ #{service.name}\.{method.name} \}}\n\n.+ → .+\n\n(.+)", page)
                assert len(said) > 10
        assert [name for name in descriptor.message_types_by_name if f"{{ #{name} }}" not in page] == []
        fields = (each for message in descriptor.message_types_by_name.values() for each in message.fields)
        assert [each.full_name for each in fields if f"| `{each.name}` = {each.number} | " not in page] == []
    reasons = (pages / "grpc/error_reason.md").read_text()
    assert [name for name in error_reason_pb2.ErrorReason.keys() if f"`{name}`" not in reasons] == []  # noqa: SIM118


def test_every_operation_and_every_header_is_on_the_page_of_http(pages: Path) -> None:
    page = (pages / "http.md").read_text()
    assert [each.path for each in OPERATIONS if f" {each.path}\n" not in page] == []
    assert "| 429 | RESOURCE_EXHAUSTED | `ResourceExhausted` | A quota, the disk, " in page
    gateway = ROOT / "clients/python/kvasir_gateway"
    there = {name for path in gateway.rglob("*.py") for name in _HEADER.findall(path.read_text())}
    assert set(_HEADER.findall((ROOT / "docs/pages/http.md").read_text())) == there


def test_every_command_is_in_the_reference(pages: Path) -> None:
    page = (pages / "commands.md").read_text()
    groups = TREE.commands
    names = [name for name, command in groups.items() if not command.hidden]
    names += [f"{name} {inner}" for name in names for inner in getattr(groups[name], "commands", ())]
    assert [name for name in names if f"# kvasir {name}\n" not in page] == []


def test_every_command_and_module_that_a_page_names_exists(pages: Path) -> None:
    texts = {page.name: page.read_text() for page in pages.rglob("*.md") if page.name != "commands.md"}
    named = [(name, command) for name, text in texts.items() for command in typed(text)]
    assert len(named) > 200
    assert [(name, command, why) for name, command in named if (why := problem(command))] == []
    modules = {found[1].rstrip(".") for text in texts.values() for found in _MODULE.finditer(text)}
    assert len(modules) > 5
    assert [module for module in sorted(modules) if find_spec(module) is None] == []


@pytest.mark.long(3)
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(pages: Path, tmp_path: Path) -> None:
    config = tmp_path / "mkdocs.yml"
    config.write_text((ROOT / "docs/mkdocs.yml").read_text().replace("../out/pages", str(pages)))
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(tmp_path / "site"))
    built = subprocess.run(
        command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=200
    )
    assert built.returncode == 0, built.stderr
    files = [path for path in (tmp_path / "site").rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert len(files) > 40
    assert [str(path) for path in files if _OUTSIDE.search(path.read_text())] == []


def test_a_request_to_another_host_is_noticed() -> None:
    assert _OUTSIDE.search('<script src="https://unpkg.com/mermaid"></script>')
    assert _OUTSIDE.search('<link rel="stylesheet" href="https://fonts.googleapis.com/css">')
    assert _OUTSIDE.search("@import url(https://x.y/z.css)")
    assert not _OUTSIDE.search('<a href="https://example.org">')
