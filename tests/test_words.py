"""Plain words: names and sentences that CONTRIBUTING's table advises against may only become fewer.

`most_words.json` has the greatest number of each kind; lower it when you rename something. Everything is counted over
the whole tree, so a moved file changes nothing.
"""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCTION = ("inference_svc", "cachestore_svc", "clients", "tools")
MOST = json.loads((ROOT / "tests/most_words.json").read_text())
_TEXT = re.compile(r'"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|#[^\n]*')
_NAME = re.compile(r"[A-Za-z_]\w*")
_TEST = re.compile(r"def (test_\w+)")
# "who" or "what" where a noun should stand: at the beginning of a clause, or behind a preposition.
_NO_NOUN = r"(?:^|[.,;:(]\s+|\b(?:and|or|but|of|to|from|by|for|with|than|as)\s+)(?:who|whoever|what|whatever)\b"
_SUBJECT = re.compile(r"[a-z][\w ,./-]*: (?P<verb>[a-z]+)\b")
_NO_VERBS = (
    " a an and any as at both by each every few for from he how if in into it its last many more most no nobody none "
    "nothing of on one only other our same she some somebody such than that the their there these they this those to "
    "two under we what when where whether which who whoever whole with without "
)
_NO_IMPERATIVE = re.compile(r"(?!embed$|feed$|need$|seed$|speed$|shed$|bring$|string$)\w+(?:[^s]s|ed|ing)")


def unwanted(page: str) -> list[str]:
    """The first column of the table of words; rows with a parenthesis mean one sense of a word, which nobody counts."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page.split("| not | but |")[1].split("\n\n")[0], re.MULTILINE)
    return [word for row in rows if "(" not in row and "-" not in row for word in row.split(", ")]


@cache
def _words() -> re.Pattern[str]:
    words = "|".join(re.escape(word) for word in unwanted((ROOT / "CONTRIBUTING.md").read_text()))
    return re.compile(rf"\b(?:{words})\b|{_NO_NOUN}", re.IGNORECASE | re.MULTILINE)


def found(text: str) -> list[str]:
    return [match.strip(" .,;:(\n").lower() for match in _words().findall(text)]


def spaced(name: str) -> str:
    """A name's words with spaces between them."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removeprefix("test_")).replace("_", " ").strip()


@cache
def _sources(tests: bool) -> list[str]:
    folders = ("tests",) if tests else PRODUCTION
    return [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name]


def identifiers() -> Iterable[str]:
    return {name for source in _sources(tests=False) for name in _NAME.findall(_TEXT.sub(" ", source))}


def names_of_tests() -> Iterable[str]:
    return {name for source in _sources(tests=True) for name in _TEST.findall(source)}


def sentences() -> Iterable[str]:
    return (text for source in _sources(tests=False) for text in _TEXT.findall(source) if " " in text)


KINDS = {"identifiers": identifiers, "test names": names_of_tests, "sentences": sentences}


@pytest.mark.parametrize("kind", KINDS)
def test_unwanted_words_become_fewer(kind: str) -> None:
    texts = KINDS[kind]()
    counts = Counter(word for text in texts for word in found(text if kind == "sentences" else spaced(text)))
    assert counts.total() <= MOST[kind], counts.most_common()


def _subjects() -> list[str]:
    """Subjects of the commits after the given one; none where there is no git, or not so much of the history."""
    git = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{MOST['subjects after']}..HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def is_plain(subject: str) -> bool:
    """Whether it is `area: verb …` in the imperative, as far as one word can show, and not too long."""
    area = _SUBJECT.match(subject)
    if area is None or len(subject) > 72:
        return False
    return f" {area['verb']} " not in _NO_VERBS and not _NO_IMPERATIVE.fullmatch(area["verb"])


def test_subjects_of_commits_begin_with_a_verb() -> None:
    wrong = [subject for subject in _subjects() if not is_plain(subject)]
    assert len(wrong) <= MOST["subjects"], wrong


def test_planted_words_and_subjects_are_seen() -> None:
    assert found("# Tell whoever asked, and who was told.") == ["tell", "asked", "and who", "told"]
    assert found("# What came is sent anew.") == ["anew"]
    assert found(spaced("test_a_count_is_told_to_come_back")) == ["told"]
    assert found(spaced("WhatWasSaid")) == ["what", "said"]
    assert found("The engine reports the counts of a namespace, which the caller reads.") == []
    assert is_plain("engine: return UNAVAILABLE when the model is unloaded")
    assert is_plain("gateway, sdk: process embeddings")
    for subject in ("engine: a lease ends", "Fix it", "store: fixes it", "store: fixed it", "docs: " + "write " * 20):
        assert not is_plain(subject)
