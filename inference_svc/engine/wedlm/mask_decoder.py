"""Decoding of a model that fills masks: a pass computes a turn's committed tokens that have no KV yet, behind them the
kept tokens of its window, and behind these its masks, each rotated by its own position. Where the model gives the next
token too, and nothing is kept, the last committed token's row stands for the first mask.

A turn of whose prompt the last token alone has no KV gets it here, in a row beside those of others, with the sums of a
cell of its own. Where that row gives the reply's first token, the window begins behind it, as behind a cell.

So committed tokens get the rows that they would get one by one, masks see all that is known, and one pass does both.
Every draw depends on the pass before, so that each pass is read at once.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
from weakref import WeakKeyDictionary

import mlx.core as mx
from kvasir.errors import KvasirError

from inference_svc.engine.decoding import Decoded
from inference_svc.engine.sampling import Drawn
from inference_svc.engine.sequence import Sequence
from inference_svc.engine.wedlm.mask_draws import MaskDraws
from inference_svc.engine.wedlm.reply_window import ReplyWindow, sure_places
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.decode_step import PassRows
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.wedlm import LARGEST_WINDOW, MaskWindow

_MOST_COMMITTED = 32  # tokens without KV that a pass computes for a turn: one that was preempted may lack all of them


@dataclass(frozen=True, slots=True)
class _Rows:
    """One turn's rows of a pass: committed tokens, kept ones by place, and the places of masks. `draws_next`: the last
    committed row gives the token of place 0, and nothing is kept.
    """

    sequence: Sequence
    committed: tuple[int, ...]
    kept: tuple[tuple[int, int], ...] = ()
    masks: tuple[int, ...] = ()
    draws_next: bool = False

    @property
    def drawn_places(self) -> tuple[int, ...]:
        """Of the pass's last rows, in their order."""
        return (0, *self.masks) if self.draws_next else self.masks

    @property
    def count(self) -> int:
        return len(self.committed) + len(self.kept) + len(self.masks)

    def token_ids(self, mask_token_id: int) -> list[int]:
        return [*self.committed, *(token for _, token in self.kept), *(mask_token_id for _ in self.masks)]

    @property
    def pass_rows(self) -> PassRows:
        first = self.sequence.cells.computed + len(self.committed)
        places = (*(place for place, _ in self.kept), *self.masks)
        ends_prompt = self.sequence.cells.rest_tokens > 0
        return PassRows(len(self.committed), tuple(first + place for place in places), is_first_alone=ends_prompt)


