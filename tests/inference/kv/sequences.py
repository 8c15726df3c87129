"""Pools, sequences and rows for tests of KV, and the poison that a freed page is filled with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.kv_load import MOST_FILES, KvLoad
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import window_start
from inference_svc.kv.pages.page_rows import UNIT
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.prefill_layer import PrefillLayer, commit, prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV

HEADS, DIM = 2, 64
ANY_BYTES = 1 << 40
POISON = 0xFFFF  # as a code the largest, as a number of 16 bits not a number


class PoisonedPool(KvPool):
    """A pool in which nobody finds anything but poison in a page that nobody has written since it was free."""

    def release(self, pages: Iterable[int]) -> None:
        released = list(pages)
        super().release(released)
        freed = [page for page in released if not self.allocator.holders(page)]
        if freed:
            for array in self.arrays:
                array[mx.array(freed)] = POISON

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._poison_from(0)

    def _resize(self, pages: int) -> None:
        before = self.pages_in_memory
        super()._resize(pages)
        self._poison_from(min(before, pages))

    def _poison_from(self, page: int) -> None:
        for array in self.arrays:
            array[page:] = mx.full((array.shape[0] - page, array.shape[1]), POISON, dtype=UNIT)
        mx.eval(self.arrays)


def from_files(pool: KvPool, *files: Any, at_once: int = MOST_FILES, **more: Any) -> SequenceKV:
    """The KV that `KvLoad` makes of files, `at_once` of them at a time."""
    load = KvLoad(SequenceKV(pool), *files, **more)
    while not load.advance(at_once):
        pass
    return load.kv


def four_bits() -> identity_pb2.KvPolicy:
    """The default policy of a model that computes in 32 bits."""
    return policy_of(Rung.Q4, "float32")


def full(heads: int = HEADS, dim: int = DIM) -> identity_pb2.LayerLayout:
    return identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=heads, key_dim=dim, value_dim=dim)


def windowed(window: int, heads: int = HEADS, dim: int = DIM) -> identity_pb2.LayerLayout:
    return identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_WINDOW, window=window, kv_heads=heads, key_dim=dim, value_dim=dim
    )


def recurrent(width: int) -> identity_pb2.LayerLayout:
    tensor = identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_FLOAT32, shape=[width])
    return identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_STATE, state_tensors=[tensor])


def identity_of(
    layers: Sequence[identity_pb2.LayerLayout], policy: identity_pb2.KvPolicy | None = None
) -> identity_pb2.KvIdentity:
    return identity_pb2.KvIdentity(weights_digest="0" * 64, layers=layers, policy=policy or four_bits())


def pool_of(
    layers: Sequence[identity_pb2.LayerLayout],
    policy: identity_pb2.KvPolicy | None = None,
    *,
    pages: int | None = None,
) -> PoisonedPool:
    """A poisoned pool, of so many pages or of as many as are asked for."""
    identity = identity_of(layers, policy)
    return PoisonedPool(identity, ANY_BYTES if pages is None else pages * KvPool(identity, 1).page_bytes)


def random_rows(count: int, seed: int, heads: int = HEADS, dim: int = DIM) -> tuple[mx.array, mx.array]:
    """Keys and values of so many tokens, [1, heads, count, dim]."""
    made = np.random.default_rng(seed).standard_normal((2, 1, heads, count, dim)).astype(np.float32)
    return mx.array(made[0]), mx.array(made[1])


def fed(kv: SequenceKV, counts: Sequence[int], seed: int = 0) -> SequenceKV:
    """The sequence after chunks of so many random rows, which differ from layer to layer."""
    for piece, count in enumerate(counts):
        layers = prefill_layers(kv)
        for index, layer in enumerate(layers):
            assert isinstance(layer, PrefillLayer)
            heads = kv.pool.formats[index].key.kv_heads
            layer.update_and_fetch(*random_rows(count, 1000 * seed + 10 * piece + index, heads))
        commit(kv, layers, count)
    return kv


def host(parts: EncodedRows) -> list[np.ndarray]:
    """Parts of rows as their 16-bit units."""
    return [np.array(mx.contiguous(part.view(UNIT))) for part in parts]


def stored(kv: SequenceKV) -> list[bytes]:
    """The bytes of every row that the next token sees, of each layer's parts, and of the states."""
    found = [data for layer in kv.pool.formats for part in _seen(kv, layer) for data in [part.tobytes()]]
    mx.eval(kv.state_arrays)
    return found + [np.array(array).tobytes() for array in kv.state_arrays]


