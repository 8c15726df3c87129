"""What `kvasir bench load` makes of the times of its turns: with fixed numbers, so that a wrong share is found."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from itertools import accumulate, islice, pairwise
from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import InvalidArgument
from kvasir.waits import PAUSE_S
from kvasir_bench.arithmetic import percentile
from kvasir_bench.load.arithmetic import (
    Arrived,
    Lengths,
    Limits,
    LoadTurn,
    TurnFailed,
    Window,
    arrivals,
    distribution,
    findings,
    in_flight,
)
from kvasir_bench.load.report import lines, plots, ratios
from kvasir_bench.load.run import GrpcTarget, LoadAgent, LoadScope, run
from kvasir_bench.pictures import series

SHORT = Lengths(8, 8)


def test_arrivals_are_poisson_repeat_with_their_seed_and_stay_within_their_time() -> None:
    times = list(arrivals(50.0, 400.0, seed=7))
    assert times == list(arrivals(50.0, 400.0, seed=7))
    assert times != list(arrivals(50.0, 400.0, seed=8))
    assert times[:9] == list(islice(arrivals(50.0, math.inf, seed=7), 9))
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
    settings = LoadScope(SHORT, SHORT, seconds=20.0).settings
    known = {"settings": settings, "name": "here", "offered_tokens_per_s": 4.0, "tokens_counted_by": {}}
    known["prompt_tokens_are_guessed"] = True
    shown = "\n".join(lines({**known, **findings(TURNS[3:], WINDOW)}))
    assert "–" in shown
    assert "here failed: 1 (TOO_MANY_TURNS)" in shown
    assert "a guess" in shown
    assert "2 s" in "\n".join(lines({**known, **findings(TURNS, WINDOW)}))


def test_two_servers_stand_in_one_table_and_in_each_picture() -> None:
    settings = LoadScope(SHORT, SHORT, seconds=20.0, limits=Limits(1.0)).settings
    found = {"offered_tokens_per_s": None, "tokens_counted_by": {}, "prompt_tokens_are_guessed": False}
    found |= findings(TURNS, WINDOW, Limits(1.0)) | {"failures": {}}
    peer = {**found, "name": "other", "serves": "one by one", "wall_s": 48.0, "good_requests_per_s": 0.0}
    both = {"settings": settings, "name": "here", **found, "peer": peer, "ratios": ratios(found, peer)}
    assert (both["ratios"]["wall_s"], both["ratios"]["first_token_p50"]) == (0.5, 1.0)
    assert ratios(found, {**peer, "reply_tokens": 2 * found["reply_tokens"]})["reply_tokens"] == 0.5, "it ended sooner"
    assert both["ratios"]["good_requests_per_s"] is None, "nothing is divided by nothing"
    shown = "\n".join(lines(both))
    assert Counter(word for word in shown.split() if word in ("here", "other"))["other"] == 4 + 1
    assert "other serves one by one" in shown
    assert "here / other: wall s 0.5" in shown
    for picture, rows in plots(both).drawn.values():
        assert set(series(picture, rows)) == {"here", "other"}
    for failed in (both, peer):
        failed["failures"] = {"TOO_MANY_TURNS": 1}
        both["ratios"] = ratios(found | {"failures": both["failures"]}, peer)
        assert both["ratios"] is None, "they did not do the same work"
        assert "here / other: not compared, because turns failed" in "\n".join(lines(both))
        failed["failures"] = {}
    both["peer"] = {"name": "other", "left_out": "no such model"}
    assert "other was left out: no such model" in "\n".join(lines(both))


@pytest.mark.parametrize(
    "wrong", [{}, {"seconds": 9.0, "requests": 9}, {"seconds": 9.0, "ramp_s": 9.0}, {"requests": 9, "ramp_s": 1.0}]
)
def test_a_run_without_one_end_or_without_a_steady_state_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        LoadScope(SHORT, SHORT, **wrong)


@given(st.integers(1, 5000), st.integers(0, 5000), st.booleans(), st.randoms())
def test_drawn_lengths_stay_within_their_bounds_and_are_read_as_they_are_written(
    low: int, more: int, is_skewed: bool, random: Random
) -> None:
    lengths = Lengths(low, low + more, is_skewed and more > 0)
    assert Lengths.parse(str(lengths), "--in") == lengths
    assert all(low <= lengths.draw(random) <= low + more for _ in range(20))


def test_half_of_skewed_lengths_are_below_the_geometric_mean_and_half_of_even_ones_below_the_middle() -> None:
    random = Random(5)
    for text, middle in (("100-6400", 3250), ("100~6400", 800)):
        lengths = Lengths.parse(text, "--in")
        drawn = [lengths.draw(random) for _ in range(4000)]
        assert sum(each <= middle for each in drawn) == pytest.approx(2000, rel=0.06)


@pytest.mark.parametrize("text", ["", "0", "many", "9-8", "0-8", "1-2-3", "-5", "1.5", "٣", "9" * 10])
def test_lengths_that_are_none_are_refused_by_their_option(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--out: expected tokens as 512") as refused:
        Lengths.parse(text, "--out")
    assert refused.value.field == "--out"


_TIMES = st.floats(0, 30)


@given(st.lists(st.tuples(_TIMES, st.lists(_TIMES, max_size=5), st.booleans()), max_size=8), _TIMES, _TIMES, _TIMES)
def test_goodput_is_of_turns_that_end_well_in_time_and_falls_with_the_limits(
    given_turns: list[tuple[float, list[float], bool]], first_s: float, gap_s: float, less_s: float
) -> None:
    turns = []
    for due_s, gaps, fails in given_turns:
        times = list(accumulate(gaps, initial=due_s))
        turns.append(LoadTurn(due_s, [(at, 1) for at in times[1:]], None, times[-1], "broken" if fails else ""))
    window = Window(0.0, 1000.0)
    found = findings(turns, window, Limits(first_s, gap_s))
    good = [
        turn
        for turn in turns
        if not turn.failure
        and turn.deltas
        and turn.deltas[0][0] - turn.due_s <= first_s
        and all(later[0] - earlier[0] <= gap_s for earlier, later in pairwise(turn.deltas))
    ]
    assert found["good_requests_per_s"] == len(good) / 1000
    assert found["good_share"] == (len(good) / len(turns) if turns else None)
    assert found["good_requests_per_s"] <= found["requests_per_s"]
    narrower = findings(turns, window, Limits(min(first_s, less_s), min(gap_s, less_s)))
    assert narrower["good_requests_per_s"] <= found["good_requests_per_s"]
    assert findings(turns, window)["good_share"] is None


class _Listed:
    """A server that answers at once, fails each ninth turn, and lists the conversations that it is sent."""

    counts = "token_ids"

    def __init__(self, delay_s: float = 0.0) -> None:
        self.seen: list[tuple[str, tuple[str, ...], int]] = []
        self.forgotten: list[str] = []
        self._delay_s = delay_s

    async def tokens_per_word(self, text: str) -> float:
        return len(text) / len(text.split())

    async def turn(self, agent: LoadAgent, max_tokens: int) -> AsyncGenerator[Arrived, None]:
        self.seen.append((agent.name, tuple(message["content"] for message in agent.messages), max_tokens))
        if len(self.seen) % 9 == 0:
            raise TurnFailed("the ninth")
        await asyncio.sleep(self._delay_s)
        yield Arrived(3, text="yes")

    async def forget(self, agents: Sequence[str]) -> None:
        self.forgotten += agents


def _sent(delay_s: float = 0.0, **options: Any) -> tuple[_Listed, dict[str, Any]]:
    server = _Listed(delay_s)
    scope = LoadScope(Lengths(10, 30), Lengths(5, 9), **options)
    return server, asyncio.run(run(server, scope, tokens_per_word=2.0))


def test_callers_at_once_send_so_many_turns_and_both_servers_the_same_texts_and_lengths() -> None:
    quick, found = _sent(at_once=4, requests=21, seed=3)
    slow, _ = _sent(0.001, at_once=4, requests=21, seed=3)
    assert [turn[1:] for turn in quick.seen] == [turn[1:] for turn in slow.seen]
    assert len({texts for _, texts, _ in quick.seen}) == len(quick.seen) == 21
    assert {name for name, *_ in quick.seen} == {""}
    assert found["failures"] == {"the ninth": 2}
    assert (found["phases"]["steady"], found["end_to_end_s"]["count"]) == (21, 19)
    assert (found["reply_tokens"], found["offered_tokens_per_s"]) == (57, None)
    assert {len(text.split()) for _, (text,), _ in quick.seen} <= set(range(5, 16))
    assert {most for *_, most in quick.seen} <= set(range(5, 10))
    assert found["phases"]["tail_s"] == 0


def test_a_rate_offers_its_tokens_while_turns_arrive_however_long_they_take() -> None:
    """A server that falls behind must not seem to be offered what it does."""
    long = 0.4
    for options in ({"requests": 20}, {"seconds": 20 / 200}):
        found = asyncio.run(run(_Listed(long), LoadScope(SHORT, SHORT, 200.0, **options), tokens_per_word=2.0))
        assert found["offered_tokens_per_s"] == pytest.approx(200 * 8, rel=0.6)
    assert found["wall_s"] > long


async def test_turns_over_grpc_are_greedy_as_those_over_http() -> None:
    """A model's own temperature would give the two servers other replies."""
    given: list[dict[str, Any]] = []

    class Client:
        async def generate(self, **options: Any) -> AsyncGenerator[Any, None]:
            given.append(options)
            return
            yield

    client: Any = Client()
    async for _ in GrpcTarget(client).turn(LoadAgent("", 0, [{"role": "user", "content": "1"}]), 9):
        pass
    assert [each["sampling"] for each in given] == [{"max_tokens": 9, "temperature": 0}]


