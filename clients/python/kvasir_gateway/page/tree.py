"""An agent's versions as a tree, newest first: in which lane each lies, and the strokes that join it to its base."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.cachestore.v1 import cachestore_pb2

_LANE, _MARGIN, _HEIGHT = 16, 10, 40
_MOST_LANES = 24


@dataclass(frozen=True, slots=True)
class Row:
    """A version and its drawing: SVG paths in a box of `width` × 40, the node as a stroke of no length."""

    version: cachestore_pb2.SnapshotVersion
    is_newest: bool
    is_branch: bool
    strokes: Sequence[str]
    node: str
    width: int


def rows(versions: Sequence[cachestore_pb2.SnapshotVersion], *, has_older: bool) -> list[Row]:
    """`versions`: of one agent, newest first. `has_older`: older ones exist that are not among these."""
    known = {each.version for each in versions}
    oldest = min(known, default=0)
    lanes: list[int] = []  # the version that each lane leads down to; 0: the lane is free
    drawn = []
    for number, each in enumerate(versions):
        ends = [lane for lane, goal in enumerate(lanes) if goal == each.version]
        lane = ends[0] if ends else _free_lane(lanes)
        strokes = [_through(other) for other, goal in enumerate(lanes) if goal not in (0, each.version)]
        strokes += [_into(end, lane) for end in ends]
        for end in ends:
            lanes[end] = 0
        base = each.base_version
        if base in known or (has_older and 0 < base < oldest):
            lanes[lane] = base
            strokes.append(f"M{_x(lane)} {_HEIGHT / 2:g}V{_HEIGHT}")
        drawn.append((each, number == 0, base not in (0, each.parent_version), strokes, lane, len(lanes)))
    width = 2 * _MARGIN + _LANE * (min(max((count for *_, count in drawn), default=1), _MOST_LANES) - 1)
    return [
        Row(each, is_newest, is_branch, strokes, f"M{_x(lane)} {_HEIGHT / 2:g}h0.01", width)
        for each, is_newest, is_branch, strokes, lane, _ in drawn
    ]


def _free_lane(lanes: list[int]) -> int:
    if 0 not in lanes:
        lanes.append(0)
    return lanes.index(0)


def _x(lane: int) -> int:
    return _MARGIN + _LANE * min(lane, _MOST_LANES - 1)


def _through(lane: int) -> str:
    return f"M{_x(lane)} 0V{_HEIGHT}"


def _into(lane: int, node: int) -> str:
    """From the top of a lane to the node of a row."""
    middle = _HEIGHT / 2
    if lane == node:
        return f"M{_x(lane)} 0V{middle:g}"
    return f"M{_x(lane)} 0C{_x(lane)} {middle:g} {_x(node)} 0 {_x(node)} {middle:g}"
