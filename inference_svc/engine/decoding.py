"""Decoding steps, of which one is enqueued before the tokens of the one before it are read: a GPU never waits for us. A
row's next input is then a token that only the device knows, and the result for a row that had finished is discarded.
Steps whose draws must see the last token, and all of models with recurrent layers, are read before the next.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx
from kvasir.errors import KvasirError

from inference_svc.engine.api import SamplingParams
from inference_svc.engine.sampling import Drawn, Draws, Sampler
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.sequence_kv import SequenceKV


@dataclass(frozen=True, slots=True)
class Decoded:
    """One row of a step that was read; `drawn` is None if the token behind it was known already."""

    sequence: Sequence
    drawn: Drawn | KvasirError | None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device computes. `is_drawn` says by slot whether the row's next token was not known."""

    order: tuple[Sequence, ...]
    is_drawn: tuple[bool, ...]
    draws: Draws
    is_behind_cell: bool

    def slot(self, sequence: Sequence) -> int | None:
        return self.order.index(sequence) if sequence in self.order else None


class Decoder:
    """The batch of all decoding sequences, and the step that was not read yet. On the MLX thread."""

    def __init__(self, batch: DecodeBatch, *, looks_ahead: bool) -> None:
        self.batch = batch
        self.looks_ahead = looks_ahead
        self._launched: deque[_Launched] = deque()
        self.computed = 0  # rows of callers that were enqueued
        self._no_draw = Sampler(SamplingParams(max_tokens=1))  # for tokens whose successor is known or not needed

    @property
    def is_ahead(self) -> bool:
        return bool(self._launched)

    def has_behind_cell(self, decoding: Iterable[Sequence]) -> bool:
        """Whether the step that was not read was enqueued behind a cell, and has a row of each of these sequences."""
        last = self._launched[-1] if self._launched else None
        return last is not None and last.is_behind_cell and all(each in last.order for each in decoding)

    @property
    def must_settle(self) -> bool:
        """Whether the step that was not read must be, before the next is enqueued."""
        order = self._launched[-1].order if self._launched else ()
        waits = any(each.sampler is not None and each.sampler.waits_for_last_token for each in order)
        return waits or (self.is_ahead and not self.looks_ahead)

    def step(self, decoding: Collection[Sequence]) -> list[Decoded]:
        """Enqueue one more token of each sequence; returns rows that were read, of the step before or of this one."""
        before = len(self._launched)
        self.launch(decoding)
        return self._read(len(self._launched) if self.must_settle else before)

    def settle(self) -> list[Decoded]:
        return self._read(len(self._launched))

    def discard(self) -> list[SequenceKV]:
        """Drop all that is computed, after a failed step. Returns the KV of every row in it, to be cut."""
        lost = [sequence.kv for launched in self._launched for sequence in launched.order if sequence.kv is not None]
        self._launched.clear()
        return [*lost, *self.batch.discard()]

    def launch(self, decoding: Collection[Sequence], *, is_behind_cell: bool = False) -> None:
        """Enqueue one more token of each sequence, and wait for nothing."""
        pending = self._launched[-1] if self._launched else None
        next_places = ((sequence, _next_place(sequence, pending)) for sequence in decoding)
        places = {sequence: place for sequence, place in next_places if place is not None}
        order = self._joined(places)
        if not order:
            return
        logits = self.batch.step(_inputs(order, places, pending))
        self.computed += sum(not sequence.plan.is_own for sequence in order)
        is_drawn = tuple(places[sequence] >= len(sequence.token_ids) - 1 for sequence in order)
        samplers = [
            sequence.sampler if drawn and sequence.finish_reason is None and sequence.sampler else self._no_draw
            for sequence, drawn in zip(order, is_drawn, strict=True)
        ]
        self._launched.append(_Launched(tuple(order), is_drawn, Draws(samplers, logits), is_behind_cell))

    def _joined(self, decoding: Collection[Sequence]) -> list[Sequence]:
        """Make the batch hold these sequences and no others; returns them by slot."""
        by_kv = {id(sequence.kv): sequence for sequence in decoding}
        # From the last slot on: when many turns leave at once, few are moved to take their places.
        for kv in [kv for kv in reversed(self.batch.sequences) if id(kv) not in by_kv]:
            self.batch.leave(kv)
        for sequence in decoding:
            if sequence.kv is not None and sequence.kv not in self.batch:
                self.batch.join(sequence.kv)
        return [by_kv[id(kv)] for kv in self.batch.sequences]

    def _read(self, steps: int) -> list[Decoded]:
        """The rows of so many steps. If a read fails, `discard` still knows all of them."""
        drawn = [each.draws.read() for each in islice(self._launched, steps)]
        read = [self._launched.popleft() for _ in drawn]
        return [
            Decoded(sequence, token if is_drawn else None)
            for launched, tokens in zip(read, drawn, strict=True)
            for sequence, is_drawn, token in zip(launched.order, launched.is_drawn, tokens, strict=True)
        ]


def _next_place(sequence: Sequence, pending: _Launched | None) -> int | None:
    """The position of the sequence's next input; None if it needs no more KV, whatever the step before draws."""
    slot = pending.slot(sequence) if pending is not None else None
    place = sequence.cells.computed + (slot is not None)
    known = len(sequence.token_ids)
    if place < known:
        return place
    is_coming = slot is not None and pending is not None and pending.is_drawn[slot] and sequence.finish_reason is None
    if not is_coming:
        return None
    is_last = known + 1 - sequence.cells.prompt_tokens >= sequence.plan.sampling.max_tokens
    return None if is_last and not sequence.plan.leaves_memory else place


def _inputs(order: list[Sequence], places: Mapping[Sequence, int], pending: _Launched | None) -> list[int] | mx.array:
    """Each row's next token: numbers if all are known, else an array that has those of the step before."""
    known = [
        sequence.token_ids[places[sequence]] if places[sequence] < len(sequence.token_ids) else None
        for sequence in order
    ]
    if pending is None or None not in known:
        return [token for token in known if token is not None]
    if tuple(order) == pending.order and not any(token is not None for token in known):
        return pending.draws.tokens
    slots = mx.array([pending.slot(sequence) or 0 for sequence in order])
    drawn = pending.draws.tokens[slots]
    given = mx.array([0 if token is None else token for token in known], dtype=mx.uint32)
    return mx.where(mx.array([token is None for token in known]), drawn, given)
