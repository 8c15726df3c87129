"""The batch of all sequences that are decoding: in a pass one token of each, and drafts behind it."""

from collections.abc import Sequence

import mlx.core as mx

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.batch_state import BatchStateKV
from inference_svc.kv.batch.decode_step import (
    DecodeStep,
    Forward,
    KeptGraph,
    KeptPlaces,
    KeptTable,
    PassArrays,
    PassRows,
    nobodys_page,
    padded_lengths,
    prepare_rows,
    table_width,
)
from inference_svc.kv.batch.decoded_layer import DecodedLayer
from inference_svc.kv.batch.draw_pairs import in_pairs
from inference_svc.kv.batch.fused_layer import FusedLayer
from inference_svc.kv.batch.window_pass import WindowPass
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV

_DRAFTED_ROWS = 64  # of a pass at most, with drafts: so many share one read of the weights
_DRAFTED_VALUES = 1 << 25  # of decoded K and V that rows of such a pass read in a layer: rows do not share that read
_WINDOW_ROWS = 256  # of a pass over windows of masks at most: a cell's, so that a cancel waits no longer for it
_SCORE_SHARE = 16  # a row has at least so many values of K and V for each of its scores
_LEAST_DRAFTED_ROWS = 4  # of a pass with drafts, or this doubled: few numbers, because each has a graph of its own
_MOST_DOUBLED_ROWS = 64  # of a step on CUDA, where its products read the weights once; beyond, multiples of a half


