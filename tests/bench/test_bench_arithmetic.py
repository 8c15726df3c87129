"""What `kvasir bench engine` makes of measured times: with fixed numbers, so that a wrong ratio is found."""

import argparse
from itertools import islice

import pytest
from kvasir_bench.arithmetic import Summary, Target, gaps, median_time, medians, rate_of_all, rounded_row
from kvasir_bench.engine.__main__ import _counts
from kvasir_bench.engine.prompts import mixed_lengths, shuffled, user_turns


def test_lengths_and_batches_are_numbers_above_0() -> None:
    assert _counts("128, 2048") == (128, 2048)
    for text in ("-5", "0", "1,", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="numbers above 0"):
            _counts(text)


def test_a_rate_counts_only_while_all_rows_decode() -> None:
    # The second row has its first token at 2, the first row its last at 4: within (2, 4] there are 2 + 4 tokens.
    assert rate_of_all([[1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]]) == 6 / 2


def test_rows_that_never_ran_together_have_no_rate() -> None:
    with pytest.raises(ValueError, match="together"):
        rate_of_all([[1.0, 2.0], [2.0, 3.0]])


def test_a_summary_tells_the_median_and_how_far_the_repeats_lie_apart() -> None:
    summary = Summary.of([4.0, 1.0, 2.0])
    assert (summary.median, summary.spread) == (2.0, 1.5)
    with pytest.raises(ValueError, match="at least one"):
        Summary.of([])


def test_repeats_of_one_row_become_medians_and_a_spread_stands_behind_its_name() -> None:
    found = medians([{"a": 4.0, "b": 1}, {"a": 1.0, "b": 9}, {"a": 2.0, "b": 3}], "a")
    assert list(found.items()) == [("a", 2.0), ("a_spread", 1.5), ("b", 3)]


def test_a_round_that_warms_up_is_in_no_median_and_work_may_measure_itself() -> None:
    own = iter([100.0, 3.0, 1.0, 2.0])
    assert median_time(lambda: next(own), repeats=3) == 2.0
    clock = iter([0.0, 100.0, 200.0, 201.0, 300.0, 304.0, 400.0, 402.0])
    assert median_time(lambda: None, 3, lambda: next(clock)) == 2.0


def test_gaps_are_those_that_touch_the_time_requested() -> None:
    times = [0.0, 1.0, 3.0, 6.0, 10.0]
    assert gaps(times, 2.0, 5.0) == [2.0, 3.0]
    assert gaps(times, 0.0, 10.0) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (Target("at least", 3.0, 3.0), True),
        (Target("at least", 2.9, 3.0), False),
        (Target("at most", 0.5, 0.5, is_most=True), True),
        (Target("at most", 0.6, 0.5, is_most=True), False),
        (Target("not found", None, 0.5, is_most=True), False),
    ],
)
def test_a_target_is_met_at_its_limit(target: Target, is_met: bool) -> None:
    row = target.row()
    assert row["is_met"] is is_met
    assert row["wanted"] == (f"<= {target.limit}" if target.is_most else f">= {target.limit}")


def test_a_row_is_reported_with_four_digits_and_whole_counts() -> None:
    assert rounded_row({"seconds": 0.123456, "count": 123456, "ratio": None}) == {
        "seconds": 0.1235,
        "count": 123456,
        "ratio": None,
    }


@pytest.mark.parametrize("rows", [2, 3, 8, 16])
def test_mixed_lengths_span_their_range_and_none_is_left_out(rows: int) -> None:
    lengths = mixed_lengths(rows)
    assert sorted(lengths) == [200 + 3800 * index // (rows - 1) for index in range(rows)]


def test_texts_of_different_numbers_differ_and_the_same_number_gives_the_same_text() -> None:
    messages = [f"message {n}" for n in range(50)]
    first, again, other = (list(islice(shuffled(messages, number), 120)) for number in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first[:50]) == sorted(first[50:100]) == sorted(messages)
    assert first[:50] != first[50:100]


def test_a_chat_has_as_many_turns_as_the_longest_measurement_takes() -> None:
    turns = user_turns(10)
    assert len(turns) == 10
    assert all(text for texts in turns for text in texts)
