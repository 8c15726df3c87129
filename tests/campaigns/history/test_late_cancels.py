"""A cancel that comes late: its turn is stored or is not, and what comes behind it knows all of it or nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import AioInferenceClient, AioStoreClient, Reply
from kvasir.errors import NotFound, Unavailable
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.faults.faulty_link import Fault
from tests.campaigns.history.lives import Life, Lives
from tests.campaigns.history.world import World
from tools.kvasir_tiny.words import Dice

FIRST, OTHER, ASKED = "m4. My password is brolin.", "m5. My password is tarvek.", "m6. What is my password?"
_UNENDING = {"max_tokens": 400, "temperature": 0, "logit_bias": {2: -100.0}}  # no <|im_end|>
_GREEDY = {"max_tokens": 24, "temperature": 0}
_LOOK_S, _WITHIN_S = 0.05, 30.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("late cancels"))
    try:
        world.start()
        yield world
    finally:
        world.close()


class Talk:
    """One agent, two engines, and the store."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.spans = world, name, list[str]()
        self.engines = [AioInferenceClient.connect(each.address) for each in world.engines]
        self.store = AioStoreClient.connect(world.house.store.address)

    async def close(self) -> None:
        for each in (*self.engines, self.store):
            await each.close()

    async def say(self, words: str, engine: int = 0, *, is_whole: bool = False, name: str = "") -> Reply:
        """Again, while another engine has the agent, or the store is away."""
        message = [{"role": "user", "content": words}]
        given: dict[str, Any] = {"messages" if is_whole else "append_messages": message}
        give_up = time.monotonic() + _WITHIN_S
        while True:
            try:
                return await self.engines[engine].reply(agent_id=name or self.name, sampling=_GREEDY, **given)
            except Unavailable:
                assert time.monotonic() < give_up
                await asyncio.sleep(_LOOK_S)

    @contextlib.asynccontextmanager
    async def cancelled(
        self, behind: str, sampling: dict[str, Any], *, is_cut_off: bool = False
    ) -> AsyncIterator[None]:
        """The first turn. Cancelled when the block ends, which begins behind so much of the reply."""
        message, said = [{"role": "user", "content": FIRST}], list[str]()
        turn = self.engines[0].generate(agent_id=self.name, append_messages=message, sampling=sampling)
        async with contextlib.aclosing(turn) as events:
            async for event in events:
                if is_cut_off and event.HasField("started"):
                    self.world.links[0].arm(Fault("hang", is_answer=False))
                said.append(event.delta.text)
                if "".join(said).startswith(behind) and event.HasField("delta"):
                    break
            yield

    async def newest(self, name: str = "") -> manifest_pb2.Manifest:
        return manifests.parse((await self.store.get_snapshot(name or self.name))[1])

    async def is_stored(self) -> bool:
        with contextlib.suppress(NotFound):
            await self.newest()
            return True
        return False

    async def until_stored(self) -> None:
        give_up = time.monotonic() + _WITHIN_S
        while not await self.is_stored():
            assert time.monotonic() < give_up
            await asyncio.sleep(_LOOK_S)

    async def check_like_one_that_never_left(self, turns: list[str], replies: list[Reply]) -> None:
        """The agent's last replies, its tokens, its messages and its KV."""
        other = f"{self.name} that never left"
        like = [await self.say(words, name=other) for words in turns]
        for reply, expected in zip(reversed(replies), reversed(like), strict=False):
            assert reply.text == expected.text
            assert reply.started.prompt_tokens == expected.started.prompt_tokens
        stored, expected_stored = await self.newest(), await self.newest(other)
        assert [each.content for each in stored.messages if each.role == "user"] == turns
        for field in ("token_ids", "text", "messages", "blocks", "tail"):
            assert getattr(stored, field) == getattr(expected_stored, field), field


def talk(world: World, name: str, scene: Any) -> None:
    async def played() -> None:
        one = Talk(world, name)
        try:
            await asyncio.wait_for(scene(one), 120)
        finally:
            for link in world.links:
                link.disarm()
            await one.close()

    asyncio.run(played())


@pytest.mark.long(2)
@pytest.mark.parametrize("engine", [0, 1])
def test_a_turn_that_was_cancelled_before_its_end_leaves_nothing(world: World, engine: int) -> None:
    async def scene(one: Talk) -> None:
        async with one.cancelled("", _UNENDING):
            pass
        other = await one.say(OTHER, engine, is_whole=True)
        assert other.started.continuation == pb.CONTINUATION_NEW
        asked = await one.say(ASKED, engine)
        assert asked.started.parent_version == other.finished.snapshot.version == 1
        await one.check_like_one_that_never_left([OTHER, ASKED], [other, asked])

    talk(world, f"before its end, {engine}", scene)


