"""Computes cells of prompts: one turn's, or those of several turns in one pass. On the MLX thread."""

from collections.abc import Callable
from collections.abc import Sequence as Cells
from contextlib import AbstractContextManager
from typing import NamedTuple

import mlx.core as mx
from kvasir.errors import KvasirError, ResourceExhausted

from inference_svc.engine.beginning import mark
from inference_svc.engine.sampling import Drawn, Draws, Sampler
from inference_svc.engine.scheduling.schedulable import SharedPass
from inference_svc.engine.scheduling.step_schedule import TurnCell
from inference_svc.engine.sequence import Sequence
from inference_svc.engine.wedlm.mask_draws import without_mask
from inference_svc.kv.batch.packed_pass import Cell, can_pack
from inference_svc.kv.batch.short_pass import KEPT_TOKENS
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_runner import ModelRunner

_PACKED_DEPTH = 8192  # tokens; a long cell behind more is left to MLX's attention


class Beside(NamedTuple):
    """What is done while a device computes a pass: `report` when it has the first layers, `decode` when it has all."""

    report: Callable[[], None]
    decode: Callable[[], None]


class Prefiller:
    """`guarding`: around work for turns, all of which end if it fails. `shared`: where cells share a pass.
    `makes_room`: whether an error's pass may be tried again. `mask_token_id`: never drawn.
    """

    def __init__(
        self,
        runner: ModelRunner,
        shared: SharedPass | None,
        guarding: Callable[..., AbstractContextManager[None]],
        makes_room: Callable[[Exception], bool],
        mask_token_id: int | None = None,
    ) -> None:
        self.computed = 0  # tokens of callers
        self._runner = runner
        self._shared = shared
        self._guarding = guarding
        self._makes_room = makes_room
        self._mask_token_id = mask_token_id

    def compute(self, cells: Cells[TurnCell[Sequence]], beside: Beside | None) -> None:
        """Compute the cells, and draw first tokens where prompts end."""
        self.computed += sum(cell.size for cell in cells if not cell.turn.plan.is_own)
        packed = [cell for cell in cells if can_pack(_held(cell.turn)[0], cell.size)]
        if len(cells) == 1 and not self._is_packed_alone(cells[0], is_awaited=beside is not None):
            packed = []
        alone = [cell for cell in cells if cell not in packed]
        if packed:
            with self._guarding(*(cell.turn for cell in packed)):
                alone += () if self._compute_together(packed, beside) else packed
        for cell in alone:
            with self._guarding(cell.turn):
                self._compute_with_room(cell, beside)

    def _is_packed_alone(self, cell: TurnCell[Sequence], *, is_awaited: bool) -> bool:
        """Whether a cell that is alone in its pass is computed as those that share one, whose graph is kept: beside
        streams, whose gap bounds it, because a cancel waits for it. Behind more tokens MLX's attention is as fast.
        """
        if self._shared is None or not is_awaited or not cell.turn.shares_passes:
            return False
        return KEPT_TOKENS[-1] < cell.size <= min(self._shared.most_tokens, _PACKED_DEPTH - cell.position)

    def _compute_together(self, cells: Cells[TurnCell[Sequence]], beside: Beside | None) -> bool:
        """Whether there were pages for all; alone, only the turn for which there is none fails. Where the device had no
        memory, each is computed once more by itself."""
        stored, has_drawn = _held(cells[0].turn)[0].length, False
        drawing = [place for place, cell in enumerate(cells) if cell.turn.draws_after(cell.size)]
        draws: list[Draws] = []

        def draw(logits: mx.array) -> None:
            nonlocal has_drawn
            has_drawn = bool(drawing)
            if drawing:  # by slices: for numbers of the host's the device might have to end the pass first
                rows = [logits[place : place + 1] for place in drawing]
                draws.append(self._draws([cells[place].turn for place in drawing], mx.concatenate(rows)))
            if beside is not None:
                beside.decode()

        try:
            parts = [Cell(_held(cell.turn)[0], cell.turn.next_tokens(cell.size)) for cell in cells]
            self._runner.packed_logits(parts, draw, beside.report if beside else _nothing)
        except ResourceExhausted:
            return False
        except RuntimeError as error:
            # As in `_compute_with_room`; rows of one cell are stored where those of all are.
            if has_drawn or _held(cells[0].turn)[0].length != stored or not self._makes_room(error):
                raise
            for cell in cells:
                with self._guarding(cell.turn):
                    self._compute_alone(cell, None)
            return True
        drawn = dict(zip(drawing, draws[0].read() if draws else (), strict=True))
        for place, cell in enumerate(cells):
            with self._guarding(cell.turn):
                _take_in(cell, drawn.get(place))
        return True

    def _compute_with_room(self, cell: TurnCell[Sequence], beside: Beside | None) -> None:
        """Where the device had no memory, compute the cell once more, with less enqueued at once."""
        kv, _ = _held(cell.turn)
        stored, draws_early = kv.length, beside is not None and cell.turn.draws_after(cell.size)
        try:
            self._compute_alone(cell, beside)
        except RuntimeError as error:
            # Drawn twice, a token would have another key.
            if draws_early or kv.length != stored or not self._makes_room(error):
                raise
            self._compute_alone(cell, None)

    def _compute_alone(self, cell: TurnCell[Sequence], beside: Beside | None) -> None:
        sequence, tokens = cell.turn, cell.turn.next_tokens(cell.size)
        kv, _ = _held(sequence)
        report, decode = beside or (_nothing, None)
        if not sequence.draws_after(cell.size):
            take = sequence.hidden.add if sequence.hidden is not None else None
            self._runner.prefill(kv, tokens, lambda: sequence.is_cancelled, decode, take, report)
            _take_in(cell, None)
            return
        draws: list[Draws] = []

        def draw(logits: mx.array) -> None:
            draws.append(self._draws([sequence], logits))
            if decode is not None:
                decode()

        logits = self._runner.last_logits(kv, tokens, lambda: sequence.is_cancelled, draw if decode else None, report)
        [drawn] = (draws or [self._draws([sequence], logits)])[0].read()
        _take_in(cell, drawn)

    def _draws(self, turns: Cells[Sequence], logits: mx.array) -> Draws:
        """Of first tokens, by logits [turns, vocabulary]."""
        if self._mask_token_id is not None:
            logits = without_mask(logits, self._mask_token_id)
        return Draws([_held(turn)[1] for turn in turns], logits)


def _nothing() -> None:
    """No stream waits for a report."""


def _held(sequence: Sequence) -> tuple[SequenceKV, Sampler]:
    assert sequence.kv is not None
    assert sequence.sampler is not None
    return sequence.kv, sequence.sampler


def _take_in(cell: TurnCell[Sequence], drawn: Drawn | KvasirError | None) -> None:
    sequence = cell.turn
    sequence.prefilled(cell.size)
    if isinstance(drawn, KvasirError):
        raise drawn
    if drawn is not None:
        sequence.accept(drawn.token_id, drawn.logprobs)
    elif 0 < sequence.cells.computed == sequence.cells.rewind_point:
        mark(_held(sequence)[0])
