"""Decoding steps, of which one is enqueued before the tokens of the one before it are read: a GPU never waits for us. A
row's next input is then a token that only the device knows, and the result for a row that had finished is discarded.
Steps whose draws must see the last token, those behind which drafts are tried, and all of models with recurrent layers
are read before the next.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx
from kvasir.errors import KvasirError

from inference_svc.engine.api import SamplingParams
from inference_svc.engine.drafting.drafter import Drafter, Drafts
from inference_svc.engine.sampling import Drawn, Draws, Sampler
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.host_numbers import HostNumbers, carried_over
from inference_svc.kv.sequence_kv import SequenceKV

_MOST_READ_APART = 64  # rows of a step: two of them cost a kernel and a read, all one page; measured up to here


class Decoded(NamedTuple):
    """One row of a step that was read; `drawn` is None if the token behind it was known already. `computed`: tokens of
    the sequence that got their KV.
    """

    sequence: Sequence
    drawn: Drawn | KvasirError | None
    computed: int = 1


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device computes. `is_drawn`: by slot, whether the row's next token was not known."""

    order: tuple[Sequence, ...]
    slots: Mapping[Sequence, int]
    is_drawn: tuple[bool, ...]
    draws: Draws
    is_behind_cell: bool
    drafts: tuple[tuple[int, ...], ...]  # by slot; empty if there are none
    uses: int  # of the host's numbers, until it is read


class Decoder:
    """The batch of all decoding sequences, and the step that was not read yet. On the MLX thread."""

    def __init__(self, batch: DecodeBatch, drafter: Drafter, clock: Callable[[], float], *, looks_ahead: bool) -> None:
        self.batch = batch
        self._drafter = drafter
        self._clock = clock
        self.looks_ahead = looks_ahead
        self._launched: deque[_Launched] = deque()
        self.computed = 0  # rows of callers that were enqueued
        self._no_draw = Sampler(SamplingParams(max_tokens=1))  # for tokens whose successor is known or not needed

    @property
    def is_ahead(self) -> bool:
        return bool(self._launched)

    @property
    def has_behind_cell(self) -> bool:
        """Whether the step that was not read was enqueued behind a cell. A row that the cell began has none in it."""
        return bool(self._launched) and self._launched[-1].is_behind_cell

    @property
    def must_settle(self) -> bool:
        """Whether the step that was not read must be, before the next is enqueued."""
        last = self._launched[-1] if self._launched else None
        if last is None:
            return False
        samplers = [each.sampler for each in last.order if each.sampler is not None and each.sampler.may_wait]
        waits = any(sampler.waits_for_last_token for sampler in samplers)
        return waits or not self.looks_ahead or self._drafter.may_draft(last.order)

    def step(self, decoding: Collection[Sequence], *, reads_all: bool = False) -> list[Decoded]:
        """Enqueue one more token of each sequence, and drafts; returns rows that were read, of the step before or, at
        least if `reads_all`, of this one.
        """
        before, began_s = len(self._launched), self._clock()
        drafts = {} if before else self._drafter.drafts(decoding)
        self.launch(decoding, drafts=drafts)
        decoded = self._read(len(self._launched) if drafts or reads_all or self.must_settle else before)
        rows = len(decoding) + sum(map(len, drafts.values()))
        self._drafter.took(rows, self._clock() - began_s, is_drafted=bool(drafts))
        return decoded

    def settle(self) -> list[Decoded]:
        return self._read(len(self._launched))

    def discard(self) -> list[SequenceKV]:
        """Drop all that is computed, after a failed step. Returns the KV of every row in it, to be cut."""
        lost = [sequence.kv for launched in self._launched for sequence in launched.order if sequence.kv is not None]
        self._launched.clear()
        return [*lost, *self.batch.discard()]

    def launch(
        self, decoding: Collection[Sequence], *, is_behind_cell: bool = False, drafts: Drafts = MappingProxyType({})
    ) -> None:
        """Enqueue one more token of each sequence, its drafts behind it, and wait for nothing."""
        pending = self._launched[-1] if self._launched else None
        places = {each: place for each in decoding if (place := _next_place(each, pending)) is not None}
        order = self._joined(places)
        if not order:
            return
        tried = tuple(drafts.get(each, ()) for each in order) if drafts else ()
        inputs = _inputs(order, places, pending, tried, self.batch.numbers)
        logits = self.batch.step(inputs, [1 + len(each) for each in tried] or None)
        self.computed += sum(not sequence.plan.is_own for sequence in order)
        is_drawn = tuple([places[sequence] >= len(sequence.token_ids) - 1 for sequence in order])
        samplers = [
            sequence.sampler if drawn and sequence.finish_reason is None and sequence.sampler else self._no_draw
            for sequence, drawn in zip(order, is_drawn, strict=True)
        ]
        # On CUDA another step is enqueued before these are read, too.
        is_read_beside = is_behind_cell or (self.batch.numbers.is_reused and len(is_drawn) <= _MOST_READ_APART)
        draws = Draws(samplers, logits, tried, in_pairs=self.batch.in_pairs if is_read_beside else None)
        slots = {sequence: slot for slot, sequence in enumerate(order)}
        uses = self.batch.numbers.uses
        self._launched.append(_Launched(tuple(order), slots, is_drawn, draws, is_behind_cell, tried, uses))

    def _joined(self, decoding: Collection[Sequence]) -> list[Sequence]:
        """Make the batch hold these sequences and no others; returns them by slot."""
        by_kv = {id(sequence.kv): sequence for sequence in decoding}
        self.batch.hold([sequence.kv for sequence in decoding if sequence.kv is not None])
        return [by_kv[id(kv)] for kv in self.batch.sequences]

    def _read(self, steps: int) -> list[Decoded]:
        """The rows of so many steps. If a read fails, `discard` still knows all of them."""
        drawn = [each.draws.read_drafted() for each in islice(self._launched, steps)]
        read = [self._launched.popleft() for _ in drawn]
        for launched, tokens in zip(read, drawn, strict=True):
            self.batch.numbers.completed(launched.uses)
            self._keep_right(launched, tokens)
        return [
            Decoded(sequence, token if is_drawn else None)
            for launched, by_slot in zip(read, drawn, strict=True)
            for sequence, is_drawn, tokens in zip(launched.order, launched.is_drawn, by_slot, strict=True)
            for token in tokens
        ]

    def _keep_right(self, launched: _Launched, drawn: list[list[Drawn | KvasirError]]) -> None:
        """Of the drafts of a step, only those that were drawn are the sequence's own."""
        for sequence, drafts, tokens in zip(launched.order, launched.drafts, drawn, strict=bool(launched.drafts)):
            if drafts and sequence.kv is not None:
                right = len(tokens) - 1
                sequence.kv.advanced(right)
                if right < len(drafts):
                    sequence.kv.trim_to(sequence.kv.length)
                self._drafter.learn(sequence, len(drafts), right)
                sequence.tried(len(drafts), right)


