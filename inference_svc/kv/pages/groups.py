"""Which layers share a block table: those that keep the same tokens, all or the last n. A large group is divided, so
that a page holds equally many layers in every group, and all come from one pool: Gemma 3 12B, with 8 layers that keep
all tokens and 40 with a window, has six groups of 8. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

from kvasir.cachestore.v1 import identity_pb2


@dataclass(frozen=True, slots=True)
class Group:
    """Layers, as entries of a layout, that share a block table. Entry `layers[i]` lies in the pool's i-th array."""

    window: int  # 0: they keep all tokens
    layers: tuple[int, ...]


def groups_of(layers: Sequence[identity_pb2.LayerLayout]) -> tuple[Group, ...]:
    """The groups of a layout; recurrent layers are in none."""
    kinds: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.kind != identity_pb2.LAYER_KIND_STATE:
            kinds.setdefault(layer.window, []).append(index)
    size = _group_size([len(members) for members in kinds.values()])
    return tuple(
        Group(window, tuple(members[first : first + size]))
        for window, members in sorted(kinds.items())
        for first in range(0, len(members), size)
    )


def _group_size(counts: Sequence[int]) -> int:
    """Layers of a group: a common divisor if a large one exists, else the smallest count, with some room unused."""
    if not counts:
        return 1
    divisor = reduce(gcd, counts)
    return divisor if 2 * divisor >= min(counts) else min(counts)
