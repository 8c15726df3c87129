"""Where turns go among several engines: each agent to one place, no engine beyond its share, few agents moved."""

from collections import Counter
from contextlib import ExitStack
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import Unavailable
from kvasir.status import from_status, to_status
from kvasir_gateway.fleet.fleet_link import Engines, is_gone
from kvasir_gateway.fleet.placing import EngineState, Ring, agent_point, choose

NAMES = st.lists(st.text("abc:0123456789", min_size=1, max_size=8), min_size=1, max_size=6, unique=True)
AGENTS = [agent_point("default", f"agent-{number}") for number in range(2000)]
IDLE = EngineState()


@given(NAMES, st.integers(0, 2**64 - 1))
def test_every_engine_stands_once_in_an_agents_order_whatever_the_order_of_their_names(
    names: list[str], point: int
) -> None:
    mixed = sorted(names, reverse=True)
    order = list(Ring(names).order(point))
    assert sorted(order) == list(range(len(names)))
    assert [names[each] for each in order] == [mixed[each] for each in Ring(mixed).order(point)]


@given(NAMES, st.integers(0, 2**64 - 1), st.data())
def test_no_engine_gets_a_turn_beyond_its_share_nor_one_that_is_down(
    names: list[str], point: int, data: st.DataObject
) -> None:
    state = st.builds(EngineState, st.booleans(), st.integers(0, 50))
    states = data.draw(st.lists(state, min_size=len(names), max_size=len(names)))
    hot = data.draw(st.none() | st.integers(0, len(names) - 1))
    chosen = choose(Ring(names).order(point), states, hot)
    up = [each for each in states if each.is_up]
    assert (chosen is None) == (not up)
    if chosen is None:
        return
    assert states[chosen].is_up
    mean = (sum(each.open_turns for each in up) + 1) / len(up)
    share = max(4, ceil(1.5 * mean)) if chosen == hot else ceil(1.25 * mean)
    assert states[chosen].open_turns + 1 <= share


@given(NAMES, st.integers(0, 2**64 - 1), st.data())
def test_an_engine_of_three_open_turns_keeps_its_agent_though_others_are_idle(
    names: list[str], point: int, data: st.DataObject
) -> None:
    """Half more than a mean below one is a single turn: a hot agent would leave an engine that is all but idle."""
    states = [EngineState(data.draw(st.booleans()), data.draw(st.integers(0, 1))) for _ in names]
    hot = data.draw(st.integers(0, len(names) - 1))
    states[hot] = EngineState(open_turns=data.draw(st.integers(0, 3)))
    assert choose(Ring(names).order(point), states, hot) == hot


@pytest.mark.long(6)
def test_an_engine_that_goes_moves_its_own_agents_only_and_idle_engines_share_evenly() -> None:
    ring, states = Ring(["one", "two", "three"]), [IDLE] * 3
    before = [choose(ring.order(point), states) for point in AGENTS]
    shares = Counter(before)
    assert all(0.2 * len(AGENTS) < shares[each] < 0.47 * len(AGENTS) for each in range(3)), shares
    after = [choose(ring.order(point), [IDLE, EngineState(is_up=False), IDLE]) for point in AGENTS]
    assert all(was == now for was, now in zip(before, after, strict=True) if was != 1)
    more = [choose(Ring(["one", "two", "three", "four"]).order(point), [IDLE] * 4) for point in AGENTS]
    assert {now for was, now in zip(before, more, strict=True) if was != now} == {3}


def test_an_agent_stays_where_it_is_hot_until_that_engine_has_half_more_than_its_share() -> None:
    order, point = list(Ring(["one", "two"]).order(AGENTS[0])), AGENTS[0]
    assert list(Ring(["one", "two"]).order(point)) == order
    hot = order[1]
    states = [IDLE, IDLE]
    assert choose(order, states, hot) == hot
    states[hot] = EngineState(open_turns=3)
    assert choose(order, states, hot) == hot
    states[hot] = EngineState(open_turns=4)
    assert choose(order, states, hot) == order[0]


def test_a_choice_looks_at_no_more_of_the_ring_than_it_needs() -> None:
    ring = Ring([f"engine-{number}" for number in range(50)])
    order = ring.order(AGENTS[0])
    first = choose(order, [IDLE] * 50)
    left = list(order)
    assert (len(left), first in left) == (49, False)
    order = ring.order(AGENTS[1])
    assert choose(order, [IDLE] * 50, hot=7) == 7
    assert len(list(order)) == 50


def test_agents_of_two_namespaces_never_share_a_place_by_their_spelling() -> None:
    assert agent_point("a", "bc") != agent_point("ab", "c")


def test_calls_about_an_agent_go_where_it_is_hot_however_busy_that_engine_is() -> None:
    engines, point = Engines(["one", "two"], lambda: 0.0), AGENTS[0]
    hot = 1 - (engines.choose(point) or 0)
    engines.had_turn(point, hot)
    with ExitStack() as turns:
        for _ in range(9):
            turns.enter_context(engines.turn_at(hot))
        assert engines.choose(point) != hot
        assert engines.of_agent(point) == hot
        engines.failed(hot)
        assert engines.of_agent(point) != hot


def test_a_refusal_of_an_engines_own_does_not_count_it_as_gone() -> None:
    """Else one caller's refusals would send everybody's turns away from where their agents are hot."""
    assert not is_gone(_heard(Unavailable("the memory went away while the turn was planned")))
    assert not is_gone(_heard(Unavailable("loading", reason="MODEL_CHANGING")))
    assert is_gone(_heard(Unavailable("it ends", reason="SHUTTING_DOWN")))
    assert is_gone(Unavailable("failed to connect to all addresses"))


def _heard(error: Unavailable) -> Unavailable:
    heard = from_status(to_status(error))
    assert isinstance(heard, Unavailable)
    return heard
