"""Gives a model that mlx-lm loads its weights: arrays over mapped pages on a CPU and on Metal, copies by threads on
CUDA, or as mlx-lm reads them. A file that is replaced stays mapped as it was; one that is cut short or written to
meanwhile takes the process with it, or changes the weights.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace

import mlx.core as mx
from kvasir.server.machine import machine_bytes

from inference_svc.kv.host_copies.from_files import FilePart, begin_from_files
from inference_svc.kv.host_copies.host_copy import copies_itself, wait_for
from inference_svc.kv.kept_files import kept_folder
from inference_svc.model.weights.extension import Extension, NoExtension, extension
from inference_svc.model.weights.weight_files import TensorPlace, WeightFile, file_identity

Tensors = dict[str, mx.array]
_UNIT_BYTES = 2  # of host_copy's copies
_MOST_BYTES = _UNIT_BYTES * (2**31 - 1)  # MLX counts an axis in 32 bits


@dataclass(frozen=True)
class Placement:
    mapped_bytes: int = 0  # arrays over the files' pages
    sent_bytes: int = 0  # copied to the device by threads
    read_bytes: int = 0  # read by MLX
    why_read: str = ""  # the reason, if some were

    def without(self, converted_bytes: int, compute_type: str) -> "Placement":
        if not (changed := min(converted_bytes, self.mapped_bytes)):
            return self
        why = "; ".join(filter(None, (self.why_read, f"converted to {compute_type}")))
        return replace(
            self, mapped_bytes=self.mapped_bytes - changed, read_bytes=self.read_bytes + changed, why_read=why
        )

    @property
    def in_words(self) -> str:
        parts = [
            f"{count / 1e9:.2f} GB {how}"
            for count, how in ((self.mapped_bytes, "mapped"), (self.sent_bytes, "sent"), (self.read_bytes, "copied"))
            if count
        ]
        return ", ".join(parts) + (f" ({self.why_read})" if self.why_read else "")


class ComingWeights:
    """Weights on their way to a device to which threads copy, which may begin before a model is there for them."""

    def __init__(
        self,
        files: Sequence[WeightFile],
        digests: "Future[Mapping[str, str]] | None" = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin, on the MLX thread. A file that was replaced since its header was read is not sent. `digests`: theirs,
        if they are made already. `meanwhile`: work for the time in which `give` would only wait.
        """
        self.files, self.digests, self._meanwhile, self._opened = files, digests, meanwhile, ExitStack()
        parts = {name: part for file in files for name, part in _parts(file, _unique(file, files), self._opened)}
        arrays, self._copies = begin_from_files([*parts.values()])
        self._arrays = dict(zip(parts, arrays, strict=True))

    def give(self, weights: Tensors) -> int:
        """Wait until all have come, and give them to arrays that are not evaluated. Returns their bytes."""
        with self._opened:
            self._meanwhile()
            wait_for(self._copies)
        arrays, self._arrays, sent = self._arrays, {}, 0
        for name, array in arrays.items():
            lazy = weights.get(name)
            if lazy is not None and lazy.nbytes == array.nbytes and lazy.dtype != mx.bool_:
                weights[name] = array.view(lazy.dtype).reshape(lazy.shape)
                sent += array.nbytes
        return sent


def place_weights(
    files: Sequence[WeightFile],
    weights: Tensors,
    *,
    may_map: bool = True,
    coming: ComingWeights | None = None,
    get_extension: Callable[[], Extension] = lambda: extension(kept_folder("extensions")),
) -> Placement:
    """Give arrays that are not evaluated the bytes of their files where possible; MLX reads the rest."""
    total = Placement(read_bytes=sum(place.size_bytes for file in files for place in file.tensors.values()))
    if not may_map:
        return replace(total, why_read="as it was asked for")
    if copies_itself():
        return _left(replace(total, sent_bytes=(coming or ComingWeights(files)).give(weights)))
    try:
        mapping = get_extension()
    except NoExtension as error:
        return replace(total, why_read=str(error))
    is_read_ahead = sum(file.size_bytes for file in files) < machine_bytes() // 2
    found = [(file, _unique(file, files)) for file in files]
    mapped = sum(_map(mapping, *each, weights, is_read_ahead=is_read_ahead) for each in found)
    return _left(replace(total, mapped_bytes=mapped))


def let_go(arrays: Iterable[mx.array]) -> None:
    """Of placed weights that others took the place of: their pages stay in no memory but the system's."""
    mapping = extension(kept_folder("extensions"))
    for array in arrays:
        mapping.let_go(array)


def _left(placed: Placement) -> Placement:
    left = placed.read_bytes - placed.mapped_bytes - placed.sent_bytes
    return replace(placed, read_bytes=left, why_read="not aligned in their files" if left else "")


def _map(
    mapping: Extension, file: WeightFile, places: Mapping[str, TensorPlace], weights: Tensors, *, is_read_ahead: bool
) -> int:
    aligned = {
        name: place
        for name, place in places.items()
        if _fits_place(weights.get(name), place) and place.offset % weights[name].itemsize == 0
    }
    if not aligned:
        return 0
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The file may have been replaced since its header was read.
        if file_identity(os.fstat(descriptor)) != file.identity:
            return 0
        mapped = mapping.mapped(descriptor, file.size_bytes, is_read_ahead=is_read_ahead)
    finally:
        os.close(descriptor)
    if mapped is None:
        return 0
    for name, place in aligned.items():
        mapped.place(weights[name], place.offset)
    mapped.close()
    return sum(place.size_bytes for place in aligned.values())


def _unique(file: WeightFile, files: Sequence[WeightFile]) -> Mapping[str, TensorPlace]:
    """The file's tensors whose names no other file has."""
    names = Counter(name for each in files for name in each.tensors)
    return {name: place for name, place in file.tensors.items() if names[name] == 1}


def _parts(
    file: WeightFile, places: Mapping[str, TensorPlace], opened_files: ExitStack
) -> Iterator[tuple[str, FilePart]]:
    """Of tensors that are whole units."""
    opened = opened_files.enter_context(file.path.open("rb", buffering=0))
    if file_identity(os.fstat(opened.fileno())) != file.identity:
        return
    for name, place in places.items():
        if 0 < place.size_bytes <= _MOST_BYTES and place.size_bytes % _UNIT_BYTES == 0:
            yield name, FilePart(opened, place.offset, place.size_bytes)


def _fits_place(lazy: mx.array | None, place: TensorPlace) -> bool:
    """Whether MLX reads the header as we do. An empty tensor has nothing to map."""
    return lazy is not None and 0 < lazy.nbytes == place.size_bytes
