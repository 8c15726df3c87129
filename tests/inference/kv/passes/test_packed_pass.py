"""Cells of several sequences in one pass, by emulated kernels: each computes what it computes alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import ResourceExhausted
from mlx_lm.models import gemma3_text, gpt_oss, llama, qwen3

from inference_svc.kv.attention import choice, in_place
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.decode_step import KeptGraph
from inference_svc.kv.batch.packed_pass import (
    ROW_TOKENS,
    Cell,
    can_pack,
    keep_graph,
    most_packed_tokens,
    packed_logits,
)
from inference_svc.kv.batch.short_pass import ShortPass
from inference_svc.kv.model_hooks import attention_hook
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.families import ALL, write_family
from tests.inference.kv.attention.emulators import EMULATORS, needs_compiler
from tests.inference.kv.greedy import tokens_of
from tests.inference.kv.sequences import (
    PoisonedPool,
    full,
    identity_of,
    page_bytes,
    recurrent,
    stored,
    values,
    windowed,
)
from tests.on_gpu import gpu

pytestmark = needs_compiler

TOKENS = tokens_of(1600, 1)
# Tokens of each sequence before, and of its cell: whole rows, parts of one, over an edge of blocks.
BEFORE, CELLS = (0, 0, 300, 250, 10), (70, 64, 20, 90, 130)  # nine rows: three more are nobody's


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for its compiler."""
    for dialect, emulator in EMULATORS.items():
        monkeypatch.setitem(in_place.COMPILERS, dialect, emulator)
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    for module in (llama, gemma3_text, gpt_oss, qwen3):
        monkeypatch.setattr(module, "scaled_dot_product_attention", attention_hook.attention)


class Packing:
    """Sequences of a model, whose passes are computed without MLX's compiler, which emulated kernels do not bear."""

    def __init__(self, directory: Path, pages: int = 40) -> None:
        self.runner = ModelRunner(load(directory, "float32").model)
        identity = identity_of(self.runner.layers, policy_of(Rung.Q4, "float32"))
        budget = pages * KvPool(identity, 1).page_bytes
        self.pool = PoisonedPool(identity, budget, is_allocated=True, dialect=Dialect.CUDA)
        self.passes = ShortPass(self.pool, self.runner.forward, self.runner.compute_type)
        self.passes._kept_graph = self.passes._traced

    def begun(self, tokens: Sequence[int]) -> SequenceKV:
        kv = SequenceKV(self.pool)
        if tokens:
            self.runner._compute(kv, tokens, lambda: False)
        return kv

    def packed(self, *cells: Cell, meanwhile: Any = lambda _: None, early: Any = lambda: None) -> mx.array:
        return packed_logits(self.passes, cells, meanwhile, early)


def scene(packing: Packing) -> tuple[list[SequenceKV], list[Sequence[int]]]:
    """Sequences with other tokens each, and their next cells."""
    texts = [TOKENS[100 * place :] for place in range(len(BEFORE))]
    sequences = [packing.begun(text[:before]) for text, before in zip(texts, BEFORE, strict=True)]
    cells = [text[before : before + count] for text, before, count in zip(texts, BEFORE, CELLS, strict=True)]
    return sequences, cells


def assert_near(found: mx.array, kv: SequenceKV, expected: mx.array, other: SequenceKV) -> None:
    """Logits, the likeliest token, and stored rows after sums in another order, of which a few flip a code of 4 bits; a
    GPU's products flip more than attention alone does. What reads a wrong row is off by about as much as there is.
    """
    assert found.argmax() == expected.argmax()
    most = 0.1 if gpu() else 0.02
    for one, two in zip([np.array(expected), *values(other)], [np.array(found), *values(kv)], strict=True):
        assert np.linalg.norm(two - one) <= most * np.linalg.norm(one)


def assert_same(found: mx.array, kv: SequenceKV, expected: mx.array, other: SequenceKV) -> None:
    """To the bit, where the number of rows does not change in which order a product is summed."""
    if gpu():
        assert_near(found, kv, expected, other)
    else:
        assert mx.array_equal(found, expected)
        assert stored(kv) == stored(other)


@pytest.mark.long(28)
@pytest.mark.parametrize("family", ["llama3.1", "gemma3", "gpt_oss"])
def test_packed_cells_have_the_bits_that_each_has_alone(family: str, tmp_path: Path) -> None:
    """Logits and stored rows, with windows and sinks too; near to those of a pass layer by layer. On a GPU near."""
    packing = Packing(write_family(tmp_path, ALL[family]))
    sequences, cells = scene(packing)
    alone, layered = ([kv.fork() for kv in sequences] for _ in range(2))
    held = [page_bytes(packing.pool, kv.pages) for kv in layered]
    found = packing.packed(*map(Cell, sequences, cells))
    for place, (kv, cell) in enumerate(zip(alone, cells, strict=True)):
        assert_same(found[place], sequences[place], packing.packed(Cell(kv, cell))[0], kv)
        assert sequences[place].length == kv.length == BEFORE[place] + CELLS[place]
    assert [page_bytes(packing.pool, kv.pages) for kv in layered] == held, "a page that others hold was written"
    for place, (kv, cell) in enumerate(zip(layered, cells, strict=True)):
        assert_near(found[place], sequences[place], packing.runner._compute(kv, cell, lambda: False)[0, -1], kv)


