"""Training rows in files: made ahead, for a run on a host whose processors do other work. xz packs them to a sixth."""

from __future__ import annotations

import itertools
import lzma
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import numpy as tensor_files

from tools.kvasir_tiny.rows import Rows

STEPS_EACH = 100  # of a file: 45 MB, or 7 MB behind xz
_AHEAD = 8  # groups made before they are needed
_ENDINGS = (".rows", ".rows.xz")
T = TypeVar("T")


def write(groups: Iterable[Sequence[Rows]], folder: Path) -> None:
    """Keep the rows of steps, in order, in files of STEPS_EACH steps."""
    folder.mkdir(parents=True, exist_ok=True)
    left = iter(groups)
    for number in itertools.count():
        steps = list(itertools.islice(left, STEPS_EACH))
        if not steps:
            return
        file = folder / f"{number:04}{_ENDINGS[0]}"
        tensor_files.save_file(_packed(steps), file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def _packed(steps: Sequence[Sequence[Rows]]) -> dict[str, npt.NDArray[np.generic]]:
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for place, batches in enumerate(zip(*steps, strict=True)):
        tensors[f"ids.{place}"] = np.stack([ids for ids, _ in batches])
        tensors[f"learned.{place}"] = np.packbits(np.stack([learned for _, learned in batches]), axis=-1)
    return tensors


class RowFiles:
    """The steps of a folder's files, in memory; their masks stay packed."""

    def __init__(self, folder: Path) -> None:
        found = sorted(file for ending in _ENDINGS for file in folder.glob(f"*{ending}"))
        if not found:
            raise SystemExit(f"{folder}: no file *{_ENDINGS[0]}; --make-rows writes some")
        self._steps: list[list[tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]]] = []
        for file in found:
            held = file.read_bytes()
            tensors = tensor_files.load(lzma.decompress(held) if file.suffix == ".xz" else held)
            parts = [(tensors[f"ids.{place}"], tensors[f"learned.{place}"]) for place in range(len(tensors) // 2)]
            self._steps += [[(ids[n], bits[n]) for ids, bits in parts] for n in range(len(parts[0][0]))]

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, number: int) -> list[Rows]:
        """The rows of a step; behind the last step the first one follows."""
        kept = self._steps[number % len(self)]
        return [(ids, np.unpackbits(bits, axis=-1, count=ids.shape[1]).astype(np.bool_)) for ids, bits in kept]


def ahead(make: Callable[[int], T], first: int) -> Iterator[T]:
    """`make` of `first` and all later numbers, some of them before they are needed."""
    with ThreadPoolExecutor(1) as pool:
        numbers = itertools.count(first)
        waiting = deque(pool.submit(make, number) for number in itertools.islice(numbers, _AHEAD))
        for number in numbers:
            yield waiting.popleft().result()
            waiting.append(pool.submit(make, number))