class _Full(_Listed):
    """A server that refuses each turn at once."""

    async def turn(self, agent: LoadAgent, max_tokens: int) -> AsyncGenerator[Arrived, None]:
        raise TurnFailed("CALLER_BUSY")
        yield Arrived()


def test_a_caller_whose_turn_was_refused_waits_before_its_next_one() -> None:
    found = asyncio.run(run(_Full(), LoadScope(SHORT, SHORT, at_once=2, seconds=0.5), tokens_per_word=2.0))
    assert 2 <= found["failures"]["CALLER_BUSY"] <= 2 * (1 + math.floor(0.5 / PAUSE_S))


def test_agents_come_back_with_their_conversations_behind_the_prefix_that_all_share_and_are_forgotten() -> None:
    server, _ = _sent(at_once=4, requests=40, turns=3, shared_prefix=12)
    assert len({texts[0] for _, texts, _ in server.seen}) == 1
    assert len(server.seen[0][1][0].split()) == 6
    by_agent: dict[str, list[tuple[str, ...]]] = {}
    for name, texts, _ in server.seen:
        by_agent.setdefault(name, []).append(texts)
    assert max(map(len, by_agent.values())) == 3
    for conversation in by_agent.values():
        for earlier, later in pairwise(conversation):
            assert later[: len(earlier)] == earlier
            assert later[len(earlier)] == "yes"
            assert len(later) == len(earlier) + 2
    assert sorted(server.forgotten) == sorted(by_agent)


def test_a_total_that_a_server_names_is_spread_over_its_messages() -> None:
    turn = LoadTurn(0.0)
    for at in (1.0, 2.0, 3.0, 4.0):
        turn.add(Arrived(tokens=1), at)
    assert turn.tokens_in(Window(1.5, 3.5)) == 2
    turn.add(Arrived(total_tokens=12), 4.5)
    assert turn.tokens_in(Window(1.5, 3.5)) == 6
    assert len(turn.deltas) == 4
