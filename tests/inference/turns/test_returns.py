"""When agents are expected, and the bounds of waking them ahead."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.engine.api import AgentKey
from inference_svc.turns.asleep.allowance import Allowance
from inference_svc.turns.asleep.returns import LEAD, SECONDS_OF_DAY, Returns, spans_around, spans_of_day

HOUR_S, BEGAN_S = 3600.0, 1_800_000_000.0 - 1_800_000_000.0 % SECONDS_OF_DAY  # at midnight
ADA, BOB = AgentKey("default", "ada"), AgentKey("default", "bob")


def learned(key: AgentKey, times: list[float], returns: Returns | None = None) -> Returns:
    known = returns or Returns()
    for time in times:
        known.came(key, BEGAN_S + time)
    return known


def mornings(days: int, hour: float = 9.0) -> list[float]:
    dice = random.Random(1)
    return [day * SECONDS_OF_DAY + (hour + dice.uniform(-0.5, 0.5)) * HOUR_S for day in range(days)]


@pytest.mark.parametrize(("hour", "is_expected"), [(3.0, False), (9.0, True), (12.0, False), (21.0, False)])
def test_an_agent_that_comes_in_the_morning_is_expected_then(hour: float, is_expected: bool) -> None:
    known = learned(ADA, mornings(10))
    assert (known.expected(BEGAN_S + 10 * SECONDS_OF_DAY + hour * HOUR_S) == [ADA]) is is_expected


@pytest.mark.parametrize("hour", [0.0, 12.0, 23.9])
def test_the_border_of_days_changes_nothing(hour: float) -> None:
    known = learned(ADA, mornings(10, hour))
    at = [BEGAN_S + 10 * SECONDS_OF_DAY + (hour + ahead) * HOUR_S for ahead in (-6.0, 0.0, 6.0)]
    assert [known.expected(each) == [ADA] for each in at] == [False, True, False]


@pytest.mark.parametrize("period_hours", [7.0, 26.0, 168.0])
def test_a_timer_is_expected_by_its_period_and_just_before(period_hours: float) -> None:
    last = 9 * period_hours * HOUR_S
    known = learned(ADA, [turn * period_hours * HOUR_S for turn in range(10)])
    due = BEGAN_S + last + period_hours * HOUR_S
    assert known.expected(due - LEAD) == known.expected(due) == [ADA]
    assert known.expected(due - 2 * HOUR_S) == []
    assert known.expected(due + 2 * HOUR_S) == []


def test_an_agent_that_came_is_not_expected_and_one_that_is_away_too_long_is_gone() -> None:
    known = learned(ADA, mornings(10))
    assert known.expected(BEGAN_S + 11 * SECONDS_OF_DAY + 9 * HOUR_S) == [ADA]
    assert known.expected(BEGAN_S + 30 * SECONDS_OF_DAY + 9 * HOUR_S) == []
    at = BEGAN_S + 10 * SECONDS_OF_DAY + 9 * HOUR_S
    known.came(ADA, at)
    assert known.expected(at + 60) == []


def test_of_an_agent_that_is_hardly_known_its_namespaces_hours_are_taken() -> None:
    known = learned(ADA, mornings(10))
    known = learned(BOB, [9.5 * SECONDS_OF_DAY], known)
    learned(AgentKey("other", "eve"), [9.5 * SECONDS_OF_DAY], known)
    at = BEGAN_S + 10 * SECONDS_OF_DAY + 9 * HOUR_S
    assert known.expected(at) == [ADA, BOB], "the best known first, and nobody of a namespace that taught nothing"
    assert known.expected(at + 6 * HOUR_S) == []


def test_namespaces_take_turns() -> None:
    known = Returns()
    for name in ("a", "b", "c"):
        learned(AgentKey("many", name), mornings(10), known)
    learned(AgentKey("few", "d"), mornings(10, 9.2), known)
    names = [key.namespace for key in known.expected(BEGAN_S + 10 * SECONDS_OF_DAY + 9 * HOUR_S)]
    assert sorted(names[:2]) == ["few", "many"]


@given(times=st.lists(st.floats(0, 60 * SECONDS_OF_DAY), min_size=1, max_size=40))
def test_each_known_return_lies_in_a_span(times: list[float]) -> None:
    """Each known value lies in its span; spans are apart and ascending; those of a day are at most a day."""
    around, of_day = spans_around(times), spans_of_day(times)
    for spans, known in ((around, times), (of_day, [time % SECONDS_OF_DAY for time in times])):
        assert all(first < end for first, end in spans)
        assert all(before[1] < after[0] for before, after in pairwise(spans))
        shifts = (0.0,) if spans is around else (-SECONDS_OF_DAY, 0.0, SECONDS_OF_DAY)
        for value in known:
            assert any(first <= value + shift <= end for first, end in spans for shift in shifts)
    assert of_day[-1][1] - of_day[0][0] <= 2 * SECONDS_OF_DAY
    assert sum(end - first for first, end in of_day) <= SECONDS_OF_DAY + 4 * HOUR_S


@given(gaps=st.lists(st.floats(1, 10 * SECONDS_OF_DAY), min_size=1, max_size=60), now=st.floats(0, 20 * SECONDS_OF_DAY))
def test_returns_that_were_kept_expect_the_same_agents(gaps: list[float], now: float) -> None:
    known, time = Returns(), BEGAN_S
    for gap in gaps:
        time += gap
        known.came(ADA, time)
        known.came(BOB, time + 7)
    again = Returns()
    again.read_json(known.to_json(time + now, ["default", "unknown"]))
    assert again.expected(time + now) == known.expected(time + now)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": {"b": [-1]}}', '{"a": {"b": [1, [2]]}}', '{"a": {"b": []}}']
)
def test_a_damaged_file_of_returns_is_refused_and_changes_nothing(text: str) -> None:
    known = learned(ADA, mornings(10))
    at = BEGAN_S + 10 * SECONDS_OF_DAY
    before = known.to_json(at, ["default"])
    with pytest.raises(ValueError, match=r"returns of agents|expected|Expecting|unpack"):
        known.read_json(text)
    assert known.to_json(at, ["default"]) == before


def test_agents_that_are_gone_are_not_kept() -> None:
    known = learned(ADA, mornings(10))
    assert "ada" in known.to_json(BEGAN_S + 11 * SECONDS_OF_DAY, ["default"])
    assert "ada" not in known.to_json(BEGAN_S + 30 * SECONDS_OF_DAY, ["default"])
    assert "ada" not in known.to_json(BEGAN_S + 11 * SECONDS_OF_DAY, ["other"])


def test_agents_of_one_namespace_do_not_push_out_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    known = learned(ADA, mornings(10))
    for number in range(5000):
        known.came(AgentKey("many", f"agent-{number}"), BEGAN_S)
    assert known.last_s(ADA) is not None
    assert known.last_s(AgentKey("many", "agent-0")) is None
    assert known.last_s(AgentKey("many", "agent-4999")) == BEGAN_S


@given(
    share=st.floats(0, 1),
    wakes=st.lists(st.tuples(st.floats(0, 2 * SECONDS_OF_DAY), st.floats(0.1, HOUR_S)), max_size=50),
)
def test_waking_ahead_takes_its_share_of_the_time_and_no_more(share: float, wakes: list[tuple[float, float]]) -> None:
    allowance, now, spent = Allowance(share, 100, 0.0), 0.0, 0.0
    for pause, took in wakes:
        now += pause
        if allowance.has_time(now) and allowance.has_room(0, 50):
            spent += took
            allowance.spend(took)
    assert spent <= share * (now + HOUR_S) + HOUR_S
    assert spent == 0 or share > 0


@pytest.mark.parametrize(("held", "needed", "may"), [(0, 50, True), (0, 51, False), (20, 30, True), (20, 31, False)])
def test_woken_agents_hold_at_most_half_of_the_memory(held: int, needed: int, may: bool) -> None:
    assert Allowance(0.1, 100, 0.0).has_room(held, needed) is may


def test_a_clock_that_goes_back_gives_no_time() -> None:
    allowance = Allowance(0.5, 100, 1000.0)
    allowance.spend(0.5 * HOUR_S + 1)
    assert not allowance.has_time(0.0)
    assert allowance.has_time(10.0)


def test_turns_of_one_session_are_no_returns() -> None:
    known = learned(ADA, [0.0, 60.0, 120.0, 180.0, 240.0])
    learned(BOB, [60.0], known)  # of whom nothing is known: he is expected when others of his namespace come back
    assert known.expected(BEGAN_S + SECONDS_OF_DAY) == []


def test_times_on_both_sides_of_midnight_are_one_group() -> None:
    [(first, end)] = spans_of_day([SECONDS_OF_DAY - 600, 600.0, SECONDS_OF_DAY - 60, 60.0])
    assert end - first == 1200 + 2 * (1200 / 4 + 7200 / 4)


def test_at_most_a_days_share_is_saved() -> None:
    allowance = Allowance(0.1, 100, 0.0)
    assert allowance.has_time(30 * SECONDS_OF_DAY)
    allowance.spend(0.1 * SECONDS_OF_DAY + 1)
    assert not allowance.has_time(30 * SECONDS_OF_DAY)
