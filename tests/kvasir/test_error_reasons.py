"""The contract's ErrorReason names every reason that the services and the SDK give, with its codes and metadata.

Read from the sources with `ast`: a new reason, code or number of an error is named in the proto first.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvasir import errors
from kvasir.common.v1 import error_reason_pb2
from kvasir.status import ANSWERS

from tests.source_trees import modules, nodes

ROOT = Path(__file__).parents[2]
PROTO = (ROOT / "proto/kvasir/common/v1/error_reason.proto").read_text()
_VALUE = re.compile(r"  // (?P<comment>[^\n]*(?:\n  // [^\n]*)*)\n  ERROR_REASON_(?P<name>\w+) = \d+;")
_KINDS = {kind.__name__: answer.code.name for kind, answer in ANSWERS.items()}
# Programs that run at the caller's side: their reasons are for their own users, and no service sends them.
_SOURCES = ("inference_svc/", "cachestore_svc/", "clients/python/kvasir/", "clients/python/kvasir_gateway/")
_LOCAL = tuple(f"clients/python/kvasir/{each}" for each in ("cli/", "clients/archive_file.py", "formats/seed_file.py"))


@dataclass(frozen=True)
class Promise:
    """What a value's comment says of its errors."""

    codes: frozenset[str]
    metadata: frozenset[str]


@dataclass(frozen=True)
class Raised:
    """An error that some line makes."""

    where: str
    reason: str
    code: str
    metadata: frozenset[str]
    is_literal: bool  # the metadata is written there, and not made by a function


def promises() -> dict[str, Promise]:
    found = {}
    for match in _VALUE.finditer(PROTO):
        comment = match["comment"].replace("\n  //", "")
        codes = {word for word in re.findall(r"[A-Z_]{6,}", comment) if word in _KINDS.values()}
        named = re.search(r"[A-Z_]{6,}: ([a-z_, ]+)\.$", comment)
        found[match["name"]] = Promise(frozenset(codes), frozenset(named[1].split(", ") if named else ()))
    return found


@cache
def raised() -> list[Raised]:
    made = []
    for path, tree in modules().items():
        if path.startswith(_SOURCES) and not path.startswith(_LOCAL):
            made += [found for call in nodes(tree)[ast.Call] if (found := _made(call, path))]
    return made


def _made(call: ast.Call, path: str) -> Raised | None:
    kind = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {each.arg: each.value for each in call.keywords}
    reason = given.get("reason")
    if kind not in _KINDS or not (reason is None or isinstance(reason, ast.Constant)):
        return None
    keys = given.get("metadata")
    metadata = (
        (each.value for each in keys.keys if isinstance(each, ast.Constant)) if isinstance(keys, ast.Dict) else ()
    )
    said = str(reason.value) if reason is not None else getattr(errors, kind).reason
    is_literal = keys is None or isinstance(keys, ast.Dict)
    return Raised(f"{path}:{call.lineno}", said, _KINDS[kind], frozenset(map(str, metadata)), is_literal)


def test_every_reason_has_a_code() -> None:
    named = {name.removeprefix("ERROR_REASON_") for name, _ in error_reason_pb2.ErrorReason.items()} - {"UNSPECIFIED"}
    assert set(promises()) == named
    assert [name for name, promise in promises().items() if not promise.codes] == []


def test_no_error_has_a_reason_a_code_or_metadata_that_the_contract_does_not_name() -> None:
    found, known = raised(), promises()
    assert len(found) > 200
    assert [each for each in found if each.reason not in known] == []
    assert [each for each in found if each.code not in known[each.reason].codes] == []
    assert [each for each in found if each.metadata - known[each.reason].metadata] == []


def test_an_error_about_an_agent_names_it() -> None:
    """A program that appends for many agents learns whose memory it is from the error alone."""
    about_agents = {reason for reason, promise in promises().items() if "agent_id" in promise.metadata}
    assert {"NO_MESSAGES", "AGENT_EXISTS", "AGENT_NOT_FOUND"} <= about_agents
    silent = [each for each in raised() if each.reason in about_agents and "agent_id" not in each.metadata]
    # The blobs of a manifest are no one agent's: several may hold it.
    assert [each for each in silent if each.is_literal and "store/blobs.py" not in each.where] == []


def test_the_contract_names_no_reason_that_nothing_gives() -> None:
    sources = "\n".join(
        path.read_text() for folder in _SOURCES for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name
    )
    assert [name for name in promises() if f'"{name}"' not in sources] == []
