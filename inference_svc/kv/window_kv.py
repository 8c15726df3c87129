"""One sliding-window layer's KV of one sequence: the rows that the next token sees, and a few more.

A token at position p sees (p - window, p]. Earlier rows are dropped when the buffer is full, so how many are held
depends on how the rows came. Attention's input does not: it is always the last `window - 1` rows and the new ones, in
the order of positions. So a restored sequence computes what it would have computed had it never left.
"""

from collections.abc import Sequence

import mlx.core as mx
from kvasir.formats.block_file import window_rows
from mlx_lm.models.base import create_causal_mask

from inference_svc.kv.capacity import window_capacity_rows
from inference_svc.kv.codec import Codec, EncodedRows
from inference_svc.kv.row_buffer import RowBuffer


class WindowKV:
    """K and V of the last of `offset` tokens, encoded as the layer's codecs say. Row 0 is of position `first`."""

    def __init__(self, key_codec: Codec, value_codec: Codec, window: int) -> None:
        self.keys = RowBuffer(key_codec)
        self.values = RowBuffer(value_codec)
        self.window = window
        self.offset = 0
        self.first = 0

    # --- what the model calls ---

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store n new rows [1, kv_heads, n, dim]; return what they see, [1, kv_heads, up to window - 1 + n, dim]."""
        seen = self.kept_rows + keys.shape[2]
        self.append((*self.keys.codec.encode(keys), *self.values.codec.encode(values)))
        return self.decoded(seen, keys.dtype, values.dtype)

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Mask of `rows` new tokens over the rows that `update_and_fetch` will return."""
        window, kept = min(window_size or self.window, self.window), self.kept_rows
        if kept + rows <= window and not return_array:
            return "causal" if rows > 1 else None
        mask: mx.array = create_causal_mask(rows, kept, window_size=window)
        return mask

    # --- rows ---

    @property
    def kept_rows(self) -> int:
        """How many stored rows the next token sees: these are persisted."""
        return window_rows(self.window, self.offset)

    def append(self, codes: EncodedRows) -> None:
        """Store encoded rows: the parts of K, then those of V."""
        count, split = codes[0].shape[2], self.keys.codec.part_count
        if self.offset - self.first + count > self.keys.capacity:
            self._drop_unseen(count)
        start = self.offset - self.first
        self.keys.write(start, codes[:split])
        self.values.write(start, codes[split:])
        self.offset += count

    def decoded(self, rows: int, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        """The last `rows` rows as attention sees them, [1, kv_heads, rows, dim] each."""
        held = self.offset - self.first
        keys, values = (buffer.read(held - rows, held) for buffer in self.buffers)
        return self.keys.codec.decode(keys, key_type), self.values.codec.decode(values, value_type)

    @property
    def buffers(self) -> tuple[RowBuffer, RowBuffer]:
        return self.keys, self.values

    @property
    def held_rows(self) -> int:
        """How many rows are still in the buffers, at least `kept_rows`."""
        return self.offset - self.first

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [part for buffer in self.buffers for part in buffer.parts]

    @property
    def nbytes(self) -> int:
        return sum(buffer.allocated_bytes for buffer in self.buffers)

    # --- back in time ---

    def is_trimmable(self) -> bool:
        """Whether it can go back to any length: while nothing was dropped."""
        return self.first == 0

    def can_trim_to(self, length: int) -> bool:
        """Whether everything that a token at position `length` sees is still there."""
        return length <= self.offset and length - window_rows(self.window, length) >= self.first

    def trim(self, rows: int) -> int:
        """Forget the last rows; returns how many. Raises ValueError when the rows seen from there were dropped."""
        rows = min(rows, self.offset)
        if not self.can_trim_to(self.offset - rows):
            raise ValueError(f"a window whose rows begin at {self.first} cannot go back to {self.offset - rows} tokens")
        self.offset -= rows
        return rows

    def fork(self) -> "WindowKV":
        """The same rows, without copying them."""
        other = WindowKV(self.keys.codec, self.values.codec, self.window)
        other.keys, other.values = self.keys.fork(), self.values.fork()
        other.offset, other.first = self.offset, self.first
        return other

    def compacted(self) -> "WindowKV":
        """A copy that holds the rows that the next token sees and no more: for rewind points."""
        other = WindowKV(self.keys.codec, self.values.codec, self.window)
        other.offset, other.first = self.offset, self.offset - self.kept_rows
        for copied, buffer in zip(other.buffers, self.buffers, strict=True):
            copied.parts = tuple(mx.contiguous(part) for part in self._kept(buffer))
        return other

    def empty_like(self) -> "WindowKV":
        """A window of the same form that has seen no token."""
        return WindowKV(self.keys.codec, self.values.codec, self.window)

    # --- files ---

    def part_count_after(self, tokens: int) -> int:
        """How many tensors of this layer a state file after `tokens` tokens has."""
        has_rows = window_rows(self.window, tokens) > 0
        return has_rows * (self.keys.codec.part_count + self.values.codec.part_count)

    def to_bytes(self) -> list[bytes]:
        """Bytes of each part of K, then of V, [kv_heads, kept_rows, …]. It must have been evaluated."""
        stop, rows = self.held_rows, self.kept_rows
        return [data for buffer in self.buffers for data in buffer.to_bytes(stop - rows, stop)] if rows else []

    def put_parts(self, offset: int, parts: Sequence[mx.array]) -> None:
        """Take over a state file's parts of K, then of V, [1, kv_heads, kept rows, …], after `offset` tokens."""
        split = self.keys.codec.part_count
        self.offset = offset
        self.first = offset - self.kept_rows
        self.keys.parts, self.values.parts = tuple(parts[:split]), tuple(parts[split:])

    def _drop_unseen(self, coming: int) -> None:
        """Move the rows that the next token sees to the front of new buffers, which have room for `coming` more."""
        kept = self.kept_rows
        capacity = window_capacity_rows(kept, coming)
        for buffer in self.buffers:
            if buffer.parts:
                buffer.parts = tuple(_with_room(part, capacity) for part in self._kept(buffer))
        self.first = self.offset - kept

    def _kept(self, buffer: RowBuffer) -> EncodedRows:
        return buffer.read(self.held_rows - self.kept_rows, self.held_rows) if buffer.parts else ()


def _with_room(part: mx.array, capacity: int) -> mx.array:
    spare = mx.zeros((*part.shape[:2], capacity - part.shape[2], *part.shape[3:]), dtype=part.dtype)
    return mx.concatenate([part, spare], axis=2)
