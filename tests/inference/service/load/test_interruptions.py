"""A turn that is cut leaves the agent as of its last whole turn, frees what it held, and says what was kept."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.made_models.messages import by_user
from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

GREEDY = {"max_tokens": 16}
LONG = {"max_tokens": 1500, "stop_token_ids": []}
FREED_WITHIN_S = 4.0  # one step, on busy cores; the whole reply takes longer


def until_memory_is(client: InferenceClient, used_bytes: int) -> float:
    """Seconds until the engine holds no more KV than this."""
    began = time.monotonic()
    while client.get_stats().engine.kv_memory_used_bytes > used_bytes:
        assert time.monotonic() - began < 20, "the row was never freed"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.long(3)
def test_closing_the_stream_frees_the_row_and_the_agent_remembers_its_last_whole_turn(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    for name in (agent, twin):
        client.reply(agent_id=name, messages=by_user("I keep bees on the roof."), sampling=GREEDY)
    before = client.get_stats().engine.kv_memory_used_bytes
    events = client.generate(agent_id=agent, append_messages=by_user("Tell me a long story."), sampling=LONG)
    while next(events).WhichOneof("event") != "delta":
        pass
    events.close()
    assert until_memory_is(client, before) < FREED_WITHIN_S
    after_cut, expected = (
        client.reply(agent_id=name, append_messages=by_user("What do I keep?"), sampling=GREEDY)
        for name in (agent, twin)
    )
    assert after_cut.started.parent_version == 1
    assert after_cut.token_ids == expected.token_ids
    assert after_cut.started.source == pb.CACHE_SOURCE_HOT


@pytest.mark.long(4)
def test_a_retry_of_a_second_turn_stores_the_bytes_of_one_that_was_never_cancelled(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    """The blocks that the cancelled turn had computed are none of the memory before it: the retry sends them. The proof
    of falling asleep computes them once more, by what the manifest says of them.
    """
    agent, twin = new_agent(), new_agent()
    message = by_user("Every door has a key, and the seventh key is missing since the flood. " * 40)
    for name in (agent, twin):
        client.reply(agent_id=name, messages=by_user("I keep bees on the roof."), sampling=GREEDY)
    events = client.generate(agent_id=agent, append_messages=message, sampling=LONG)
    while next(events).WhichOneof("event") != "delta":
        pass
    events.close()
    again, straight = (client.reply(agent_id=name, append_messages=message, sampling=GREEDY) for name in (agent, twin))
    assert again.started.cached_tokens > straight.started.cached_tokens + 256
    assert again.token_ids == straight.token_ids
    with house.store_client() as store:
        one, other = (manifest.parse(store.get_snapshot(name)[1]) for name in (agent, twin))
    assert (one.blocks, one.tail, one.computed) == (other.blocks, other.tail, other.computed)
    assert one.shareable_tokens == other.shareable_tokens
    client.sleep(agent)


def test_a_deadline_frees_the_row_too_and_reports_what_was_kept(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    client.reply(agent_id=agent, messages=by_user("Hello."), sampling=GREEDY)
    before = client.get_stats().engine.kv_memory_used_bytes
    with pytest.raises(errors.DeadlineExceeded) as late:
        client.reply(agent_id=agent, append_messages=by_user("A long story."), sampling=LONG, timeout_s=0.4)
    assert late.value.metadata["remembered_version"] == "1"
    assert "version 1 is kept" in late.value.message
    assert until_memory_is(client, before) < FREED_WITHIN_S


def test_a_cut_turn_is_remembered_as_far_as_it_came_when_that_was_asked(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    client.reply(agent_id=agent, messages=by_user("Hello."), sampling=GREEDY)
    heard = Reply()
    story = {"append_messages": by_user("A long story."), "request_id": "story", "agent_id": agent}
    events = client.generate(**story, sampling=LONG, keep_partial=True)  # type: ignore[arg-type]
    while len(heard.token_ids) < 4:
        heard.add(next(events))
    events.close()
    with house.store_client() as store:
        eventually(lambda: store.get_agent(agent).lines[0].version >= 2, 60)
    following = client.reply(agent_id=agent, append_messages=by_user("Go on."), sampling=GREEDY)
    assert following.started.parent_version == 2
    assert following.started.match == pb.PREFIX_MATCH_EXTEND or not following.started.miss
    # More than the first turn and the question: part of the story is there.
    assert following.started.cached_tokens > heard.started.prompt_tokens


@pytest.mark.long(2)
def test_a_retry_of_a_turn_that_was_cut_does_it_again_instead_of_behind_it(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    for name in (agent, twin):
        client.reply(agent_id=name, messages=by_user("Hello."), sampling=GREEDY)
    sampling = {"max_tokens": 300}
    expected = client.reply(agent_id=twin, append_messages=by_user("A story."), sampling=sampling)
    story = {"append_messages": by_user("A story."), "request_id": "story", "agent_id": agent, "sampling": sampling}
    events = client.generate(**story, keep_partial=True)  # type: ignore[arg-type]
    while next(events).WhichOneof("event") != "delta":
        pass
    events.close()
    whole = client.reply(**story, keep_partial=True)  # type: ignore[arg-type]
    assert whole.text == expected.text


def test_one_agents_turns_run_in_the_order_of_their_arrival(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    client.reply(agent_id=agent, messages=by_user("Hello."), sampling=GREEDY)
    first = client.generate(agent_id=agent, append_messages=by_user("one"), sampling={"max_tokens": 100})
    next(first)  # it has begun
    others: list[Reply] = []
    waiting = threading.Thread(
        target=lambda: others.append(client.reply(agent_id=agent, append_messages=by_user("two"), sampling=GREEDY))
    )
    waiting.start()
    *_, last = first
    waiting.join(60)
    assert last.finished.snapshot.version == 2
    assert (others[0].started.parent_version, others[0].finished.snapshot.version) == (2, 3)


@pytest.mark.long(7)
def test_a_reader_that_takes_nothing_gets_the_whole_reply_in_few_messages(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    events = client.generate(agent_id=agent, prompt="one two three", sampling={"max_tokens": 400})
    time.sleep(3)
    reply = Reply()
    for event in events:
        reply.add(event)
    assert len(reply.token_ids) == reply.finished.usage.completion_tokens
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED


def test_full_blocks_are_stored_while_the_turn_still_runs(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    with house.store_client() as store:
        before = store.get_stats().blob_count
        events = client.generate(agent_id=agent, prompt=f"{agent}: " + "every door has a key. " * 100, sampling=LONG)
        while next(events).WhichOneof("event") != "delta":
            pass
        give_up = time.monotonic() + 20
        while store.get_stats().blob_count < before + 2:
            assert next(events).WhichOneof("event") == "delta", "the turn ended before any block was stored"
            assert time.monotonic() < give_up
        assert not [each for each in store.list_agents(name_prefix=agent).agents if each.agent_id == agent]
        events.close()


# --- killed at random moments ---

KILLS_PER_CONVERSATION = 8
QUESTIONS = [f"Question {number}: what comes after {number * 7}, and why is that so? " * 5 for number in range(12)]


def converse(house: House, agent: str, turns: int, around: Callable[[int, Callable[[], Reply]], Reply]) -> list[Reply]:
    """A conversation, each turn of which is asked `around` whatever may happen meanwhile."""

    def turn(number: int) -> Reply:
        given = {"messages": by_user(QUESTIONS[0])} if number == 0 else {"append_messages": by_user(QUESTIONS[number])}
        with house.client() as client:
            return client.reply(
                agent_id=agent,
                expected_version=number,
                request_id=f"{agent} {number}",
                sampling={"max_tokens": 40},
                **given,  # type: ignore[arg-type]
            )

    return [around(number, lambda number=number: turn(number)) for number in range(turns)]


def head_version(house: House, agent: str) -> int:
    with house.store_client() as store:
        try:
            return store.get_agent(agent).lines[0].version
        except errors.NotFound:
            return 0


class Killer:
    """Asks turns while killing services at random moments, starting them anew, and asking again what broke."""

    def __init__(self, house: House, agent: str, kills: int, seed: int) -> None:
        self._house = house
        self._agent = agent
        self._rng = random.Random(seed)
        self.kills_left = kills
        self.broken_turns = 0

    def ask(self, number: int, ask: Callable[[], Reply]) -> Reply:
        for _ in range(10):
            reply = self._ask_under_fire(number, ask)
            if reply is not None and self._is_durable(number, reply):
                return reply
        raise AssertionError("a turn did not come through in ten attempts")

    def _ask_under_fire(self, number: int, ask: Callable[[], Reply]) -> Reply | None:
        killer = None
        if self.kills_left:
            victim = self._rng.choice((self._house.engine, self._house.store))
            killer = threading.Timer(self._rng.uniform(0, 0.35), victim.kill)
            killer.start()
            self.kills_left -= 1
        try:
            return ask()
        except (errors.Unavailable, errors.Internal, errors.Cancelled) as broken:
            self.broken_turns += 1
            self._check_told(number, broken)
            return None
        finally:
            if killer is not None:
                killer.join()
                self._house.repair()
            # Everything acknowledged before is there, and at most this turn besides.
            assert head_version(self._house, self._agent) in (number, number + 1)

    def _check_told(self, number: int, broken: errors.KvasirError) -> None:
        """The error says what was kept, as far as the client could know, and how to ask again."""
        assert broken.metadata["remembered_version"] in ("", str(number))
        assert broken.metadata["request_id"] == f"{self._agent} {number}"

    def _is_durable(self, number: int, reply: Reply) -> bool:
        """A reply told as committed is; one told as pending becomes so while its engine lives."""
        give_up = time.monotonic() + 5
        while head_version(self._house, self._agent) < number + 1:
            assert reply.finished.snapshot.state != pb.SNAPSHOT_STATE_COMMITTED, "an acknowledged turn is lost"
            if time.monotonic() > give_up:
                return False
            time.sleep(0.05)
        return True


def remembered(house: House, agent: str) -> list[str]:
    """What was said, as the store has it."""
    with house.store_client() as store:
        _, data = store.get_snapshot(agent)
    return [message.content for message in manifest.parse(data).messages]


def told(replies: list[Reply]) -> list[str]:
    """What was said, as the client heard it."""
    return [text for question, reply in zip(QUESTIONS, replies, strict=False) for text in (question, reply.text)]


def same_until_a_miss(replies: list[Reply], expected: list[Reply]) -> bool:
    """Token for token the conversation that was never killed, up to a turn that had to prefill what a store killed
    while it was read could not give: with 4-bit KV, a reply prefilled again rounds differently than one decoded.
    """
    for reply, other in zip(replies, expected, strict=True):
        if (
            reply.started.source != pb.CACHE_SOURCE_REPLAY
            and reply.started.cached_tokens != other.started.cached_tokens
        ):
            return True
        if reply.text != other.text:
            print(f"{reply.started} {other.started}")
            return False
    return True


def check_survival(model: Path, directory: Path, kills: int, turns: int) -> None:
    with running_house(directory, model) as house:
        expected = converse(house, "never killed", turns, lambda _, ask: ask())
        broken = 0
        for start in range(0, kills, KILLS_PER_CONVERSATION):
            agent = f"killed {start}"
            killer = Killer(house, agent, min(kills - start, KILLS_PER_CONVERSATION), seed=start)
            replies = converse(house, agent, turns, killer.ask)
            assert remembered(house, agent) == told(replies)
            assert head_version(house, agent) == turns  # nothing lost, nothing done twice
            assert same_until_a_miss(replies, expected)
            broken += killer.broken_turns
    print(f"{kills} kills, {broken} turns broken, every reply as in a conversation that was never killed")


@pytest.mark.long(4)
def test_killed_at_random_moments_the_agent_answers_as_of_its_last_whole_turn(model: Path, tmp_path: Path) -> None:
    check_survival(model, tmp_path, 3, turns=6)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_200_kills_change_no_reply(model: Path, tmp_path: Path) -> None:
    check_survival(model, tmp_path, 200, turns=len(QUESTIONS))
