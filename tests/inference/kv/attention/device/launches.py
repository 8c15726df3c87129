"""A device of Metal's kind, played: kernels are recorded with the pages that they read and write, and with the launches
that they come behind, as Metal orders them: by arrays that one makes and the other takes, and by waits of the host.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import mlx.core as mx
import numpy as np

from inference_svc.kv.attention.fused import Kernel
from inference_svc.kv.attention.kernels import KernelSource
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.pool import KvPool

_EDGE = re.compile(r'^("?\w+"?) -> ("?\w+"?)$')
_LABEL = re.compile(r'^\{ (\d+) \[label ="([^"]*)"')
Place = tuple[int, int]  # the pool's array, and a page of it


@dataclass(frozen=True)
class Launch:
    """One kernel. `behind`: the launches that are over when it begins."""

    name: str
    reads: frozenset[Place]
    writes: frozenset[Place]
    behind: frozenset[int]

    def conflicts(self, other: "Launch") -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


class Launches:
    """Records what code over a pool launches. `compiler` stands for Metal's, `evaluate` and `async_eval` for MLX's."""

    def __init__(self) -> None:
        self.pool: KvPool | None = None
        self.all: list[Launch] = []
        self._arrays: dict[str, mx.array] = {}  # that show launches, by name
        self._behind: dict[str, frozenset[int]] = {}
        self._rows: dict[int, list[int]] = {}  # by launch, the last position of each row that it wrote
        self._done = frozenset[int]()
        self._enqueued = frozenset[int]()  # what nobody evaluates does not run
        self._evaluate, self._async_eval = mx.eval, mx.async_eval

    def compiler(self, source: KernelSource, shared_bytes: int) -> Kernel:
        name, names = source.name.split("_")[1], source.input_names

        def launch(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            given, behind = dict(zip(names, inputs, strict=True)), self._launches_before(inputs) | self._done
            reads, writes = self._places(name, given, behind)
            number = len(self.all)
            self.all.append(Launch(name, reads, writes, behind))
            self._rows[number] = self._last_rows(given) if name == "append" else []
            first = sum((each.reshape(-1)[:1].astype(mx.float32) for each in inputs), start=mx.zeros(1))
            made = [
                mx.zeros(shape, dtype) + (first * 0).astype(dtype)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            self._show(f"launch_{number}", made, behind | {number})
            return made

        return launch

    def ended(self, result: mx.array) -> None:
        """A pass has this result, which may lose its graph before another array is made of it."""
        self._show(f"pass_{len(self._arrays)}", [result], self._launches_before([result]))

    def evaluate(self, *arrays: Any) -> None:
        self._done |= self._given(arrays)
        self._evaluate(*arrays)

    def async_eval(self, *arrays: Any) -> None:
        self._given(arrays)
        self._async_eval(*arrays)

    def _given(self, arrays: Any) -> frozenset[int]:
        found = self._launches_before([each for each in _flat(arrays) if isinstance(each, mx.array)])
        self._enqueued |= found
        return found

    @property
    def unordered(self) -> list[tuple[str, str]]:
        """Pairs of launches over one page, of which one writes, that nothing orders."""
        pairs = combinations(enumerate(self.all), 2)
        return [
            (one.name, other.name)
            for (number, one), (place, other) in pairs
            if one.conflicts(other) and number not in other.behind and {number, place} <= self._enqueued
        ]

    @property
    def not_enqueued(self) -> list[str]:
        """Launches that nobody has evaluated yet: these find the pool's arrays as they were."""
        return [launch.name for number, launch in enumerate(self.all) if number not in self._enqueued]

    def _show(self, name: str, arrays: list[mx.array], behind: frozenset[int]) -> None:
        for place, array in enumerate(arrays):
            self._arrays[f"{name}_{place}"] = array
            self._behind[f"{name}_{place}"] = behind

    def _launches_before(self, arrays: Any) -> frozenset[int]:
        """Those that lead to arrays, which are not evaluated, or were by `mx.async_eval`."""
        with tempfile.NamedTemporaryFile("r") as dot:
            mx.export_to_dot(dot.name, *arrays, **self._arrays)  # type: ignore[arg-type]
            before = _before(dot.read().splitlines())
        own = {id(each) for each in arrays}
        starts = [name for name, array in self._arrays.items() if id(array) in own]
        # Arrays without a name here are shown under letters; those at the end of nothing are the given ones.
        found = set[str]()
        open_ = [*starts, *_ends(before, set(self._arrays))]
        while open_:
            if (name := open_.pop()) not in found:
                found.add(name)
                open_ += before.get(name, ())
        return frozenset().union(*(self._behind[name] for name in found if name in self._behind))

    def _places(
        self, name: str, given: dict[str, mx.array], behind: frozenset[int]
    ) -> tuple[frozenset[Place], frozenset[Place]]:
        """The pages that a launch reads, and those that it writes."""
        assert self.pool is not None
        if name == "reduce":
            return frozenset(), frozenset()
        slot = next(number for number, array in enumerate(self.pool.arrays) if array is given["pages"])
        if name == "store":
            targets = frozenset((slot, page) for page in given["targets"].tolist())
            is_copy = given["content"] is given["pages"]
            return frozenset((slot, page) for page in given["sources"].tolist()) if is_copy else frozenset(), targets
        table = np.array(given["block_table"])
        if name == "append":
            per_row = np.array(given["places"]).reshape(len(table), -1)
            pages = {
                int(table[row, at // PAGE_TOKENS]) for row, places in enumerate(per_row) for at in places if at >= 0
            }
            return frozenset(), frozenset((slot, page) for page in pages)
        if name == "gather":
            start, count = given["span"].tolist()
            return frozenset(
                (slot, int(page)) for page in table[0, start // PAGE_TOKENS : -(-(start + count) // PAGE_TOKENS)]
            ), frozenset()
        last = self._rows[max(number for number, launch in enumerate(self.all) if launch.name == "append")]
        pages = {
            int(page) for row, at in zip(table, last, strict=True) if at >= 0 for page in row[: at // PAGE_TOKENS + 1]
        }
        return frozenset((slot, page) for page in pages), frozenset()

    def _last_rows(self, given: dict[str, mx.array]) -> list[int]:
        return [int(row.max()) for row in np.array(given["places"]).reshape(given["block_table"].shape[0], -1)]


def _before(lines: list[str]) -> dict[str, list[str]]:
    """By array, the arrays that it is made of. An array that only waits for others (Depends) is not made of them."""
    labels, inputs, outputs = dict[str, str](), dict[str, list[str]](), dict[str, list[str]]()
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = label[2]
        elif edge := _EDGE.match(line):
            one, other = edge[1].strip('"'), edge[2].strip('"')
            if other in labels:
                inputs.setdefault(other, []).append(one)
            else:
                outputs.setdefault(one, []).append(other)
    found = dict[str, list[str]]()
    for primitive, made in outputs.items():
        taken = inputs.get(primitive, [])
        for place, name in enumerate(made):
            found[name] = taken[place : place + 1] if labels[primitive] == "Depends" else taken
    return found


def _ends(before: dict[str, list[str]], known: set[str]) -> list[str]:
    """Arrays without a name of ours of which no other is made: those that were asked for."""
    used = {name for names in before.values() for name in names}
    return [name for name in before if name not in used and name not in known]


def _flat(arrays: Any) -> Iterator[Any]:
    for each in arrays:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        elif isinstance(each, dict):
            yield from _flat(each.values())
        else:
            yield each
