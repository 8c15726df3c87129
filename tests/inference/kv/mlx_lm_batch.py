"""mlx-lm's batch protocol over our batched KV, so that mlx-lm's unmodified BatchGenerator can judge it.

The engine decodes one token of each sequence and computes prompts alone. mlx-lm also computes prompts in a batch,
padded on the right; that, and its words for joining and leaving, live here.
"""

import copy
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

import mlx.core as mx

from inference_svc.kv.batch.batch_kv import BatchLayerKV
from inference_svc.kv.batch.batch_window import BatchWindowKV
from inference_svc.kv.batch.batched_rows import BatchedRows
from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.layers import AnyLayerKV
from inference_svc.kv.row_exact import attention_width
from inference_svc.kv.window_kv import WindowKV

RowT = TypeVar("RowT", bound=LayerKV | WindowKV)


class JudgedLayerKV(LayerKV):
    """A layer that mlx-lm can put into a batch."""

    def merge(self, caches: Sequence[LayerKV]) -> "JudgedBatchKV":
        return JudgedBatchKV.merge(caches)


class JudgedWindowKV(WindowKV):
    """A window that mlx-lm can put into a batch."""

    def merge(self, caches: Sequence[WindowKV]) -> "JudgedBatchWindowKV":
        return JudgedBatchWindowKV.merge(caches)


def judged(layer: AnyLayerKV) -> Any:
    """A fork of a layer that mlx-lm can put into a batch."""
    forked: Any = layer.fork()
    forked.__class__ = JudgedLayerKV if isinstance(layer, LayerKV) else JudgedWindowKV
    return forked


def judged_layers(layers: Sequence[AnyLayerKV]) -> list[Any]:
    return [judged(layer) for layer in layers]


class JudgedBatch(BatchedRows[RowT], Generic[RowT]):
    """What both kinds of layers have in common."""

    _unread: list[int] | None = None  # while a right-padded prompt is computed: tokens left, by slot

    @classmethod
    def merge(cls, caches: Sequence[RowT]) -> Self:
        """A batch of sequences that go on alone as well; neither side sees what the other writes."""
        return cls([judged(cache) for cache in caches])

    def extend(self, other: Self) -> None:
        """Add the sequences of another batch, which must not be used any more."""
        for row in other._flush_all():
            self.join(row)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences of these slots, in this order."""
        kept: Any = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        self.__init__([self.flush(slot) for slot in kept], keeps_decoded=self.keeps_decoded)  # type: ignore[misc]

    def extract(self, slot: int) -> Any:
        """A sequence as it would be alone; the batch keeps its own."""
        return judged(self.flush(slot))

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

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows) + self.scratch_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)([self.extract(slot) for slot in range(len(self.rows))], keeps_decoded=self.keeps_decoded)
        copied._unread = copy.copy(self._unread)
        return copied

    def _is_prompt(self, count: int) -> bool:
        return count > 1 or self._unread is not None

    def _write_own(self, codes: EncodedRows) -> None:
        """Write the rows that are each sequence's own, and none of the padding."""
        count = codes[0].shape[2]
        taken = [count] * len(self.rows)
        if self._unread is not None:
            taken = [min(count, left) for left in self._unread]
            self._unread = [left - took for left, took in zip(self._unread, taken, strict=True)]
        for slot, rows in enumerate(taken):
            if rows:
                self.flush(slot).append(self._unstacked(tuple(part[slot : slot + 1, :, :rows] for part in codes)))
        self._forget_decoded()


class JudgedBatchKV(JudgedBatch[LayerKV], BatchLayerKV):
    """Layers that keep all tokens."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self._is_prompt(keys.shape[2]):
            return super().update_and_fetch(keys, values)
        width = attention_width(max(self.lengths) + keys.shape[2])
        self._write_own(self._encode(keys, values))
        decoded = [row.decoded(keys.dtype, values.dtype) for row in self.rows]
        seen_keys, seen_values = (
            mx.concatenate([padded(part, width) for part in parts]) for parts in zip(*decoded, strict=True)
        )
        return seen_keys, seen_values

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        if not self._is_prompt(count):
            return super().make_mask(count, return_array, window_size)
        positions = mx.arange(attention_width(max(self.lengths) + count))
        last = mx.array(self.lengths)[:, None] + mx.arange(count)
        return positions[None, None, None] <= last[:, None, :, None]

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        """Forget the last rows of every sequence, at most as many as the shortest has; returns how many."""
        count = min(count, *self.lengths)
        for row in self._flush_all():
            row.trim(count)
        return count


class JudgedBatchWindowKV(JudgedBatch[WindowKV], BatchWindowKV):
    """Sliding-window layers: a single token sees a ring; several see the rows before them and themselves, in order."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        count = keys.shape[2]
        if not self._is_prompt(count):
            return super().update_and_fetch(keys, values)
        codes = self._encode(keys, values)
        new = self._unstacked(self._decode(codes, keys.dtype, values.dtype))
        kept = [self.flush(slot).kept_rows for slot in range(len(self.rows))]
        seen = []
        for slot, row in enumerate(self.rows):
            parts = [part[slot : slot + 1] for part in new]
            if kept[slot]:
                before = row.decoded(kept[slot], keys.dtype, values.dtype)
                parts = [mx.concatenate([old, part], axis=2) for old, part in zip(before, parts, strict=True)]
            seen.append([padded(part, max(kept) + count) for part in parts])
        self._write_own(codes)
        seen_keys, seen_values = (mx.concatenate(list(parts)) for parts in zip(*seen, strict=True))
        return seen_keys, seen_values

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        if not self._is_prompt(count):
            return super().make_mask(count, return_array, window_size)
        kept = mx.minimum(mx.array(self.lengths)[:, None, None, None], self._window - 1)
        rows = mx.arange(min(max(self.lengths), self._window - 1) + count)[None, None, None]
        last = kept + mx.arange(count)[None, None, :, None]
        return (rows <= last) & (rows > last - min(window_size or self._window, self._window))

    def is_trimmable(self) -> bool:
        return all(row.is_trimmable() for row in self.rows)

    def trim(self, count: int) -> int:
        """As above. Raises ValueError when what came before them was dropped, and changes nothing then."""
        count = min(count, *self.lengths)
        rows = self._flush_all()
        if not all(row.can_trim_to(row.offset - count) for row in rows):
            raise ValueError(f"not every window can go back {count} tokens")
        for row in rows:
            row.trim(count)
        # A ring has written over what the tokens before see.
        self._forget_decoded()
        return count


def padded(rows: mx.array, width: int) -> mx.array:
    """Rows [1, heads, n, dim] with zeros behind them, `width` in all."""
    return mx.pad(rows, [(0, 0), (0, 0), (0, width - rows.shape[2]), (0, 0)])
