"""mlx-lm's batch protocol over our sequences and our batch, so that mlx-lm's unmodified BatchGenerator can judge them.

mlx-lm has a cache for each layer, so each layer is a sequence in a pool of its own. The engine decodes one token of
each sequence and computes prompts alone; mlx-lm also computes prompts in a batch, padded on the right. That, and its
words for joining and leaving, live here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.batch.decode_step import DecodeStep
from inference_svc.kv.batch.decoded_layer import DecodedLayer
from inference_svc.kv.model_hooks.row_exact import attention_width
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.prefill_layer import PrefillLayer
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.sequences import ANY_BYTES, PoisonedPool, allocated_bytes


class JudgedLayer:
    """One layer of one sequence, which mlx-lm can put into a batch. What the model computes is stored at once, in a
    pool that the same layer of other sequences shares.
    """

    def __init__(self, kv: SequenceKV) -> None:
        self.kv = kv

    @property
    def offset(self) -> int:
        return self.kv.length

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        layer = PrefillLayer(self.kv, 0)
        seen = layer.update_and_fetch(keys, values)
        self.kv.append({0: layer.new_rows})
        return seen

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        return PrefillLayer(self.kv, 0).make_mask(rows, return_array, window_size)

    def trim(self, rows: int) -> int:
        rows = min(rows, self.offset)
        self.kv.trim_to(self.offset - rows)
        return rows

    @property
    def state(self) -> list[mx.array]:
        return [*self.kv.pool.arrays, *self.kv.state_arrays]

    @property
    def window(self) -> int:
        return self.kv.tables[0].window

    @property
    def nbytes(self) -> int:
        return allocated_bytes(self.kv)

    def is_trimmable(self) -> bool:
        return not self.window

    def merge(self, caches: Sequence["JudgedLayer"]) -> "JudgedBatch":
        """A batch of sequences that go on alone as well; neither side sees what the other writes."""
        return JudgedBatch(self.kv.pool, [cache.kv.fork() for cache in caches])

    def __deepcopy__(self, memo: dict[int, Any]) -> "JudgedLayer":
        return JudgedLayer(self.kv.fork())


def judged_layers(identity: identity_pb2.KvIdentity) -> Callable[[], list[JudgedLayer]]:
    """Makes the layers of a new, empty sequence."""
    pools = [PoisonedPool(_alone(identity, index), ANY_BYTES) for index in range(len(identity.layers))]
    return lambda: [JudgedLayer(SequenceKV(pool)) for pool in pools]


def _alone(identity: identity_pb2.KvIdentity, layer: int) -> identity_pb2.KvIdentity:
    """The identity of one layer alone, stored as `identity` says."""
    alone = identity_pb2.KvIdentity(layers=[identity.layers[layer]], policy=identity.policy)
    alone.policy.exact_layers[:] = [0] if layer in identity.policy.exact_layers else []
    return alone


class JudgedBatch:
    """One layer of several sequences."""

    def __init__(self, pool: KvPool, rows: Sequence[SequenceKV], *, keeps_decoded: bool = True) -> None:
        self.pool = pool
        self.rows = list(rows)
        self.keeps_decoded = keeps_decoded
        self._layer = DecodedLayer(pool, 0)
        self._step: DecodeStep | None = None  # of the next token, once it was asked for
        self._unread: list[int] | None = None  # while a right-padded prompt is computed: tokens left, by slot

    # --- what the model calls ---

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._is_prompt(keys.shape[2]):
            return self._prompt_rows(keys, values)
        self._begin()
        seen = self._layer.update_and_fetch(keys, values)
        self._step = None
        for kv in self.rows:
            kv.advanced(1)
        return seen

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        if not self._is_prompt(count):
            self._begin()
            return self._layer.make_mask(count, return_array, window_size)
        lengths = mx.array(self.lengths)[:, None, None, None]
        if not self.window:
            last = lengths + mx.arange(count)[None, None, :, None]
            return mx.arange(attention_width(max(self.lengths) + count))[None, None, None] <= last
        kept = mx.minimum(lengths, self.window - 1)
        rows = mx.arange(min(max(self.lengths), self.window - 1) + count)[None, None, None]
        last = kept + mx.arange(count)[None, None, :, None]
        return (rows <= last) & (rows > last - min(window_size or self.window, self.window))

    @property
    def offset(self) -> mx.array:
        return mx.array(self.lengths)

    # --- what mlx-lm's engine calls ---

    def extend(self, other: "JudgedBatch") -> None:
        """Add the sequences of another batch, which must not be used any more."""
        self.rows += other.rows
        self._step = None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences of these slots, in this order."""
        kept: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        self.__init__(self.pool, [self.rows[slot] for slot in kept], keeps_decoded=self.keeps_decoded)  # type: ignore[misc]

    def extract(self, slot: int) -> JudgedLayer:
        """A sequence as it would be alone; the batch keeps its own."""
        return JudgedLayer(self.rows[slot].fork())

    def leave(self, slot: int) -> SequenceKV:
        """Take a sequence out, as the engine does. The last slot takes its place."""
        last, left = len(self.rows) - 1, self.rows[slot]
        self._layer.leave(slot, last, self.rows[last].length)
        self.rows[slot] = self.rows[last]
        self.rows.pop()
        self._step = None
        return left

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say that only the first `lengths` rows of each sequence are its own, the rest padding."""
        assert not any(left_padding or ()), "no sequence is padded on the left"
        if lengths is not None and right_padding is not None and any(right_padding):
            self._unread = list(lengths)

    def finalize(self) -> None:
        """The padded rows are over. Padding was never stored, so nothing has to move."""
        self._unread = None

    def empty(self) -> bool:
        return not any(self.lengths)

    def is_trimmable(self) -> bool:
        return not self.window

    def trim(self, count: int) -> int:
        """Forget the last rows of every sequence, at most as many as the shortest has; returns how many. Raises
        ValueError if a window cannot go back so far, and changes nothing then.
        """
        count = min(count, *self.lengths)
        if not all(kv.can_go_on_from(kv.length - count) for kv in self.rows):
            raise ValueError(f"not every window can go back {count} tokens")
        for kv in self.rows:
            kv.trim_to(kv.length - count)
        # A ring has written over what the tokens before see.
        self._layer.forget_decoded()
        self._step = None
        return count

    @property
    def window(self) -> int:
        return self.pool.groups[0].window

    @property
    def lengths(self) -> list[int]:
        return [kv.length for kv in self.rows]

    @property
    def state(self) -> list[mx.array]:
        return list(self.pool.arrays)

    @property
    def nbytes(self) -> int:
        return sum(allocated_bytes(kv) for kv in self.rows) + sum(each.nbytes for each in self._layer._decoded.arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> "JudgedBatch":
        copied = JudgedBatch(self.pool, [kv.fork() for kv in self.rows], keeps_decoded=self.keeps_decoded)
        copied._unread = None if self._unread is None else list(self._unread)
        return copied

    # --- prompts ---

    def _begin(self) -> None:
        if self._step is None:
            self._step = DecodeStep.of(self.pool, self.rows)
            self._layer.begin(self._step, keeps_decoded=self.keeps_decoded)

    def _is_prompt(self, count: int) -> bool:
        return count > 1 or self._unread is not None

    def _prompt_rows(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the rows that are each sequence's own, and none of the padding; return what all of them see."""
        count, width = keys.shape[2], attention_width(max(self.lengths) + keys.shape[2])
        if self.window:
            width = min(max(self.lengths), self.window - 1) + count
        taken = [count] * len(self.rows)
        if self._unread is not None:
            taken = [min(count, left) for left in self._unread]
            self._unread = [left - took for left, took in zip(self._unread, taken, strict=True)]
        seen = []
        for slot, kv in enumerate(self.rows):
            new = [part[slot : slot + 1] for part in (keys, values)]
            seen.append([padded(part, width) for part in _seen_and_stored(kv, new, taken[slot])])
        self._layer.forget_decoded()
        seen_keys, seen_values = (mx.concatenate(list(parts)) for parts in zip(*seen, strict=True))
        return seen_keys, seen_values


def _seen_and_stored(kv: SequenceKV, new: Sequence[mx.array], own: int) -> Sequence[mx.array]:
    """What these rows see, padding included; the first `own` of them are stored."""
    layer = PrefillLayer(kv, 0)
    seen = layer.update_and_fetch(*new)
    if own:
        kv.append({0: tuple(part[:, :, :own] for part in layer.new_rows)})
    return seen


def padded(rows: mx.array, width: int) -> mx.array:
    """Rows [1, heads, n, dim] with zeros behind them, `width` in all."""
    return mx.pad(rows, [(0, 0), (0, 0), (0, width - rows.shape[2]), (0, 0)])
