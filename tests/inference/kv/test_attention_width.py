"""How many positions a decoding step attends to on a CPU: no more than the bits of its rows need."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inference_svc.kv.model_hooks import row_exact
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.test_backends import IS_MKL, Greedy, alone, prefilled, tokens_of

LENGTHS = (20, 190, 500, 900)  # within the first block of a long sum, and beyond it
STEPS = 2


@pytest.mark.cpu_only("a GPU attends over pages, and sums no position behind a row's end")
def test_a_row_keeps_its_bits_beside_rows_with_which_attention_is_wider(
    model: Any, new_kv: Callable[[], SequenceKV]
) -> None:
    single = {length: prefilled(model, new_kv(), tokens_of(length, length)) for length in LENGTHS}
    together = Greedy(model, single[LENGTHS[0]].pool)
    for length, kv in single.items():
        together.join(length, kv.fork(), 9)
    for _ in range(STEPS):
        together.step()
    for length, kv in single.items():
        assert np.array_equal(together.logits[length], alone(model, kv, 9, STEPS)), length


@pytest.mark.cpu_only("a GPU attends over pages")
def test_short_rows_attend_to_their_positions_and_not_to_a_whole_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 tokens in and a short reply a block of 384 is twice as much."""
    monkeypatch.setattr(row_exact, "_attention_step", lambda: 384)
    assert row_exact._is_fine_within(384) or not IS_MKL
    if IS_MKL:
        assert [row_exact.attention_width(rows) for rows in (1, 180, 383, 385)] == [32, 192, 384, 768]


def test_attention_has_whole_blocks_where_a_narrower_width_would_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_exact, "_attention_step", lambda: 384)
    monkeypatch.setattr(row_exact, "_is_fine_within", lambda _step: False)
    assert [row_exact.attention_width(rows) for rows in (1, 383, 384, 385)] == [384, 384, 384, 768]
