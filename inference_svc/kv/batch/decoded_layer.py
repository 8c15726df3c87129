"""One layer of a batch whose attention reads a de-quantized copy of all rows: for a CPU. Where a row lies in the copy
depends on its position alone, so a sequence's rows are summed in the same order whatever else is in the batch: with
`row_exact` bit for bit as alone. Where copies of all layers are too large, each is dropped once read.
"""

import mlx.core as mx

from inference_svc.kv.batch.decode_step import DecodeStep, RowPlaces, places_of
from inference_svc.kv.batch.drafted_attention import attend_by_slot
from inference_svc.kv.batch.slot_arrays import SlotArrays
from inference_svc.kv.batch.window_attention import attend_window, seen_rows, sums_windows_alike
from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.model_hooks.row_exact import attention_width
from inference_svc.kv.pages.page_rows import UNIT
from inference_svc.kv.pages.pool import KvPool


class DecodedLayer:
    """K and V of one layer, in mlx-lm's cache protocol. No attribute may be called `bits`."""

    def __init__(self, pool: KvPool, layer: int) -> None:
        self._pool = pool
        self._layer = layer
        self._group = pool.group_number(layer)
        self._window = pool.groups[self._group].window
        self._keys, self._values = pool.codecs[layer]
        # Where K and V are stored alike they are worked on as one array, V's heads behind those of K.
        page_format = pool.formats[layer]
        self._is_stacked = self._keys == self._values and page_format.key.dim == page_format.value.dim
        parts = self._keys.part_count
        order = range(parts + self._values.part_count)
        stacked_order = (number for part in range(parts) for number in (part, parts + part))
        self._places = RowPlaces.of(page_format, tuple(stacked_order if self._is_stacked else order))
        self._decoded = SlotArrays()
        self._is_decoded: list[bool] = []
        self._keeps_decoded = True
        self._step: DecodeStep | None = None
        self._by_slot: EncodedRows = ()  # K and V by slot, and by row, where these differ: until the pass attends

    # --- what the batch calls ---

    def begin(self, step: DecodeStep, *, keeps_decoded: bool) -> None:
        """The next pass computes the rows of `step`. `keeps_decoded`: the copy stays for the next."""
        if not keeps_decoded:
            self.forget_decoded()
        self._by_slot = ()
        self._keeps_decoded = keeps_decoded
        self._is_decoded += [False] * (len(step.sequences) - len(self._is_decoded))
        self._step = step

    def leave(self, slot: int, last: int, last_length: int) -> None:
        """The sequence of `slot` is gone; that of the last slot, of so many tokens, takes its place."""
        self._step = None  # which holds the sequence, and so its pages
        if last < len(self._is_decoded):
            if slot != last and self._is_decoded[last]:
                self._decoded.move(last, slot, min(last_length, self._window or last_length))
            self._is_decoded[slot] = self._is_decoded[last]
            self._is_decoded.pop()
        elif slot < len(self._is_decoded):
            self._is_decoded[slot] = False

    def forget_decoded(self) -> None:
        self._step = None
        self._decoded.clear()
        self._is_decoded = []

    def decoded_values(self, slots: int, longest: int) -> int:
        """Values that the decoded copy would have room for in a step of so many sequences."""
        reserved_slots, capacity = self._decoded.reserved(slots, self._width_of(longest))
        return reserved_slots * capacity * self._token_values

    def read_values(self, longest: int) -> int:
        """Values that each row of a step reads, if the longest sequence has so many tokens."""
        return self._width_of(longest) * self._token_values

    def has_spare(self, slots: int, longest: int) -> bool:
        """Whether the decoded copy is much larger than so many sequences need."""
        return 4 * slots * self._width_of(longest) < self._decoded.slots * self._decoded.capacity

    # --- what the model calls ---

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows [rows, kv_heads, 1, dim]; all rows of each one's sequence, of which a mask hides others'."""
        if keys.shape[2] != 1:
            raise ValueError(f"a batch decodes each token in a row of its own, not {keys.shape[2]}")
        rows = self._encode(keys, values)
        self._store(rows)
        slots, width = len(self._now.sequences), self._width
        new = self._seen_by_others(rows, keys, values)
        self._decoded.reserve(slots, width, new)
        for slot in sorted(set(self._now.slot_of)):  # of others, rows may be further than the copy's width
            if not self._is_decoded[slot]:
                self._fill(slot, keys.dtype, values.dtype)
                self._is_decoded[slot] = True
        self._decoded.put_each(places_of(self._now, self._window), new, self._row_slots)
        read_keys, read_values = self._split(self._decoded.read(slots, width, self._row_slots))
        if self._now.stored is not None or not self._now.has_one_row_each:
            whole = self._decoded.read(slots, self._decoded.capacity)  # a window's sums may go over a few rows more
            self._by_slot = (*self._split(whole), read_keys, read_values)
        if not self._keeps_decoded:
            self._decoded.clear()
            self._is_decoded = [False] * slots
        return read_keys, read_values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
    ) -> mx.array | None:
        """Attention of queries [rows, heads, 1, dim], slots having several or none, over K and V of slots. None unless
        `keys` and `values` are those that `update_and_fetch` gave, by row: a model may have made others of them; and
        for a row of each slot, unless it is a window's, which is summed as others of windows are.
        """
        if not self._by_slot or keys is not self._by_slot[2] or values is not self._by_slot[3]:
            return None
        slot_keys, slot_values, *_ = self._by_slot
        self._by_slot = ()  # a reference that stays would make the next write copy them
        is_window = self._now.stored is not None and queries.dtype == keys.dtype == mx.float32
        shared = queries.shape[1] // keys.shape[1]
        if is_window and sums_windows_alike(shared, keys.shape[-1], values.shape[-1]):
            return self._attended_windows(queries, slot_keys, slot_values, scale)
        if self._now.has_one_row_each:
            return None
        seen = slot_keys[:, :, : self._width], slot_values[:, :, : self._width]
        attended = attend_by_slot(queries, *seen, self._now.counts, scale, mask)
        for row in self._now.alone:
            attended[row : row + 1] = self._attended_alone(row, queries, slot_keys, slot_values, scale)
        return attended

    def _attended_alone(self, row: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """As `attend`, of one row [1, heads, 1, dim], as a prefill of its token alone calls MLX."""
        slot, seen = self._now.slot_of[row], self._now.lengths[row] + 1
        own_keys, own_values = (array[slot : slot + 1, :, :seen] for array in (keys, values))
        return mx.fast.scaled_dot_product_attention(queries[row : row + 1], own_keys, own_values, scale=scale)

    def _attended_windows(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """As `attend`, over K and V by slot, each slot by products of its own."""
        attended, row, hidden = [], 0, iter(self._now.hidden)
        for slot, count in enumerate(self._now.counts):
            if count and row in self._now.alone:
                attended.append(self._attended_alone(row, queries, keys, values, scale))
                row, count = row + 1, count - 1
            if count:
                own = next(hidden)
                seen_keys, seen_values = seen_rows(keys[slot], own), seen_rows(values[slot], own)
                attended.append(attend_window(queries[row : row + count], seen_keys, seen_values, scale, own))
                row += count
        return mx.concatenate(attended) if len(attended) > 1 else attended[0]

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Which stored rows each new one may attend to, bool [rows, 1, 1, stored]. None for every row."""
        if count != 1:
            raise ValueError(f"a batch decodes each token in a row of its own, not {count}")
        lengths, width, seen = self._now.lengths, self._width, self._now.seen[:, None, None, None]
        if not self._window:
            if window_size is not None:
                raise ValueError("a layer with a window cannot use a KV that keeps all tokens")
            is_whole = min(lengths) + 1 == width and self._now.has_one_row_each and not return_array
            return None if is_whole else mx.arange(width)[None, None, None] <= seen
        window = min(window_size or self._window, self._window)
        is_whole = min(min(lengths) + 1, self._window) == width and window == self._window
        if is_whole and not return_array:
            return None
        places = mx.arange(width)
        age = (seen - places) % self._window
        return (age < mx.minimum(seen + 1, window)) & (places < self._window)

    @property
    def offset(self) -> mx.array:
        return self._now.offsets

    # --- rows ---

    @property
    def _now(self) -> DecodeStep:
        assert self._step is not None
        return self._step

    @property
    def _row_slots(self) -> mx.array | None:
        """The slot of each row, where some have several or none."""
        return None if self._now.has_one_row_each else self._now.slots

    @property
    def _token_values(self) -> int:
        page_format = self._pool.formats[self._layer]
        return page_format.key.kv_heads * (page_format.key.dim + page_format.value.dim)

    @property
    def _width(self) -> int:
        return self._width_of(max(self._now.lengths))

    def _width_of(self, longest: int) -> int:
        return attention_width(min(longest + 1, self._window) if self._window else longest + 1)

    def _place(self, position: int) -> int:
        return position % self._window if self._window else position

    def _encode(self, keys: mx.array, values: mx.array) -> EncodedRows:
        if self._is_stacked:
            return self._keys.encode(mx.concatenate([keys, values], axis=1))
        return (*self._keys.encode(keys), *self._values.encode(values))

    def _store(self, rows: EncodedRows) -> None:
        if self._now.stored is not None:
            rows = tuple(part[self._now.stored_rows] for part in rows) if self._now.stored else ()
        if not rows:
            return
        count, group = rows[0].shape[0], self._now.groups[self._group]
        units = mx.concatenate([part.view(UNIT).reshape(count, -1) for part in rows], axis=1)
        self._pool.write_rows(self._layer, *group.units(self._places), units)

    def _seen_by_others(self, rows: EncodedRows, keys: mx.array, values: mx.array) -> EncodedRows:
        """New rows as the decoded copy holds them: as they are stored, or exact if they are not."""
        new = self._decode(rows, keys.dtype, values.dtype)
        if self._now.stored is None:
            return new
        exact = (mx.concatenate([keys, values], axis=1),) if self._is_stacked else (keys, values)
        return tuple(mx.where(self._now.is_exact, *pair) for pair in zip(exact, new, strict=True))

    def _decode(self, rows: EncodedRows, key_type: mx.Dtype, value_type: mx.Dtype) -> EncodedRows:
        """Values of rows that were encoded together, as the decoded copy holds them."""
        if self._is_stacked:
            return (self._keys.decode(rows, key_type),)
        split = self._keys.part_count
        return self._keys.decode(rows[:split], key_type), self._values.decode(rows[split:], value_type)

    def _split(self, decoded: EncodedRows) -> EncodedRows:
        if not self._is_stacked:
            return decoded
        heads = self._pool.formats[self._layer].key.kv_heads
        return decoded[0][:, :heads], decoded[0][:, heads:]

    def _fill(self, slot: int, key_type: mx.Dtype, value_type: mx.Dtype) -> None:
        """Decode a sequence's stored rows that the new token sees into its slot of the copy."""
        kv = self._now.sequences[slot]
        # The slot's last sequence may have left NaN or infinity, and a masked row still counts as 0 times its values.
        self._decoded.zero(slot)
        rows = kv.seen_rows(self._layer)
        if rows is None:
            return
        split = self._keys.part_count
        values = (self._keys.decode(rows[:split], key_type), self._values.decode(rows[split:], value_type))
        decoded = (mx.concatenate(list(values), axis=1),) if self._is_stacked else values
        count = rows[0].shape[2]
        place = self._place(kv.length - count)
        until_end = min(count, self._window - place) if self._window else count
        self._decoded.put(slot, place, tuple(part[:, :, :until_end] for part in decoded))
        if until_end < count:
            self._decoded.put(slot, 0, tuple(part[:, :, until_end:] for part in decoded))