def values(kv: SequenceKV) -> list[np.ndarray]:
    """Keys and values of each layer as attention would see them before the next token; of no rows, nothing."""
    found = []
    for layer, codecs in kv.pool.codecs.items():
        rows, split = kv.seen_rows(layer), codecs[0].part_count
        for codec, parts in zip(codecs, (slice(split), slice(split, None)), strict=True):
            nothing = np.zeros((1, kv.pool.formats[layer].key.kv_heads, 0, DIM), np.float32)
            found.append(nothing if rows is None else np.array(codec.decode(rows[parts], mx.float32)))
    return found


def same(one: Sequence[np.ndarray], two: Sequence[np.ndarray]) -> bool:
    return len(one) == len(two) and all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def poison_behind(kv: SequenceKV) -> None:
    """Fill the rows behind the sequence's last one, in the page that it is in: nobody may see them."""
    rows = kv.length % PAGE_TOKENS
    for layer, page_format in kv.pool.formats.items():
        page = kv.table_of(layer).pages.get(kv.length // PAGE_TOKENS)
        if not rows or page is None or kv.pool.allocator.holders(page) > 1:
            continue
        units = np.array(kv.pool.pages_of(layer, [page]))
        for part in page_format.parts:
            shaped = units[0, part.offset : part.offset + part.size].reshape(part.kv_heads, PAGE_TOKENS, part.units)
            shaped[:, rows:] = POISON
        kv.pool.write_pages(layer, [page], mx.array(units))


def poison_free_pages(pool: KvPool) -> None:
    """Fill all pages that nobody holds."""
    free = [page for page in range(pool.arrays[0].shape[0]) if not pool.allocator.holders(page)]
    if free:  # as the pool writes: a GPU's kept graphs know its arrays, which Python must not replace
        for layer, page_format in pool.formats.items():
            pool.write_pages(layer, free, mx.full((len(free), page_format.units), POISON, dtype=UNIT))
        pool.evaluate()


def page_bytes(pool: KvPool, pages: Iterable[int]) -> dict[int, bytes]:
    """What these pages hold, all layers together."""
    arrays = [np.array(array) for array in pool.arrays]
    return {page: b"".join(array[page].tobytes() for array in arrays) for page in pages}


@dataclass(frozen=True)
class Unrounded:
    """A codec that loses nothing: what differs then is not rounding. It stores 32 bits as two times 16."""

    bits: int = 16
    part_count: int = 1

    def problem(self, dim: int) -> str:
        return f"{dim}" if dim < 1 else ""

    def encode(self, rows: mx.array) -> EncodedRows:
        return (mx.contiguous(rows.astype(mx.float32)).view(mx.float16),)

    def decode(self, parts: EncodedRows, dtype: mx.Dtype) -> mx.array:
        return mx.contiguous(parts[0]).view(mx.float32).astype(dtype)


def unrounded_pool(layers: Sequence[identity_pb2.LayerLayout]) -> KvPool:
    """A pool whose rows are as they were computed."""
    wider: list[Any] = []
    for layer in layers:
        wider.append(identity_pb2.LayerLayout())
        wider[-1].CopyFrom(layer)
        wider[-1].key_dim, wider[-1].value_dim = 2 * layer.key_dim, 2 * layer.value_dim
    pool = pool_of(wider, policy_of(Rung.FP, "float32"))
    pool.codecs = {index: (Unrounded(), Unrounded()) for index in pool.codecs}
    return pool


def _seen(kv: SequenceKV, layer: int) -> list[np.ndarray]:
    start = window_start(kv.table_of(layer).window, kv.length)
    rows = kv.rows(layer, start, kv.length)
    return [] if rows is None else host(rows)


def allocated_bytes(kv: SequenceKV) -> int:
    """Bytes of its pages, shared ones too, and of its states."""
    return len(list(kv.pages)) * kv.pool.page_bytes + kv.state_bytes


def pool_bytes(pool: KvPool) -> int:
    """Bytes of the pool's arrays."""
    return sum(array.nbytes for array in pool.arrays)
