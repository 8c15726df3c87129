"""Pages that show a text which lives elsewhere in the repository: `!include compose/README.md#two-macs`.

A line of a page names a file, or a section of it by its heading's anchor. A program is shown as a block of code."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/pages"
_INCLUDE = re.compile(r"^!include (\S+?)(?:#(\S+))?$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
# Python's Markdown wants an empty line before a list; GitHub's does not.
_LIST_BEHIND_TEXT = re.compile(r"^((?![-*|#>\s]|\d+\. ).+)\n(?=- )", re.MULTILINE)
_LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml"}


@dataclass(frozen=True)
class Place:
    """Where a text of the repository stands on the site."""

    page: str  # as two-macs.md
    anchor: str = ""


def anchor_of(title: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with its prose changed, and its blocks of code as they were."""
    parts, end = list[str](), 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join((*parts, change(text[end:])))


def headings(text: str) -> Iterator[re.Match[str]]:
    """The headings of a text, but for what looks like one in a block of code."""
    fences = [fence.span() for fence in _FENCE.finditer(text)]
    for heading in _HEADING.finditer(text):
        if not any(begin <= heading.start() < end for begin, end in fences):
            yield heading


def section(text: str, anchor: str) -> str:
    """A heading and what stands below it. Raises KeyError."""
    found = list(headings(text))
    for index, heading in enumerate(found):
        if anchor_of(heading[2]) == anchor:
            others = (other.start() for other in found[index + 1 :] if len(other[1]) <= len(heading[1]))
            return text[heading.start() : next(others, len(text))]
    raise KeyError(anchor)


def included(source: str, anchor: str) -> str:
    """What a line includes. Raises OSError and KeyError."""
    text = (ROOT / source).read_text()
    if language := _LANGUAGES.get(PurePosixPath(source).suffix):
        return f"```{language}\n{text}```\n"
    return section(text, anchor) if anchor else text


def includes_of(page: str) -> list[tuple[str, str]]:
    """The files and sections that a page shows."""
    return [(found[1], found[2] or "") for found in _INCLUDE.finditer((PAGES / page).read_text())]


def places() -> dict[tuple[str, str], Place]:
    """By file of the repository and anchor, what of it stands on the site. The anchor "" is the file itself."""
    found = dict[tuple[str, str], Place]()
    for path in sorted(PAGES.rglob("*.md")):
        page = path.relative_to(PAGES).as_posix()
        for source, anchor in includes_of(page):
            if not anchor or (source, "") not in found:
                found[source, ""] = Place(page)
            for heading in headings(included(source, anchor)):
                found[source, anchor_of(heading[2])] = Place(page, anchor_of(heading[2]))
    return found


def expanded(page: str, text: str, known: dict[tuple[str, str], Place]) -> str:
    """A page with what its lines include, whose links lead to pages of the site, or are plain words."""

    def take(found: re.Match[str]) -> str:
        source, anchor = found[1], found[2] or ""
        taken = included(source, anchor)
        if not source.endswith(".md"):
            return taken
        first = next(headings(taken), None)
        level = 1 if not re.search(r"^# ", text, re.MULTILINE) else 2
        more = level - len(first[1]) if first else 0
        taken = "".join(_moved(taken, more))
        taken = outside_code(taken, lambda prose: _LIST_BEHIND_TEXT.sub("\\1\n\n", prose))
        return outside_code(taken, lambda prose: _LINK.sub(lambda link: _linked(link, source, page, known), prose))

    return _INCLUDE.sub(take, text)


def _moved(text: str, more: int) -> Iterator[str]:
    """The text, whose headings have so many more levels."""
    end = 0
    for heading in headings(text):
        yield text[end : heading.start()] + "#" * (len(heading[1]) + more)
        end = heading.start() + len(heading[1])
    yield text[end:]


def _linked(link: re.Match[str], source: str, page: str, known: dict[tuple[str, str], Place]) -> str:
    label, target = link[1], link[2]
    if "://" in target:
        return link[0]
    name, _, anchor = target.partition("#")
    path = normpath((PurePosixPath(source).parent / name).as_posix()) if name else source
    if path.endswith(".png"):
        return f"[{label}]({_from(page, f'pictures/{PurePosixPath(path).name}')})"
    if path.startswith("docs/pages/"):
        return f"[{label}]({_from(page, path.removeprefix('docs/pages/'))}{'#' + anchor if anchor else ''})"
    place = known.get((path, anchor)) or known.get((f"{path}/README.md", anchor))
    if place is None:
        return label if PurePosixPath(path).name.removesuffix(".md") in label else f"{label} (`{path}`)"
    at = _from(page, place.page) if place.page != page else ""
    return f"[{label}]({at}{'#' + place.anchor if place.anchor else ''})" if at or place.anchor else label


def _from(page: str, target: str) -> str:
    return relpath(target, PurePosixPath(page).parent.as_posix())