class DecodeBatch:
    """Sequences of one pool, by slot. Their rows lie in the pool's pages: to join or to leave copies none of them.
    `forward` maps tokens [slots, 1] and the layers' batched caches to logits [slots, 1, vocabulary]. `decoded_budget`
    bounds the values in the decoded copies of all layers together; above it, rows are decoded on read. `pass_rows`: a
    pass over a kept graph computes exactly so many rows, some of them empty, so that no kernel is chosen by their
    number; 0: as many as there are. `has_window_kernel`: whether one attends over windows of masks.
    """

    def __init__(
        self,
        pool: KvPool,
        forward: Forward,
        decoded_budget: int,
        *,
        pass_rows: int = 0,
        has_window_kernel: bool = False,
    ) -> None:
        self._pool = pool
        self._forward = forward
        self._decoded_budget = decoded_budget
        self._pass_rows = pass_rows
        self.sequences: list[SequenceKV] = []
        self._states = {
            index: BatchStateKV() for index in range(len(pool.identity.layers)) if index not in pool.formats
        }
        has_kernels = pool.dialect is not None
        self._fused = {index: FusedLayer(pool, index, is_alone=not pass_rows) for index in pool.formats if has_kernels}
        self._decoded = {index: DecodedLayer(pool, index) for index in pool.formats if not has_kernels}
        # Whether MLX may keep the step's graph: kernels write the pages, so no array goes on from step to step.
        self.keeps_graph = has_kernels and not self._states
        self._kept_graph = KeptGraph(self._traced)
        self.numbers = pool.numbers
        self._kept_tables = [KeptTable(pool.numbers) for _ in pool.groups]
        self._kept_places = KeptPlaces(pool.numbers)
        self._windows = WindowPass(pool, forward, by_kernel=has_window_kernel)

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, kv: SequenceKV) -> bool:
        return any(kv is other for other in self.sequences)

    def join(self, kv: SequenceKV) -> None:
        """Add a sequence. It must not be used elsewhere until it leaves."""
        for index, state in self._states.items():
            state.join(kv.states[index])
        self.sequences.append(kv)

    def hold(self, sequences: Sequence[SequenceKV]) -> None:
        """Make the batch hold these sequences and no others."""
        staying, held = set(map(id, sequences)), set(map(id, self.sequences))
        if staying == held:
            return
        # From the last slot on: when many turns leave at once, few are moved to take their places.
        for kv in [kv for kv in reversed(self.sequences) if id(kv) not in staying]:
            self.leave(kv)
        for kv in sequences:
            if id(kv) not in held:
                self.join(kv)

    def leave(self, kv: SequenceKV) -> None:
        """Take a sequence out. The last slot takes its place. Without effect if it is not in the batch."""
        if kv not in self:
            return
        slot, last = self._slot(kv), len(self.sequences) - 1
        for state in self._states.values():
            state.leave(slot)
        for layer in self._decoded.values():
            layer.leave(slot, last, self.sequences[last].length)
        self.sequences[slot] = self.sequences[last]
        self.sequences.pop()
        mx.eval(kv.state_arrays)
        self._forget_spare()

    def flush(self, kv: SequenceKV) -> None:
        """Give a sequence its own states, so that they can be read. It stays in the batch."""
        if kv in self and self._states:
            for state in self._states.values():
                state.flush(self._slot(kv))
            mx.eval(kv.state_arrays)

    def step(self, token_ids: Sequence[int] | mx.array, counts: Sequence[int] | None = None) -> mx.array:
        """One more token of each sequence, or `counts` of tokens, of which each sequence has the first then: the caller
        advances it by drafts that were right; logits [rows, vocabulary], not evaluated. Raises ResourceExhausted;
        ValueError for drafts where KV that was written cannot be dropped.
        """
        if counts is not None and not self._takes_drafts:
            raise ValueError("a layer of this model cannot go back")
        step = DecodeStep.of(self._pool, self.sequences, counts, self._padded_rows(counts))
        if isinstance(token_ids, mx.array):
            tokens = token_ids
        else:  # with empty rows: few lengths, whose arrays are used again
            empty = [0] * (step.rows - len(step.lengths))
            tokens = self.numbers.of([*token_ids, *empty], dtype=mx.uint32)
        logits = self._over_pages(tokens, step) if self._fused else self._over_copies(tokens, step)
        self._pool.enqueue_behind(logits)
        for kv in self.sequences:
            kv.advanced(1)
        return logits if self.keeps_graph else self._behind_writes(logits)

    def in_pairs(self, tokens: mx.array, greatest: mx.array) -> list[mx.array]:
        """See `draw_pairs`."""
        return in_pairs(tokens, greatest, self._pool.dialect)

    def pass_of(self, token_ids: Sequence[int], given: Sequence[PassRows]) -> mx.array:
        """Rows of each sequence, by slot, in their order: logits [rows, vocabulary], not evaluated. Raises
        ResourceExhausted; ValueError where a layer cannot go back.
        """
        if not self._takes_drafts:
            raise ValueError("a layer of this model cannot go back")
        if self._fused:
            logits = self._windows.logits(self.sequences, given, token_ids)
        else:
            step = DecodeStep.of_pass(self._pool, self.sequences, given)
            logits = self._behind_writes(self._over_copies(mx.array(list(token_ids), dtype=mx.uint32), step))
        for kv, each in zip(self.sequences, given, strict=True):
            kv.advanced(each.stored)
        return logits

    def _behind_writes(self, logits: mx.array) -> mx.array:
        # The rows have no reader in this step: without the dependency they would pile up unevaluated.
        stored = [array for state in self._states.values() for array in state.state]
        if self._decoded:
            stored += self._pool.arrays
        after: mx.array = mx.depends([logits], stored)[0]
        return after

    @property
    def _takes_drafts(self) -> bool:
        """Whether rows behind a sequence's length are nothing: no state has seen them, no window lost others."""
        return not self._states and not any(group.window for group in self._pool.groups)

    def most_drafted_rows(self, longest: int) -> int:
        """Rows of a pass with drafts at most, if the longest sequence has so many tokens; 0: there are none."""
        if not self._takes_drafts:
            return 0
        values = max((layer.read_values(longest) for layer in self._decoded.values()), default=1)
        return min(_DRAFTED_ROWS, _DRAFTED_VALUES // values)

    def has_room(self, counts: Sequence[int], longest: int) -> bool:
        """Whether one pass may compute so many rows of windows by sequence, if the longest one has so many tokens. The
        rows copy no K and V, but each has a score for each of them.
        """
        rows = self._windows.rows_for(counts) if self._fused else sum(counts)
        values = max((layer.read_values(longest) for layer in self._decoded.values()), default=1)
        return rows <= min(_WINDOW_ROWS, _SCORE_SHARE * _DRAFTED_VALUES // values)

    def _padded_rows(self, counts: Sequence[int] | None) -> int:
        """Rows of a pass over a kept graph, with empty ones; 0: as many as there are."""
        if not self.keeps_graph:
            return 0
        rows = sum(counts) if counts else len(self.sequences)
        if counts:
            rows = max(_LEAST_DRAFTED_ROWS, 1 << (rows - 1).bit_length())
        elif self._pool.dialect is Dialect.CUDA:
            rows = _rounded(rows)
        return -(-rows // self._pass_rows) * self._pass_rows if self._pass_rows else rows

    def _over_copies(self, tokens: mx.array, step: DecodeStep) -> mx.array:
        slots, longest = len(self.sequences), max(step.lengths)
        values = sum(layer.decoded_values(slots, longest) for layer in self._decoded.values())
        for layer in self._decoded.values():
            layer.begin(step, keeps_decoded=values <= self._decoded_budget)
        return self._logits(tokens)

    def _logits(self, tokens: mx.array) -> mx.array:
        layers = {**self._fused, **self._decoded, **self._states}
        return self._forward(tokens[:, None], [layers[index] for index in range(len(layers))])[:, -1]

    def _over_pages(self, tokens: mx.array, step: DecodeStep) -> mx.array:
        pages, order = self._pool.arrays, self._pool.order
        count, rows = len(step.lengths), self._pass_rows
        if step.rows > tokens.shape[0]:
            tokens = mx.pad(tokens, (0, step.rows - count))
        kept = zip(self._kept_tables, step.groups, strict=True)
        places = self._kept_places.of(padded_lengths(step))
        given = (tokens, places, *(table.of(group) for table, group in kept))
        if not self.keeps_graph:
            return self._traced(pages, order, *given)
        parts = [given]
        if rows:
            parts = [tuple(each[at : at + rows] for each in given) for at in range(0, step.rows, rows)]
        logits: list[mx.array] = []
        for part in parts:
            if logits and count > len(self.sequences):  # a draft may read rows of the pass before, which CUDA must know
                mx.eval(logits)
            logits.append(self._kept_graph(pages, order, *part))
        whole = self._kept_places.gone_on(mx.concatenate(logits) if len(logits) > 1 else logits[0])
        return whole[:count] if step.rows > count else whole

    def keep_graph(self, depth: int, rows: int = 1) -> None:
        """Have MLX keep the graph of a step of so many rows, of which one has so many tokens. It goes to a page that is
        free again. Raises ResourceExhausted.
        """
        if not self.keeps_graph:
            return
        pool, rows = self._pool, self._pass_rows or rows
        prepare_rows(pool, rows, depth + 1)
        with nobodys_page(pool) as page:
            table = mx.full((rows, table_width(depth + 1)), page, dtype=mx.int32)
            places = KeptPlaces(pool.numbers).of([0] + [-1] * (rows - 1))
            tables = [table] * len(pool.groups)
            logits = self._kept_graph(pool.arrays, pool.order, mx.zeros((rows,), dtype=mx.uint32), places, *tables)
            pool.enqueue_behind(logits)
            mx.eval(logits)

    def _traced(
        self,
        pages: list[mx.array],
        order: Sequence[mx.array],
        tokens: mx.array,
        offsets: mx.array,
        *block_tables: mx.array,
    ) -> mx.array:
        """A step as a function of arrays. MLX calls it once for each number of rows and width of tables."""
        offsets = offsets[: tokens.shape[0]]
        for layer in self._fused.values():
            layer.begin(PassArrays(offsets, offsets, block_tables, pages, order))
        return self._logits(tokens)

    def discard(self) -> list[SequenceKV]:
        """Drop all scratch after a failed step. Rows of the returned sequences beyond their length are garbage."""
        sequences, self.sequences = self.sequences, []
        self._pool.forget_failed_pass()
        self._kept_places.forget()
        self._states = {index: BatchStateKV() for index in self._states}
        for layer in self._decoded.values():
            layer.forget_decoded()
        return sequences

    def close(self) -> None:
        """Let go of scratch, and of graphs, which hold weights."""
        self._kept_graph.forget()
        self._windows.forget()
        for layer in self._fused.values():
            layer.forget()
        self.discard()

    def _slot(self, kv: SequenceKV) -> int:
        return next(slot for slot, other in enumerate(self.sequences) if other is kv)

    def _forget_spare(self) -> None:
        """Give decoded copies back that are much larger than the remaining sequences need."""
        longest = max((kv.length for kv in self.sequences), default=0)
        for layer in self._decoded.values():
            if layer.has_spare(len(self.sequences), longest):
                layer.forget_decoded()


def _rounded(rows: int) -> int:
    """As many rows or a few more: in a crowd each turn that begins or ends would need a graph of its own, which takes
    longer to make than five steps.
    """
    if rows <= _MOST_DOUBLED_ROWS:
        return 1 << (rows - 1).bit_length()
    half = _MOST_DOUBLED_ROWS // 2
    return -(-rows // half) * half
