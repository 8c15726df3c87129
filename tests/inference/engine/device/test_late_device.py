"""A device that computes as late as it may: nothing before its result is read. Arrays of the host's numbers that are
written again too early change replies.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import mlx.core as mx
import pytest

from inference_svc.engine.api import SamplingParams
from inference_svc.engine.decoding import Decoder
from inference_svc.engine.drafting.drafter import Drafter
from inference_svc.engine.grid import Cells
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.draw_pairs import in_pairs
from inference_svc.kv.batch.packed_pass import Cell, packed_logits
from inference_svc.kv.batch.short_pass import ShortPass
from inference_svc.kv.host_numbers import HostNumbers
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.sequences import full, identity_of, windowed

VOCABULARY = 9_973
PROMPT = PAGE_TOKENS - 3  # tokens, so that tables change after three steps


@dataclass(frozen=True)
class _Plan:
    is_own: bool = False
    leaves_memory: bool = True
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=100))


@dataclass(eq=False)
class _Turn:
    kv: SequenceKV
    token_ids: list[int]
    cells: Cells
    finish_reason: None = None
    sampler: None = None
    plan: _Plan = field(default_factory=_Plan)


class _NoDrafts:
    def may_draft(self, _turns: object) -> bool:
        return False

    def drafts(self, _turns: object) -> dict[Sequence, tuple[int, ...]]:
        return {}

    def took(self, *_rows: object, is_drafted: bool) -> None:
        assert not is_drafted


def logits_of(tokens: mx.array, layers: list[Any]) -> mx.array:
    """Of a token that depends on all that a pass is given, without a kernel."""
    now = layers[0]._now
    told = 31 * tokens.sum(axis=1) + 7 * now.offsets + sum(3 * table.sum(axis=1) for table in now.block_tables)
    return -mx.abs(mx.arange(VOCABULARY)[None] - (told % VOCABULARY)[:, None]).astype(mx.float32)[:, None]


class _Crowd:
    def __init__(self, *, is_reused: bool, pass_rows: int = 0, pages: int = 80) -> None:
        identity = identity_of([full(), windowed(100)])
        budget = pages * KvPool(identity, 1).page_bytes
        self.pool = KvPool(identity, budget, is_allocated=True, dialect=Dialect.CUDA)
        self.pool.numbers = HostNumbers(is_reused=is_reused)
        batch = DecodeBatch(self.pool, logits_of, 0, pass_rows=pass_rows)
        self.passes = ShortPass(self.pool, logits_of, "float32")
        batch._kept_graph = batch._traced  # type: ignore[assignment]
        batch.in_pairs = partial(in_pairs, dialect=None)  # type: ignore[method-assign]
        self.passes._kept_graph = self.passes._traced  # type: ignore[assignment]
        self.decoder = Decoder(batch, cast("Drafter", _NoDrafts()), lambda: 0.0, looks_ahead=True)
        self.turns: list[Any] = []
        self.first_tokens: list[int] = []  # of cells

    def begin(self, count: int, known: int = 1) -> None:
        """Turns that have a prompt's KV and so many tokens behind it, as turns have that go on after a preemption."""
        for _ in range(count):
            kv = SequenceKV(self.pool)
            kv.advanced(PROMPT)
            number = len(self.turns)
            tokens = [number + place for place in range(PROMPT + known)]
            self.turns.append(_Turn(kv, tokens, Cells(PROMPT, PAGE_TOKENS, computed=PROMPT)))

    def take_in(self, decoded: Any) -> None:
        for each in decoded:
            each.sequence.cells.computed += each.computed
            if each.drawn is not None:
                each.sequence.token_ids.append(each.drawn.token_id)

    def step(self) -> None:
        self.take_in(self.decoder.step(self.turns))

    def compute_cell(self, ends: int = 0) -> None:
        """As the engine does: when the first layers of the cell are enqueued the last step is read, and so many turns
        end that compute their last tokens; behind all of it the next step is enqueued.
        """

        def early() -> None:
            self.take_in(self.decoder.settle())
            for number in range(ends):
                self.compute(Cell(SequenceKV(self.pool), range(number, 200 + number)))

        def meanwhile(_: mx.array) -> None:
            self.decoder.launch(self.turns, is_behind_cell=True)

        cells = [Cell(SequenceKV(self.pool), range(count, 70 + count)) for count in range(2)]
        self.compute(*cells, meanwhile=meanwhile, early=early)

    def compute(self, *cells: Cell, **beside: Any) -> None:
        logits = packed_logits(self.passes, cells, beside.pop("meanwhile", lambda _: None), **beside)
        self.first_tokens += cast("list[int]", mx.argmax(logits, axis=-1).tolist())

    def replies(self) -> list[list[int]]:
        self.begin(3)
        for _ in range(5):
            self.step()
        self.begin(2, known=4)
        for _ in range(3):
            self.step()
        del self.turns[1:3]
        for _ in range(3):
            self.compute_cell()
        self.decoder.discard()  # a step that failed: its tokens are drawn again
        for turn in self.turns:
            turn.kv.trim_to(turn.cells.computed)
        for _ in range(3):
            self.step()
        self.compute_cell(ends=3)
        self.take_in(self.decoder.settle())
        return [*(turn.token_ids[PROMPT:] for turn in self.turns), self.first_tokens]


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "async_eval", lambda *_arrays: None)


@pytest.mark.parametrize("pass_rows", [0, 4])
def test_numbers_stay_until_the_passes_that_they_were_given_to_are_read(pass_rows: int) -> None:
    """Steps one ahead, other rows, known tokens, steps behind cells, and one that was never read."""
    reused = _Crowd(is_reused=True, pass_rows=pass_rows)
    assert reused.replies() == _Crowd(is_reused=False, pass_rows=pass_rows).replies()
    assert sum(map(len, reused.pool.numbers._slots.values())) < reused.pool.numbers.uses / 3


@pytest.mark.parametrize(
    ("is_cuda", "rows", "arrays"), [(False, 5, 0), (True, 2, 0), (True, 5, 3), (True, 64, 32), (True, 65, 0)]
)
def test_the_host_reads_draws_of_a_step_in_small_arrays_where_larger_ones_move_a_page(
    is_cuda: bool, rows: int, arrays: int
) -> None:
    """A page of CUDA's memory of both sides, which the next step's block tables share. Two rows are small as they are;
    of a large crowd, the processor would read for longer than the page takes.
    """
    crowd = _Crowd(is_reused=is_cuda, pages=4 * 65)
    crowd.begin(rows)
    crowd.step()
    (launched,) = crowd.decoder._launched
    assert len(launched.draws._read_apart) == arrays
