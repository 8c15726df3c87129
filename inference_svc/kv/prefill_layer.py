"""One layer of one sequence while a chunk of its tokens is computed, in the form that mlx-lm's models call.

Attention sees de-quantized rows, even of the tokens just computed. Its input is a function of the stored rows alone,
which is why a restored sequence goes on as if it had never left. The new rows are kept here until the whole pass has
been computed: a pass that fails or is cancelled has changed nothing.
"""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from inference_svc.kv.block_table import window_start
from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.page_rows import joined_rows
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.state_kv import StateKV


class PrefillLayer:
    """K and V of one layer behind the stored rows of `kv`.

    No attribute may be called `bits`: mlx-lm recognizes its own quantized cache by that name.
    """

    def __init__(self, kv: SequenceKV, layer: int) -> None:
        self.offset = kv.length
        self.window = kv.table_of(layer).window
        self.new_rows: EncodedRows = ()  # the parts of K, then those of V
        self._kv = kv
        self._layer = layer
        self._key_codec, self._value_codec = kv.pool.codecs[layer]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take n new rows [1, kv_heads, n, dim]; return what they see: the stored rows and themselves, in order."""
        self.new_rows = (*self._key_codec.encode(keys), *self._value_codec.encode(values))
        self.offset += keys.shape[2]
        stored = self._kv.seen_rows(self._layer)
        seen = self.new_rows if stored is None else joined_rows(stored, self.new_rows)
        split = self._key_codec.part_count
        return self._key_codec.decode(seen[:split], keys.dtype), self._value_codec.decode(seen[split:], values.dtype)

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Mask of `rows` new tokens over the rows that `update_and_fetch` will return, as mlx-lm's own caches give it.
        Raises ValueError if a window is asked of a layer that keeps all tokens.
        """
        if window_size is not None and not self.window:
            raise ValueError("a layer with a window cannot use a KV that keeps all tokens")
        if not self.window:
            if rows == 1:
                return None
            return create_causal_mask(rows, self.offset) if return_array else "causal"
        seen = self.offset - window_start(self.window, self.offset)
        window = min(window_size or self.window, self.window)
        if seen + rows <= window and not return_array:
            return "causal" if rows > 1 else None
        mask: mx.array = create_causal_mask(rows, seen, window_size=window)
        return mask


def prefill_layers(kv: SequenceKV) -> list[PrefillLayer | StateKV]:
    """What a model is given for the next chunk of the sequence, one for each entry of the layout."""
    return [
        kv.states[index].fork() if index in kv.states else PrefillLayer(kv, index)
        for index in range(len(kv.pool.identity.layers))
    ]


def commit(kv: SequenceKV, layers: list[PrefillLayer | StateKV], count: int) -> None:
    """Make what a pass computed over `count` tokens part of the sequence. Evaluates. Raises ResourceExhausted, and has
    changed nothing, if the pool has no room.
    """
    rows = {index: layer.new_rows for index, layer in enumerate(layers) if isinstance(layer, PrefillLayer)}
    if rows:
        kv.append(rows)
    else:
        kv.advanced(count)
    for index, layer in enumerate(layers):
        if isinstance(layer, StateKV):
            kv.states[index] = layer
    mx.eval(kv.pool.arrays, kv.state_arrays)