@pytest.mark.long(4)
@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_turn_that_was_cancelled_behind_its_end_is_stored_and_another_talk_leaves_it_as_it_is(
    world: World, engine: int, is_committed: bool
) -> None:
    """The next turn of the agent goes on from it, and not from the branch beside it, whose KV came later."""

    async def scene(one: Talk) -> None:
        whole = (await one.say(FIRST, name=f"{one.name}: how its reply reads")).text
        async with one.cancelled(whole, _GREEDY, is_cut_off=not is_committed):
            await asyncio.sleep(0.5)
            assert await one.is_stored() is is_committed
        world.links[0].disarm()
        await one.until_stored()
        other = await one.say(OTHER, engine, is_whole=True)
        assert other.started.continuation == pb.CONTINUATION_BRANCHED
        assert (other.finished.snapshot.state, other.finished.snapshot.version) == (pb.SNAPSHOT_STATE_NONE, 1)
        asked = await one.say(ASKED, engine)
        assert (asked.started.parent_version, asked.finished.snapshot.version) == (1, 2)
        await one.check_like_one_that_never_left([FIRST, ASKED], [asked])

    talk(world, f"behind its end, {engine} {is_committed}", scene)


@pytest.mark.long(5)
def test_a_turn_that_was_cancelled_behind_its_end_is_lost_where_another_engine_took_the_lease_before_its_commit(
    world: World,
) -> None:
    """Its engine has its KV hot, and is to go on from what the other one stored."""

    async def scene(one: Talk) -> None:
        whole = (await one.say(FIRST, name=f"{one.name}: how its reply reads")).text
        async with one.cancelled(whole, _GREEDY, is_cut_off=True):
            await asyncio.sleep(0.5)
        other = await one.say(OTHER, 1, is_whole=True)
        asked = await one.say(ASKED, 1)
        assert (other.finished.snapshot.version, asked.finished.snapshot.version) == (1, 2)
        world.links[0].disarm()
        again = await one.say(ASKED)
        assert (again.started.parent_version, again.finished.snapshot.version) == (2, 3)
        await one.check_like_one_that_never_left([OTHER, ASKED, ASKED], [other, asked, again])

    talk(world, "lease lost", scene)


@pytest.mark.long(4)
def test_whenever_a_cancel_comes_about_the_end_all_of_the_turn_is_kept_or_nothing(world: World) -> None:
    async def scene(one: Talk) -> None:
        agent, whole = one.name, (await one.say(FIRST, name=f"{one.name}: how its reply reads")).text
        for at_ms in range(0, 20, 4):
            one.name = f"{agent}, {at_ms} ms"
            async with one.cancelled(whole, _GREEDY):
                await asyncio.sleep(at_ms / 1000)
            other = await one.say(OTHER, is_whole=True)
            asked = await one.say(ASKED)
            is_kept = other.started.continuation == pb.CONTINUATION_BRANCHED
            turns, replies = ([FIRST, ASKED], [asked]) if is_kept else ([OTHER, ASKED], [other, asked])
            await one.check_like_one_that_never_left(turns, replies)

    talk(world, "about its end", scene)


class _CancelsLate(AioInferenceClient):
    """Reads all of a turn first; again, where a busy machine's store answered the engine too late."""

    async def generate(self, *args: Any, **given: Any) -> Any:
        give_up, events = time.monotonic() + _WITHIN_S, list[Any]()
        while not events:
            try:
                events = [each async for each in super().generate(*args, **given)]
            except Unavailable:
                assert time.monotonic() < give_up
                await asyncio.sleep(_LOOK_S)
        for event in events:
            yield event


class _Loaded(Dice):
    """Draws messages of so many words, and says yes so often."""

    def __init__(self, words: list[int], answers: list[bool]) -> None:
        super().__init__(0)
        self._words, self._answers = iter(words), iter(answers)

    def below(self, n: int) -> int:
        return next(self._words) - 3

    def chance(self, p: float) -> bool:
        return next(self._answers)


@pytest.mark.long(6)
async def test_a_life_tells_the_turns_of_a_memory_by_their_words_where_two_memories_are_equally_long(
    world: World,
) -> None:
    """With its reply, the cancelled turn has 44 tokens, and the branch beside it 43."""
    async with _CancelsLate.connect(world.engines[0].address) as client:
        life = Life(Lives([client], [AioStoreClient.connect(world.house.store.address)], 31), "equally long")
        life.number, life.dice = 3, _Loaded([28, 32, 38], [False, True, False, False, False])
        try:
            for act in (life.cancelled_turn, life.turn, life.turn):
                await act()
        finally:
            await life.world.store.close()
    expected = "turn 4 cancelled", "turn 5 HOT after None NONE ", "turn 6 HOT after 4 "  # stored now, or a little later
    assert [told for told, begin in zip(life.trace, expected, strict=True) if not told.startswith(begin)] == []
    assert life.history.problems == []