class MaskDecoder:
    """As `Decoder`, without a step ahead. On the MLX thread. Nothing of a turn's window outlives the turn."""

    is_ahead = must_settle = looks_ahead = has_behind_cell = False

    def __init__(self, batch: DecodeBatch, window: MaskWindow, end_token_ids: Collection[int], most_ahead: int) -> None:
        """`most_ahead`: masks behind the first one, of a turn that does not name a number."""
        self.batch = batch
        self.computed = 0  # rows of callers that were enqueued
        self._window = window
        self._end_token_ids = end_token_ids
        self._most_ahead = most_ahead
        self._windows: WeakKeyDictionary[Sequence, ReplyWindow[Drawn]] = WeakKeyDictionary()

    def settle(self) -> list[Decoded]:
        return []

    def discard(self) -> list[SequenceKV]:
        """Drop all that is computed, after a failed pass. Returns the KV of every row in it, to be cut."""
        return self.batch.discard()

    def step(self, decoding: Collection[Sequence], *, reads_all: bool = True) -> list[Decoded]:  # noqa: ARG002  it does
        """One pass of each sequence: its rows that have KV now, and then the tokens that it commits."""
        self.batch.hold([sequence.kv for sequence in decoding if sequence.kv is not None])
        by_kv = {id(sequence.kv): sequence for sequence in decoding}
        rows = [self._rows(by_kv[id(kv)]) for kv in self.batch.sequences]
        return [each for together in self._passes(rows) for each in self._computed(rows, together)]

    def _rows(self, sequence: Sequence) -> _Rows:
        wanted = sequence.remembered if sequence.finish_reason is not None else len(sequence.token_ids)
        missing = tuple(sequence.token_ids[sequence.cells.computed : wanted])
        if sequence.finish_reason is not None or len(missing) > _MOST_COMMITTED:
            return _Rows(sequence, missing[:_MOST_COMMITTED])
        if self._window.draws_next and len(sequence.token_ids) == sequence.cells.prompt_tokens:
            return _Rows(sequence, missing, draws_next=True)
        window = self._windows.setdefault(sequence, self._new_window(sequence))
        kept = tuple((place, drawn.token_id) for place, drawn in window.kept)
        size = min(self._size(sequence), self._window.size_behind(window.committed))
        masks = tuple(window.masks(size))
        draws_next = self._window.draws_next and bool(missing) and not kept
        return _Rows(sequence, missing, kept, masks[1:] if draws_next else masks, draws_next)

    def _new_window(self, sequence: Sequence) -> ReplyWindow[Drawn]:
        ends = {*self._end_token_ids, *sequence.plan.sampling.stop_token_ids}
        return ReplyWindow(lambda drawn: drawn.token_id in ends)

    def _size(self, sequence: Sequence) -> int:
        """Tokens that the turn may draw: one where a draw depends on the token before it; none behind its limit."""
        assert sequence.sampler is not None
        given = sequence.plan.sampling.most_drafts
        ahead = 0 if sequence.sampler.draws_in_order else self._most_ahead if given is None else given
        return min(1 + ahead, LARGEST_WINDOW, sequence.most_tokens - len(sequence.token_ids))

    def _passes(self, rows: list[_Rows]) -> Iterator[list[_Rows]]:
        """Turns whose rows are computed together: as many as may read their KV at once, and one at least."""
        together: list[_Rows] = []
        for each in rows:
            others = [*together, each]
            longest = max(one.sequence.cells.computed + one.count for one in others)
            if together and not self.batch.has_room([one.count for one in others], longest):
                yield together
                others = [each]
            together = others
        if together:
            yield together

    def _computed(self, rows: list[_Rows], together: list[_Rows]) -> Iterator[Decoded]:
        """By turn, what the pass computed and committed."""
        given = [each.pass_rows if each in together else PassRows(0) for each in rows]
        mask = self._window.mask_token_id
        logits = self.batch.pass_of([token for each in together for token in each.token_ids(mask)], given)
        self.computed += sum(each.count for each in together if not each.sequence.plan.is_own)
        drawing, drawn_rows, end = [], [], 0
        for each in together:
            end += each.count
            if places := each.drawn_places:
                drawing.append(each)
                drawn_rows.append(range(end - len(places), end))
        found = self._draws(drawing, logits, drawn_rows)
        for each in together:
            each.sequence.passed(each.count)
            yield Decoded(each.sequence, None, len(each.committed))
            yield from (Decoded(each.sequence, drawn, 0) for drawn in found.get(each.sequence, ()))

    def _draws(
        self, drawing: list[_Rows], logits: mx.array, rows: list[range]
    ) -> dict[Sequence, list[Drawn | KvasirError]]:
        """By turn, the tokens that it commits now, or the error that ends it. Waits for the pass."""
        if not drawing:
            mx.eval(logits)
            return {}
        samplers = [each.sequence.sampler for each in drawing if each.sequence.sampler is not None]
        read = MaskDraws(samplers, logits, rows, self._window.mask_token_id).read()
        return {each.sequence: self._committed(each, found) for each, found in zip(drawing, read, strict=True)}

    def _committed(self, rows: _Rows, found: list[tuple[Drawn | KvasirError, float]]) -> list[Drawn | KvasirError]:
        drawn: dict[int, Drawn] = {}
        for place, (token, _) in zip(rows.drawn_places, found, strict=True):
            if isinstance(token, KvasirError):
                return [token]
            drawn[place] = token
        if (window := self._windows.get(rows.sequence)) is None:  # the prompt gave the reply's first token
            return [*drawn.values()]
        entropies = {place: entropy for place, (_, entropy) in zip(rows.drawn_places, found, strict=True)}
        if rows.draws_next:
            entropies[0] = -inf  # token by token the model is sure
        sure = sure_places(entropies, self._window)
        window.keep({place: drawn[place] for place in sure})
        return [*window.commit()]
