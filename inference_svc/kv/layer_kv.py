"""One layer's KV of one sequence, in the form that mlx-lm's models call.

Attention sees de-quantized rows, even of the tokens just computed. Its input is a function of the stored rows alone,
which is why a restored sequence goes on as if it had never left. Only the first `offset` rows are ever read, so a trim
leaves nothing that attention could see.
"""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from inference_svc.kv.codec import Codec, EncodedRows
from inference_svc.kv.row_buffer import RowBuffer


class LayerKV:
    """K and V of the first `offset` tokens.

    No attribute may be called `bits`: mlx-lm recognizes its own quantized cache by that name.
    """

    def __init__(self, key_codec: Codec, value_codec: Codec) -> None:
        self.keys = RowBuffer(key_codec)
        self.values = RowBuffer(value_codec)
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [1, kv_heads, rows, dim]; return all rows as attention sees them, in the same type."""
        self.append((*self.keys.codec.encode(keys), *self.values.codec.encode(values)))
        return self.decoded(keys.dtype, values.dtype)

    def append(self, codes: EncodedRows) -> None:
        """Store encoded rows: the parts of K, then those of V."""
        split = self.keys.codec.part_count
        self.keys.write(self.offset, codes[:split])
        self.values.write(self.offset, codes[split:])
        self.offset += codes[0].shape[2]

    def decoded(self, key_type: mx.Dtype, value_type: mx.Dtype) -> tuple[mx.array, mx.array]:
        """All rows as attention sees them, [1, kv_heads, offset, dim] each."""
        return self.keys.decoded(self.offset, key_type), self.values.decoded(self.offset, value_type)

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Causal mask of `rows` new tokens behind the stored ones, as mlx-lm's own caches give it."""
        if window_size is not None:
            raise ValueError("a layer with a window cannot use a KV that keeps all tokens")
        if rows == 1:
            return None
        return create_causal_mask(rows, self.offset) if return_array else "causal"

    @property
    def buffers(self) -> tuple[RowBuffer, RowBuffer]:
        return self.keys, self.values

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [part for buffer in self.buffers for part in buffer.parts]

    @property
    def nbytes(self) -> int:
        return sum(buffer.allocated_bytes for buffer in self.buffers)

    def trim(self, rows: int) -> int:
        """Forget the last rows; returns how many."""
        rows = min(rows, self.offset)
        self.offset -= rows
        return rows

    def fork(self) -> "LayerKV":
        other = LayerKV(self.keys.codec, self.values.codec)
        other.keys, other.values = self.keys.fork(), self.values.fork()
        other.offset = self.offset
        return other
