"""What `kvasir bench load` makes of the times of its turns: with fixed numbers, so that a wrong share is found."""

import dataclasses
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import InvalidArgument
from kvasir_bench.arithmetic import percentile
from kvasir_bench.load.arithmetic import (
    Arrived,
    LoadTurn,
    Window,
    arrivals,
    distribution,
    findings,
    in_flight,
)
from kvasir_bench.load.run import LoadScope, lines


def test_arrivals_are_poisson_repeat_with_their_seed_and_stay_within_their_time() -> None:
    times = arrivals(50.0, 400.0, seed=7)
    assert times == arrivals(50.0, 400.0, seed=7)
    assert times != arrivals(50.0, 400.0, seed=8)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 400
    assert len(times) == pytest.approx(20_000, rel=0.03)
    waits = [later - earlier for earlier, later in pairwise(times)]
    # An exponential wait is as spread as it is long; regular arrivals would have no spread.
    assert mean((wait - 0.02) ** 2 for wait in waits) ** 0.5 == pytest.approx(0.02, rel=0.05)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.sampled_from([1, 50, 95, 99, 100]))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[int], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < len(values) * percent / 100


def test_percentiles_of_a_hundred_are_their_ranks() -> None:
    found = distribution([float(value) for value in range(100, 0, -1)])
    assert found == {"count": 100, "mean": 50.5, "p50": 50.0, "p95": 95.0, "p99": 99.0, "largest": 100.0}
    assert distribution([])["p99"] is None
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


TURNS = [
    # In the ramp; its later tokens fall into the steady state.
    LoadTurn(5.0, [(6.0, 1), (9.0, 1), (11.0, 2), (12.0, 1)], ended_s=12.0),
    # Steady, from its due time: 2 s to the first token.
    LoadTurn(12.0, [(14.0, 1), (15.0, 1)], ended_s=15.5),
    # Steady, but its second token comes in the tail.
    LoadTurn(19.0, [(19.5, 1), (23.0, 1)], ended_s=24.0),
    LoadTurn(13.0, [], ended_s=13.5, failure="TOO_MANY_TURNS"),
]
WINDOW = Window(10.0, 20.0)


def test_turns_count_where_they_arrived_and_tokens_where_they_came() -> None:
    found = findings(TURNS, WINDOW)
    assert found["phases"] == {"ramp": 1, "steady": 3, "tail_s": 4.0}
    assert (found["first_token_s"]["count"], found["first_token_s"]["largest"]) == (2, 2.0)
    assert (found["first_token_s"]["mean"], found["end_to_end_s"]["largest"]) == (1.25, 5.0)
    assert found["end_to_end_s"]["count"] == 2, "a turn that failed has no end"
    # Gaps that end in the steady state: 9 to 11, 11 to 12, 14 to 15. Of 3.5 s, one ends in the tail.
    assert (found["gap_s"]["count"], found["gap_s"]["largest"]) == (3, 2.0)
    assert found["tokens_per_s"] == (2 + 1 + 1 + 1 + 1) / 10
    assert (found["in_flight_at_start"], found["in_flight_at_end"]) == (1, 1)
    assert found["failures"] == {"TOO_MANY_TURNS": 1}


def test_a_turn_is_in_flight_from_its_due_time_until_its_end() -> None:
    turns = [LoadTurn(1.0, ended_s=3.0), LoadTurn(2.0)]
    assert [in_flight(turns, time_s) for time_s in (0.5, 1.0, 2.0, 3.0, 99.0)] == [0, 1, 2, 1, 1]


def test_a_load_in_which_nothing_came_is_shown_all_the_same() -> None:
    scope = dataclasses.asdict(LoadScope(1.0, 20.0, 0.0, 8, 4))
    known = {"settings": scope, "offered_tokens_per_s": 4.0, "tokens_counted_by": {}, "prompt_tokens_are_guessed": True}
    shown = "\n".join(lines({**known, **findings(TURNS[3:], WINDOW)}))
    assert "–" in shown
    assert "failed: 1 (TOO_MANY_TURNS)" in shown
    assert "a guess" in shown
    assert "2 s" in "\n".join(lines({**known, **findings(TURNS, WINDOW)}))


def test_a_ramp_that_leaves_no_steady_state_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="shorter"):
        _ = LoadScope(1.0, 10.0, 10.0, 8, 8).window


def test_a_total_that_a_server_names_is_spread_over_its_messages() -> None:
    turn = LoadTurn(0.0)
    for at in (1.0, 2.0, 3.0, 4.0):
        turn.add(Arrived(tokens=1), at)
    assert turn.tokens_in(Window(1.5, 3.5)) == 2
    turn.add(Arrived(total_tokens=12), 4.5)
    assert turn.tokens_in(Window(1.5, 3.5)) == 6
    assert len(turn.deltas) == 4
