"""Links that break while a turn moves: it goes on at one of the two engines, or ends with an error that says so."""

import random
from collections.abc import Callable

import pytest
from kvasir.clients import AioInferenceClient
from kvasir.errors import KvasirError, Unavailable

from tests.inference.handover.cases import ON, STORY
from tests.inference.handover.handover_campaign import asked_again
from tests.inference.handover.test_moved_turns import run
from tests.inference.handover.two_engines import TwoEngines, hear
from tests.made_models.sampling import sampled

SPOKEN = {"prompt": STORY, "sampling": {**ON, "temperature": 0.8, "seed": 4}}


@pytest.mark.long(23)
@pytest.mark.parametrize("follows", [True, False])
def test_a_link_that_is_cut_at_any_byte_doubles_nothing_and_loses_nothing_untold(
    two: TwoEngines, new_agent: Callable[[], str], follows: bool
) -> None:
    """The reader follows by itself, or reads on through the engine that gave the turn away."""

    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        a.peers = {"cut": b} if follows else {}
        whole = await hear(a, **SPOKEN)
        two.link.cut_after(None)
        assert (await hear(a, {2: (a, "cut")}, **SPOKEN)).told == whole.told
        all_bytes, ends = two.link.passed_bytes, set()
        for number in range(sampled(4, of=20)):
            agent = new_agent()
            # Most cuts hit the files; the words that decide come last.
            at = all_bytes - 40 * number if number % 2 else random.Random(number).randrange(all_bytes)
            two.link.cut_after(at)
            ends.add(await one_owner(a, b, agent, whole.reply.text))
        assert "stayed" in ends

    run(two, work)


async def one_owner(a: AioInferenceClient, b: AioInferenceClient, agent: str, whole: str) -> str:
    """How a turn with a broken link ended: its text is whole, or an error told of it; and one version is there."""
    turn = {**SPOKEN, "agent_id": agent, "request_id": agent}
    try:
        heard = await hear(a, {2: (a, "cut")}, **turn)
        end = "moved" if heard.moves else "stayed"
        assert heard.reply.text == whole
    except KvasirError as error:
        end = error.reason
    assert end in {"moved", "stayed", "HANDOVER_UNCERTAIN", *(() if a.peers else ("TURN_MOVED",))}
    # Whoever asks again hears the same text, and the agent has one history.
    for engine in (b, a):
        assert await asked_again(engine, turn) == (whole, [1])
    return end


@pytest.mark.long(2)
def test_a_peer_that_is_not_there_leaves_the_turn_where_it_is(two: TwoEngines) -> None:
    async def work(a: AioInferenceClient, b: AioInferenceClient) -> None:
        stayed, heard = await hear(a, **SPOKEN), await hear(a, {2: (a, "gone")}, **SPOKEN)
        assert heard.told == stayed.told
        assert [type(error) for error in heard.not_moved] == [Unavailable]

    run(two, work)