def _next_place(sequence: Sequence, pending: _Launched | None) -> int | None:
    """The position of the sequence's next input; None if it needs no more KV, whatever the step before draws."""
    slot = pending.slots.get(sequence) if pending is not None else None
    place = sequence.cells.computed + (slot is not None)
    known = len(sequence.token_ids)
    if place < known:
        return place
    is_coming = slot is not None and pending is not None and pending.is_drawn[slot] and sequence.finish_reason is None
    if not is_coming:
        return None
    is_last = known + 1 - sequence.cells.prompt_tokens >= sequence.plan.sampling.max_tokens
    return place if not is_last or (sequence.plan.leaves_memory and sequence.computes_last) else None


def _inputs(
    order: list[Sequence],
    places: Mapping[Sequence, int],
    pending: _Launched | None,
    drafts: tuple[tuple[int, ...], ...],
    numbers: HostNumbers,
) -> list[int] | mx.array:
    """Each row's next token: numbers if all are known, else an array that has those of the step before."""
    known = [
        sequence.token_ids[places[sequence]] if places[sequence] < len(sequence.token_ids) else None
        for sequence in order
    ]
    if pending is None or None not in known:
        tokens = [token for token in known if token is not None]
        return (
            [each for token, tried in zip(tokens, drafts, strict=True) for each in (token, *tried)]
            if drafts
            else tokens
        )
    if tuple(order) == pending.order and not any(token is not None for token in known):
        return pending.draws.tokens
    return carried_over(pending.draws.tokens, [pending.slots.get(sequence, 0) for sequence in order], known, numbers)
