"""Masks of one namespace do not hold up others, whatever they cost, and nobody with a format waits for ever."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.scheduling.mask_budget import MaskBudget
from tests.made_models.sampling import sampled

STEP_S = 0.016  # without masks


@dataclass(eq=False)
class Row:
    namespace: str
    mask_s: float | None = None
    masks_s: float = 0.0
    generated: int = 0

    @property
    def is_masked(self) -> bool:
        return self.mask_s is not None


def seconds(rows: list[Row], steps: int) -> float:
    """What so many steps take of them all."""
    budget, spent_s = MaskBudget[Row](), 0.0
    for _ in range(steps):
        masks_s = 0.0
        for row in budget.begin_step(rows, rows):
            row.generated += 1
            row.masks_s += row.mask_s or 0.0
            masks_s += row.mask_s or 0.0
        budget.end_step(STEP_S + masks_s)
        spent_s += STEP_S + masks_s
    return spent_s


def test_dear_masks_take_a_quarter_of_a_step_from_others_and_no_more() -> None:
    """Eight turns whose masks take 20 ms each made a step of 16 ms one of 176."""
    victim, attackers = Row("b"), [Row("a", 0.020) for _ in range(8)]
    assert seconds([victim, *attackers], 400) < 1.3 * 400 * STEP_S
    assert victim.generated == 400
    generated = [row.generated for row in attackers]
    assert min(generated) > 0
    assert max(generated) - min(generated) <= 1  # in turn


def test_cheap_masks_never_sit_out_beside_dear_ones_of_another_namespace() -> None:
    honest, attackers = Row("b", 0.00005), [Row("a", 0.020) for _ in range(8)]
    seconds([honest, *attackers], 200)
    assert honest.generated == 200


def test_a_namespace_alone_is_not_bounded() -> None:
    rows = [Row("a", 0.020) for _ in range(8)]
    seconds([*rows, Row("a")], 50)
    assert {row.generated for row in rows} == {50}


def test_another_namespaces_prompt_or_wait_counts_as_much_as_its_decoding() -> None:
    budget, rows, waiting = MaskBudget[Row](), [Row("a", 0.020) for _ in range(8)], Row("b")
    for _ in range(10):
        decoding = budget.begin_step(rows, [*rows, waiting])
        for row in decoding:
            row.masks_s += 0.020
        budget.end_step(STEP_S + 0.020 * len(decoding))
    assert len(budget.begin_step(rows, [*rows, waiting])) <= 1
    assert len(budget.begin_step(rows, rows)) == 8


def test_a_turn_that_was_preempted_is_not_billed_twice() -> None:
    budget, row, other = MaskBudget[Row](), Row("a", 0.001, masks_s=5.0), Row("b")
    budget.begin_step([row, other], [row, other])
    budget.end_step(STEP_S)
    sat_out = 1
    while row not in budget.begin_step([row, other], [row, other]):
        budget.end_step(STEP_S)
        sat_out += 1
    assert sat_out > 100  # five seconds are paid for
    budget.begin_step([other], [row, other])
    budget.end_step(STEP_S)
    assert row in budget.begin_step([row, other], [row, other])


rows = st.builds(Row, st.sampled_from("abc"), st.one_of(st.none(), st.floats(0.00001, 0.1)))


@pytest.mark.long(2)
@given(st.lists(rows, min_size=1, max_size=12))
@settings(max_examples=sampled(30, of=100))
def test_all_decode_in_the_end_and_masks_stay_within_their_part(rows: list[Row]) -> None:
    dearest_s = sum(row.mask_s or 0 for row in rows)
    steps = 2000
    spent_s = seconds(rows, steps)
    for row in rows:
        assert row.generated if row.is_masked else row.generated == steps
    if len({row.namespace for row in rows}) > 1:
        assert spent_s <= 1.26 * steps * STEP_S + dearest_s
