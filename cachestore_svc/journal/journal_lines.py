"""The form of the journal: one line per group commit, each with a checksum over itself and all before it. Pure.

    <32 hex> {"journal": 1, "store": "…", "sequence": 7, "chain": "<32 hex>", "lines": 2}     what it begins with
    <32 hex> [change, change, …]                                                              that many lines of state
    <32 hex> [8, change, …]                                                                   then one line per group

A line's checksum is BLAKE3 of the checksum before it and of its JSON. Lines of state follow on the first line's; the
first group follows on `chain`, the checksum of the group that the state ends with. So a group keeps its checksum when
what came before it is written shorter, and the index, which holds that of its last group, need not change.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from blake3 import blake3

from cachestore_svc.journal.replay import Change, State, apply, changes_of

FORMAT = 1
_HEX = 32
_CHANGES_PER_LINE = 200


class Position(NamedTuple):
    """How far a journal came: the number of its last group, and that group's checksum."""

    sequence: int
    chain: str


@dataclass
class Parsed:
    """The content of a journal, up to the first line that is not whole."""

    store: str = ""
    position: Position = field(default_factory=lambda: Position(0, ""))
    state: State = field(default_factory=dict)
    before_last: Position | None = None  # where it was before its last group, if it has one
    last: list[Change] = field(default_factory=list)
    base_bytes: int = 0  # the first line and the state
    base_sequence: int = 0  # the group that this state ends with
    whole_bytes: int = 0
    torn_bytes: int = 0  # after the last line: a crash while it was written
    damaged_lines: int = 0  # in the middle, or at the end and yet ended
    is_state_whole: bool = False  # the state that it begins with

    @property
    def is_readable(self) -> bool:
        return bool(self.store)


def begin(store: str) -> Position:
    return Position(0, checksum("", store.encode()))


def checksum(before: str, data: bytes) -> str:
    return blake3(before.encode() + data).hexdigest()[:_HEX]


def group_line(position: Position, changes: Iterable[str]) -> tuple[bytes, Position]:
    """The line of the next group, of changes in JSON, and where the journal then stands."""
    sequence = position.sequence + 1
    data = f"[{sequence},{','.join(changes)}]".encode()
    chain = checksum(position.chain, data)
    return _line(chain, data), Position(sequence, chain)


def state_lines(store: str, position: Position, state: State) -> Iterator[bytes]:
    """The lines of a journal that begins with this state, at this position."""
    changes = changes_of(state)
    texts = [_json(batch) for batch in iter(lambda: list(islice(changes, _CHANGES_PER_LINE)), [])]
    first = {"journal": FORMAT, "store": store, **position._asdict(), "lines": len(texts)}
    chain = ""
    for data in (_json(first), *texts):
        chain = checksum(chain, data)
        yield _line(chain, data)


def parse(data: bytes, *, salvages: bool = False, until: Position | None = None) -> Parsed:
    """Read a journal as far as it is whole, or `until` a position; with `salvages` also behind a damaged line."""
    parsed = Parsed()
    lines = data.split(b"\n")
    parsed.torn_bytes = len(lines.pop())
    if not lines or not _read_first(parsed, lines[0]):
        parsed.damaged_lines = len(lines)
        return parsed
    first = json.loads(lines[0][_HEX + 1 :])
    chain, states = lines[0][:_HEX].decode(), int(first["lines"])
    parsed.whole_bytes = len(lines[0]) + 1
    parsed.is_state_whole = states == 0
    if len(lines) - 1 < states:
        parsed.damaged_lines += 1
    for number, line in enumerate(lines[1:], start=1):
        if number > states and parsed.position == until:
            break
        if number == states + 1:
            chain = parsed.position.chain
        found = _read(chain, line)
        chain = line[:_HEX].decode("ascii", "replace")
        if found is None:
            parsed.damaged_lines += 1
            if not salvages:
                parsed.damaged_lines += len(lines) - 1 - number
                break
            continue
        _follow(parsed, found, chain, is_group=number > states)
        parsed.whole_bytes += len(line) + 1
        if number <= states:
            parsed.base_bytes = parsed.whole_bytes
            parsed.is_state_whole = number == states and not parsed.damaged_lines
    return parsed


def _follow(parsed: Parsed, found: list[Any], chain: str, *, is_group: bool) -> None:
    changes = found
    if is_group:
        sequence, *changes = found
        parsed.before_last, parsed.last = parsed.position, changes
        parsed.position = Position(sequence, chain)
    for change in changes:
        apply(parsed.state, change)


def _read_first(parsed: Parsed, line: bytes) -> bool:
    if not _is_written("", line):
        return False
    first = json.loads(line[_HEX + 1 :])
    if first["journal"] != FORMAT:
        return False
    parsed.store, parsed.position = first["store"], Position(first["sequence"], first["chain"])
    parsed.base_bytes, parsed.base_sequence = len(line) + 1, first["sequence"]
    return True


def _read(chain: str, line: bytes) -> list[Any] | None:
    """The line's JSON; None if this is not the line that was written."""
    if not _is_written(chain, line):
        return None
    found: list[Any] = json.loads(line[_HEX + 1 :])
    return found


def _is_written(chain: str, line: bytes) -> bool:
    """Whether the line has the checksum of itself and all before it."""
    return line[: _HEX + 1].decode("ascii", "replace") == f"{checksum(chain, line[_HEX + 1 :])} "


def _line(chain: str, data: bytes) -> bytes:
    return chain.encode() + b" " + data + b"\n"


def _json(value: Sequence[Change] | dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