@pytest.mark.long(2)
def test_cells_that_begin_in_one_shared_tail_get_copies_of_it(tmp_path: Path) -> None:
    packing = Packing(write_family(tmp_path, ALL["qwen3"]))
    memory = packing.begun(TOKENS[:100])
    sequences, before = [memory.fork() for _ in range(3)], stored(memory)
    cells = [TOKENS[200 + 50 * place :][:30] for place in range(3)]
    alone = [memory.fork() for _ in range(3)]
    expected = [packing.packed(Cell(kv, cell))[0] for kv, cell in zip(alone, cells, strict=True)]
    found = packing.packed(*map(Cell, sequences, cells))
    for results in zip(found, sequences, expected, alone, strict=True):
        assert_same(*results)
    assert stored(memory) == before
    for kv in (*sequences, *alone, memory):
        kv.release()
    assert packing.pool.allocator.used == 0


@pytest.mark.long(3)
@pytest.mark.parametrize(("counts", "rows"), [((70,), 2), ((130, 20), 4), ((500, 60), 12)])
def test_a_packed_graph_kept_ahead_is_the_one_that_cells_need(
    counts: tuple[int, ...], rows: int, tmp_path: Path
) -> None:
    """Of three rows a fourth is nobody's, of nine three are. It writes a page that is free again, and no other."""
    packing, asked = Packing(write_family(tmp_path, ALL["qwen3"])), list[object]()
    memory = packing.begun(TOKENS[:100])
    traced, before = packing.passes._traced, stored(memory)
    packing.passes._kept_graph = (
        lambda *given: (  # type: ignore[assignment]
            asked.append([(each.shape, each.dtype) for each in given[2:]]) or traced(*given)
        )
    )
    keep_graph(packing.passes, rows, 0)
    assert packing.pool.allocator.used == len([*memory.pages])
    sequences = [SequenceKV(packing.pool) for _ in counts]
    packing.packed(*(Cell(kv, TOKENS[:count]) for kv, count in zip(sequences, counts, strict=True)))
    kept, needed = asked
    assert kept == needed
    assert needed[0][0] == (rows, ROW_TOKENS)  # type: ignore[index]
    assert stored(memory) == before


def test_a_steps_empty_row_changes_no_other_row_and_no_page(tmp_path: Path) -> None:
    """Its block table names the first page, which is a memory's."""
    packing = Packing(write_family(tmp_path, ALL["qwen3"]))
    memory = packing.begun(TOKENS[:20])
    assert 0 in memory.pages
    before, found = stored(memory), []
    for groups in ([(0,), (1,), (2,)], [(0, 1, 2)]):
        sequences = [packing.begun(TOKENS[20 * place :][: 10 + place]) for place in range(3)]
        logits: list[mx.array] = []
        for places in groups:
            batch = packing.runner.new_batch(packing.pool, 0)
            batch._kept_graph = batch._traced  # type: ignore[assignment]
            batch.hold([sequences[place] for place in places])
            logits.append(batch.step([7 + place for place in places]))
            mx.eval(logits)
        found.append((mx.concatenate(logits), [stored(each) for each in sequences]))
    (alone, kept_alone), (together, kept) = found
    assert mx.allclose(alone, together, rtol=1e-4, atol=1e-5)
    assert kept == kept_alone
    assert stored(memory) == before


@pytest.mark.long(4)
@pytest.mark.parametrize("pass_rows", [0, 16])
def test_a_packed_graph_is_kept_ahead_only_where_passes_are_packed(pass_rows: int, tmp_path: Path) -> None:
    """They are not where a step's rows have a fixed number."""
    packing, kept = Packing(write_family(tmp_path, ALL["qwen3"])), list[int]()
    packing.runner.pass_rows = pass_rows
    passes = packing.runner._passes(packing.pool)
    passes._kept_graph = lambda *given: kept.append(given[2].shape[0]) or passes._traced(*given)  # type: ignore[assignment]
    for rows in (1, 2):
        packing.runner.keep_graph(packing.pool, ROW_TOKENS, 0, rows)
    assert kept == ([1] if pass_rows else [1, 2])


