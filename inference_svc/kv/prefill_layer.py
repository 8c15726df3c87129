"""One layer of one sequence while a chunk of its tokens is computed, as mlx-lm's models call it. Attention sees
de-quantized rows, even of new tokens: so a restored sequence goes on as if it had never left. The new rows are kept
here until the pass is over: one that fails has changed nothing.
"""

from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from inference_svc.kv.attention.geometry import MAX_QUERIES
from inference_svc.kv.attention.in_place import append_rows, gathered_values
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.attention.paged import paged_attention
from inference_svc.kv.attention.reference import LayerPages, Scoring
from inference_svc.kv.attention.tiles import most_queries
from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.pages.block_table import window_start
from inference_svc.kv.pages.page_rows import joined_rows
from inference_svc.kv.sequence_kv import PassRoom, SequenceKV
from inference_svc.kv.state_kv import StateKV

LONG_TOKENS = 2048  # behind fewer tokens MLX's attention over de-quantized rows is as fast for a few queries
# For 16-bit types MLX's attention on CUDA makes a plan for each pair of lengths, which takes 45 ms when a process has
# not seen it. So it is left the passes whose lengths come again, and those for which the kernels take longer by more.
_RECURRING_TOKENS = 1024
_MOST_PAIRS = 1 << 26  # of queries and tokens


class PrefillLayer:
    """K and V of one layer behind the stored rows. No attribute may be called `bits`, by which mlx-lm knows its own."""

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
        """Mask of `rows` new tokens over all rows, as mlx-lm's caches give it. Raises ValueError for another window."""
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


class InPlaceLayer(PrefillLayer):
    """As above on a GPU: kernels write the new rows to pages behind the sequence's length, where nobody reads them
    before the pass is over, and read all rows from there. Rows are attended to where they lie, by splits of the
    sequence, if `attends` is set: a few behind a long sequence and, where the kernels have tiles, all but the passes
    that are left to MLX.
    """

    attends = False

    def __init__(self, kv: SequenceKV, layer: int, room: PassRoom, compute_type: str) -> None:
        super().__init__(kv, layer)
        self.room = room
        self._most_queries = most_queries(kv.pool.formats[layer], compute_type)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        pool, before = self._kv.pool, self.offset
        self.offset += keys.shape[2]
        span = self.room.span(self._layer, keys.shape[2])
        assert pool.dialect is not None
        array, table = pool.arrays[pool.slot_of(self._layer)], span.block_table[None]
        pages = LayerPages(array, pool.formats[self._layer], table)
        stored = append_rows(keys, values, pages, span.places, pool.dialect, pool.order)
        self.new_rows = (stored,)
        # Not remembered from `make_mask`: a model takes the mask of all from one layer of a kind.
        self.attends = self._attends(before, keys.shape[2])
        if self.attends:
            self._attended = (pages, stored[-1:])
            return keys, values
        start = window_start(self.window, before)
        stop = before if self.window else self.offset
        dtype = keys.dtype
        if not self.window:
            return gathered_values(pages, start, stop, stored, dtype, pool.dialect)
        new = (
            self._key_codec.decode(self._key_codec.encode(keys), dtype),
            self._value_codec.decode(self._value_codec.encode(values), dtype),
        )
        if start == stop:
            return new
        seen = gathered_values(pages, start, stop, stored, dtype, pool.dialect)
        all_keys, all_values = joined_rows(seen, new)
        return all_keys, all_values

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """As `PrefillLayer.make_mask`; none where `attend` will be called."""
        is_masked = not self._attends(self.offset, rows)
        return super().make_mask(rows, return_array, window_size) if is_masked else None

    def _attends(self, stored: int, count: int) -> bool:
        """Whether `count` rows are attended to where they lie: none may leave the window within the chunk."""
        if count > self._most_queries or (self.window and count >= self.window):
            return False
        if self._most_queries <= MAX_QUERIES:
            return stored >= LONG_TOKENS
        is_cuda = self._kv.pool.dialect is Dialect.CUDA
        recurs = is_cuda and stored % _RECURRING_TOKENS == count % _RECURRING_TOKENS == 0
        return not recurs and count * (stored + count) <= _MOST_PAIRS

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        if mask is not None:
            raise ValueError("attention over pages takes no mask")
        scoring = Scoring(scale, self.window or None, sinks)
        return paged_attention(queries, *self._attended, scoring, self._kv.pool.dialect)


AnyLayer: TypeAlias = PrefillLayer | StateKV


def prefill_layers(kv: SequenceKV, compute_type: str = "float32") -> list[AnyLayer]:
    """What a model is given for the next chunk of the sequence, one for each entry of the layout."""
    room = PassRoom(kv)
    layers: list[AnyLayer] = []
    for index in range(len(kv.pool.identity.layers)):
        if index in kv.states:
            layers.append(kv.states[index].fork())
        elif kv.pool.dialect is not None:
            layers.append(InPlaceLayer(kv, index, room, compute_type))
        else:
            layers.append(PrefillLayer(kv, index))
    return layers


def commit(kv: SequenceKV, layers: Sequence[AnyLayer], count: int) -> None:
    """Make what a pass computed part of the sequence. Evaluates. Raises ResourceExhausted, and has changed nothing."""
    rows = {index: layer.new_rows for index, layer in enumerate(layers) if isinstance(layer, PrefillLayer)}
    if rows and kv.pool.dialect is None:
        kv.append(rows)
    else:
        mx.eval([*rows.values()])
        for room in _rooms(layers):
            room.move_in()
        kv.advanced(count)
    for index, layer in enumerate(layers):
        if isinstance(layer, StateKV):
            kv.states[index] = layer
    kv.pool.evaluate()
    mx.eval(kv.state_arrays)


def abandon(layers: Sequence[AnyLayer]) -> None:
    """Give back at once what a pass that failed took of the pool: its error may hold the layers for long."""
    for room in _rooms(layers):
        room.fail()


def _rooms(layers: Sequence[AnyLayer]) -> list[PassRoom]:
    return [layer.room for layer in layers if isinstance(layer, InPlaceLayer)][:1]