@pytest.mark.long(5)
def test_a_packed_pass_that_fails_or_finds_no_room_has_changed_nothing(tmp_path: Path) -> None:
    packing = Packing(write_family(tmp_path, ALL["qwen3"]), pages=6)
    sequences = [packing.begun(TOKENS[:100]), packing.begun(TOKENS[100:120])]
    before, pool = [stored(kv) for kv in sequences], packing.pool
    cells = [Cell(sequences[0], TOKENS[200:264]), Cell(sequences[1], TOKENS[300:620])]

    def fail(_: mx.array) -> None:
        raise ZeroDivisionError

    used = pool.allocator.used
    with pytest.raises(ZeroDivisionError):
        packing.packed(*cells, meanwhile=fail)
    taken = pool.take(pool.allocator.free)
    with pytest.raises(ResourceExhausted):
        packing.packed(*cells)
    pool.release(taken)
    assert ([stored(kv) for kv in sequences], pool.allocator.used) == (before, used)
    assert [kv.length for kv in sequences] == [100, 20]
    packing.packed(*cells)
    assert [kv.length for kv in sequences] == [164, 340]


def test_early_comes_when_a_passs_first_layers_are_enqueued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packing, told = Packing(write_family(tmp_path, ALL["qwen3"])), list[object]()
    enqueue = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *given: told.append(given[0].shape) or enqueue(*given))
    cell = Cell(SequenceKV(packing.pool), TOKENS[:70])
    logits = packing.packed(cell, meanwhile=lambda _: told.append("then"), early=lambda: told.append("early"))
    assert told == [(2, ROW_TOKENS), "early", logits.shape, "then"]


def test_a_cell_whose_first_row_would_see_rows_that_are_gone_is_not_packed() -> None:
    identity = identity_of([windowed(300), full()], policy_of(Rung.Q4, "bfloat16"))
    kv = SequenceKV(KvPool(identity, 16 * KvPool(identity, 1).page_bytes, dialect=Dialect.CUDA))
    [table] = [each for each in kv.tables if each.window]
    kv.length = 1024 + 299  # the first position that a new token sees begins a block
    table.pages, table.valid_from = {4: 1, 5: 2}, 1024
    assert [count for count in range(1, 200) if can_pack(kv, count)] == [64, 128, 192]
    kv.length += ROW_TOKENS - 1
    assert all(can_pack(kv, count) for count in range(1, 200))
    table.pages = {}  # they were nobody's
    assert can_pack(SequenceKV(kv.pool), 5), "in front of a sequence nothing is seen"


@pytest.mark.parametrize(
    ("layers", "most"),
    [
        ([windowed(1024), full()], 1023),
        ([windowed(128), full()], 127),
        ([windowed(40)], 0),
        ([full(), recurrent(4)], 0),
    ],
)
def test_a_cell_is_packed_if_all_of_it_stays_in_each_window(layers: list[Any], most: int) -> None:
    identity = identity_of(layers, policy_of(Rung.Q4, "bfloat16"))
    assert most_packed_tokens(identity, Dialect.CUDA, "bfloat16") == most
    assert most_packed_tokens(identity, None, "bfloat16") == 0


def test_a_graph_is_kept_for_each_number_of_rows_and_takes_tokens_places_and_pages() -> None:
    identity = identity_of([full(), windowed(100)])
    pool = KvPool(identity, 40 * KvPool(identity, 1).page_bytes, is_allocated=True, dialect=Dialect.CUDA)
    traced: list[object] = []

    def logits_of(tokens: mx.array, caches: list[Any]) -> mx.array:
        now = caches[0]._now
        told = [
            tokens.sum(axis=1),
            now.offsets,
            now.places.sum(axis=1),
            *(each.sum(axis=1) for each in now.block_tables),
        ]
        return mx.stack([one.astype(mx.float32) for one in told], axis=1)[:, None]

    passes = ShortPass(pool, logits_of, "float32")
    passes._kept_graph = KeptGraph(lambda *given: traced.append(given) or passes._traced(*given))
    for one, other in ((70, 3), (64, 40), (90, 60), (5, 64)):
        sequences = [SequenceKV(pool), SequenceKV(pool)]
        cells = [Cell(sequences[0], range(1, one + 1)), Cell(sequences[1], range(2, other + 2))]
        found = packed_logits(passes, cells, lambda _: None)
        for kv, cell, row in zip(sequences, cells, found.tolist(), strict=True):
            last = cell.token_ids[-ROW_TOKENS:]
            count, filled = len(cell.token_ids), max(0, ROW_TOKENS - len(cell.token_ids))
            places = sum(range(count - len(last), count)) - filled
            pages = [float(sum(table.pages.values())) for table in kv.tables]
            assert row == [sum(last), count - ROW_TOKENS, places, *pages]
    assert len(traced) == 2, "three rows, and two"
