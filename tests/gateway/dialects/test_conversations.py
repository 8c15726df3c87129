"""Where a conversation that names no agent finds its memory: by its messages, and by nothing else."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.credentials import CredentialFileError
from kvasir.errors import FailedPrecondition, NotFound, Unavailable
from kvasir.formats import manifest
from kvasir_gateway import conversations as module
from kvasir_gateway.__main__ import _key
from kvasir_gateway.answering import Memory
from kvasir_gateway.conversations import Conversations
from kvasir_gateway.reading import comparing
from kvasir_gateway.reading.comparing import canonical
from kvasir_gateway.reading.made_calls import MadeCalls
from kvasir_gateway.reading.records import PREFIX, Kept, Made
from kvasir_gateway.turn import Said, ToolUse

KEY = bytes(32)
NUMBERS = count()
START = datetime(2026, 11, 1, tzinfo=UTC)


class Records:
    """Agents of one namespace, in memory."""

    def __init__(self) -> None:
        self.remembered: dict[str, tuple[Said, ...]] = {}
        self.used: dict[str, datetime] = {}
        self.forks: list[tuple[str, int | None]] = []
        self.pinned: set[str] = set()
        self.openings: dict[str, str] = {}
        self.summaries: dict[str, str] = {}
        self.expiring: set[str] = set()
        self.versions: dict[str, int] = {}
        self.moved: set[str] = set()
        self.is_down = False

    async def kept(self, name_prefix: str, opening: str = "") -> list[Kept]:
        if self.is_down:
            raise Unavailable("down")
        names = [name for name in self.remembered if name.startswith(name_prefix)]
        found = [
            Kept(
                *(name, self.used.get(name, START), False, self.openings.get(name, ""), self.summaries.get(name, "")),
                expires=name in self.expiring,
                version=self.versions.get(name, 1),
                is_elsewhere=name in self.moved,
            )
            for name in names
            if not opening or self.openings.get(name) == opening
        ]
        return sorted(found, key=lambda agent: agent.used_at, reverse=True)

    async def note(self, agent_id: str, *, summary: str, opening: str = "") -> None:
        if self.is_down and summary:
            raise Unavailable("down")
        if agent_id not in self.remembered:
            raise NotFound("gone")
        self.summaries[agent_id] = summary
        if opening:
            self.openings[agent_id] = opening

    async def let_expire(self, agent_id: str) -> None:
        self.expiring.add(agent_id)

    async def messages(self, agent_id: str) -> Sequence[Said]:
        return self.remembered.get(agent_id, ())

    async def fork(self, source: str, name: str, version: int | None) -> int:
        if source not in self.remembered:
            raise NotFound("gone")
        await asyncio.sleep(0)
        self.forks.append((source, version))
        self.remembered[name] = self.remembered[source]
        return 1

    async def beside(self, make: Callable[[], Made]) -> Made:
        return await asyncio.to_thread(make)

    async def delete(self, agent_id: str, only_version: int | None = None) -> None:
        if only_version is not None:
            await asyncio.sleep(0.01)
        if agent_id in self.pinned:
            raise FailedPrecondition("pinned")
        if only_version in (None, self.versions.get(agent_id, 1)):
            del self.remembered[agent_id]


def conversations(now: Callable[[], datetime] = lambda: START, max_kept: int = 1000) -> Conversations:
    return Conversations(KEY, new_name=lambda: str(next(NUMBERS)), now=now, max_kept=max_kept)


def user(text: str) -> Said:
    return Said("user", text)


def reply(text: str) -> Said:
    return Said("assistant", text)


class Talk:
    """A client that sends whole conversations, as chat APIs want it."""

    def __init__(self, known: Conversations, records: Records, namespace: str = "n") -> None:
        self.known, self.records, self.namespace = known, records, namespace
        self.versions: dict[str, int] = {}

    def turn(self, *messages: Said, answer: str = "", hint: str = "", said: Said | None = None) -> str:
        said = said or reply(answer or f"answer to {messages[-1].content}")
        return asyncio.run(self._turn(messages, said, hint))

    async def _turn(self, messages: tuple[Said, ...], said: Said, hint: str) -> str:
        chain = self.known.chain(messages, hint)
        agent = await self.known.agent_for(self.namespace, chain, messages, self.records)
        self.records.remembered[agent] = (*messages, said)
        version = self.versions[agent] = self.versions.get(agent, 0) + 1
        self.known.answered(self.namespace, agent, chain, said, version)
        self.known.left(self.namespace, agent)
        return agent


def test_a_next_turn_extends_the_same_agent_and_an_equal_opening_does_not() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi")
    assert talk.turn(user("Hello"), reply("Hi"), user("more")) == first
    # As a client repeats it: other ids, other spaces.
    again = talk.turn(user("Hello "), reply(" Hi"), user("more"), reply("answer to more"), user("and more"))
    assert again == first
    assert talk.turn(user("Hello")) != first
    assert talk.records.forks == []


def test_going_on_from_an_older_point_is_a_branch() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi")
    talk.turn(user("Hello"), reply("Hi"), user("one"))
    branch = talk.turn(user("Hello"), reply("Hi"), user("two"))
    assert branch != first
    assert talk.records.forks == [(first, 1)]
    # Both go on apart.
    assert talk.turn(user("Hello"), reply("Hi"), user("one"), reply("answer to one"), user("x")) == first
    assert talk.turn(user("Hello"), reply("Hi"), user("two"), reply("answer to two"), user("x")) == branch


def test_another_time_in_the_systems_text_or_the_opening_is_the_same_conversation() -> None:
    talk = Talk(conversations(), Records())
    opening = (Said("system", "It is 10:30."), user("Today is 2026-11-23."))
    first = talk.turn(*opening, answer="Hi")
    later = (Said("system", "It is 10:31."), user("Today is 2026-11-24."), reply("Hi"))
    assert talk.turn(*later, user("more")) == first
    restarted = Talk(conversations(), talk.records)
    midnight = (Said("system", "It is 0:01."), user("Today is 2026-11-25."), reply("Hi"))
    assert restarted.turn(*midnight, user("more"), reply("answer to more"), user("and more")) == first
    assert talk.records.forks == []
    # What stands behind the opening is never another time of itself.
    assert restarted.turn(*later, user("more at 10:30")) != first


def test_equal_words_go_before_words_of_another_time() -> None:
    talk = Talk(conversations(), Records())
    morning, noon = ((Said("system", f"It is {hour}:00."), user("Hello")) for hour in (9, 12))
    first, second = talk.turn(*morning, answer="Hi"), talk.turn(*noon, answer="Hi")
    assert first != second
    for known in (talk, Talk(conversations(), talk.records)):
        assert known.turn(*morning, reply("Hi"), user("more")) == first
        assert known.turn(*noon, reply("Hi"), user("more")) == second
        talk.records.remembered[first] = (*morning, reply("Hi"))
        talk.records.remembered[second] = (*noon, reply("Hi"))


def test_without_rules_another_time_is_another_conversation() -> None:
    known = conversations()
    chains = [
        known.chain((Said("system", f"It is 10:{minute}."), user("Hello")), "", is_exact=is_exact)
        for minute in (30, 31)
        for is_exact in (False, True)
    ]
    assert len({chain.opening for chain in chains}) == 3
    assert chains[0].opening == chains[2].opening


def test_answers_behind_a_call_are_found_at_another_time_too() -> None:
    """A call is known by its id: it stands before the newest answer, and is no reason to begin there again."""
    talk, said = Talk(conversations(), Records()), [user("Look at it.")]
    agents = []
    for number in range(4):
        clock = Said("system", f"Be brief. It is 10:{30 + number}.")
        answer = reply(f"That is done, {number}.")
        if number == 0:
            answer = Said("assistant", "", tool_calls=(ToolUse("AAAAAAAAA", "look", "{}"),))
        agents.append(talk.turn(clock, *said, said=answer))
        said += [answer, Said("tool", "It is there.", tool_call_id="AAAAAAAAA") if number == 0 else user("Go on.")]
    assert len(set(agents)) == 1
    assert talk.records.forks == []


def test_a_call_that_its_client_completed_is_the_same_reply_also_after_a_restart() -> None:
    """Claude Code adds a default to the arguments of a call."""
    talk = Talk(conversations(), Records())
    made, said = (
        Said("assistant", "", tool_calls=(ToolUse("c1", "edit", arguments),)) for arguments in ("{}", '{"all": false}')
    )
    first = talk.turn(user("Hello"), said=made)
    on = (user("Hello"), said, Said("tool", "done", tool_call_id="c1"))
    assert talk.turn(*on) == first
    again = Talk(conversations(), Records())
    first = again.turn(user("Hello"), said=made)
    again.known = conversations()
    assert again.turn(*on) == first
    assert talk.records.forks == again.records.forks == []


def test_an_answer_that_goes_leaves_a_later_one_the_call_that_both_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose ids are counted begin each conversation with the same one."""
    monkeypatch.setattr(module, "_MAX_TIPS", 2)
    talk = Talk(conversations(), Records())
    made, said = (
        Said("assistant", "", tool_calls=(ToolUse("c1", "edit", arguments),)) for arguments in ("{}", '{"all": false}')
    )
    talk.turn(user("Hello"), said=made)
    second = talk.turn(user("Good evening"), said=made)
    talk.turn(user("Good night"))  # pushes the first one out
    talk.records.is_down = True  # then RAM alone knows it
    assert talk.turn(user("Good evening"), said, Said("tool", "done", tool_call_id="c1")) == second


@pytest.mark.parametrize("is_own", [True, False])
def test_a_call_that_still_stands_in_the_text_of_the_newest_reply_is_known_by_its_id(is_own: bool) -> None:
    """As after a kill of all between a call and its result. Another reply's call is a branch."""
    talk = Talk(conversations(), Records())
    own = manifest.call_id("r-0", 0)
    made = Said("assistant", "", tool_calls=(ToolUse(own if is_own else "c1", "edit", "{}"),))
    first = talk.turn(user("Hello"), said=made)
    talk.records.remembered[first] = (user("Hello"), Said("assistant", "<tool_call>…", reply_id="r-0"))
    talk.known = conversations()
    on = (user("Hello"), made, Said("tool", "done", tool_call_id=made.tool_calls[0].id))
    assert (talk.turn(*on) == first) is is_own


def test_a_call_that_still_stands_in_the_text_of_an_older_reply_is_known_by_its_result() -> None:
    """As where a prompt has the memory's own spelling of it. After a restart, also behind a compaction."""
    records = Records()
    made = Said("assistant", "", tool_calls=(ToolUse("ABCDEFG23", "edit", "{}"),))
    result, other = (Said("tool", "done", tool_call_id=name) for name in ("ABCDEFG23", "ABCDEFG24"))
    known = Talk(conversations(), records)
    first, second = (known.turn(user(text), made, result, answer="Done.") for text in ("Hello", "Good evening"))
    text = reply('<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>')
    records.remembered[first] = (user("Hello"), text, result, reply("Done."))
    records.remembered[second] = (user("Good evening"), text, other, reply("Done."))
    makers = asyncio.run(MadeCalls(START).makers("n", ["ABCDEFG23"], records))
    assert [each.agent_id for each in makers] == [first]
    restarted = Talk(conversations(), records)
    for opening, agent in (("Hello", first), ("Good evening", second)):
        again = restarted.turn(user(opening), made, result, reply("Done."), user("more"))
        assert (again == agent) is (agent == first), "another result is another conversation"


def test_while_an_agent_is_busy_a_second_turn_from_the_same_point_is_a_branch() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi")
    asked = (user("Hello"), reply("Hi"), user("more"))
    held = asyncio.run(talk.known.agent_for("n", talk.known.chain(asked, ""), asked, talk.records))
    assert held == first
    assert talk.turn(*asked) != first


def test_a_first_turn_without_an_answer_begins_again_in_its_agent() -> None:
    talk, opening = Talk(conversations(), Records()), (user("Hello"),)

    def begun(namespace: str = "n", hint: str = "") -> str:
        return asyncio.run(talk.known.agent_for(namespace, talk.known.chain(opening, hint), opening, talk.records))

    left = begun()
    assert begun() != left, "it is busy"
    talk.known.left("n", left)
    assert left not in (begun("other"), begun(hint="another session"))
    assert begun() == left
    talk.known.left("n", left)
    assert talk.turn(*opening) == left
    assert begun() != left, "it has an answer now"


def test_an_agent_whose_interrupted_first_turn_went_on_by_its_name_is_left_alone() -> None:
    talk, opening = Talk(conversations(), Records()), (user("Hello"),)

    def begun() -> str:
        return asyncio.run(talk.known.agent_for("n", talk.known.chain(opening, ""), opening, talk.records))

    left = begun()
    talk.records.remembered[left] = opening
    talk.known.left("n", left)
    assert begun() == left
    talk.known.left("n", left)
    talk.records.remembered[left] = (*opening, reply("Hi, and"), user("as on the page"))
    assert begun() != left


def test_an_agent_whose_first_turn_was_interrupted_and_that_moved_away_is_left_alone() -> None:
    talk, opening = Talk(conversations(), Records()), (user("Hello"),)
    chain = talk.known.chain(opening, "")
    left = asyncio.run(talk.known.agent_for("n", chain, opening, talk.records))
    talk.records.remembered[left] = opening
    talk.known.left("n", left)
    talk.records.moved.add(left)
    assert talk.turn(*opening) != left


@pytest.mark.parametrize("first", [(), (user("Hello"), reply("Hi"))])
def test_a_turn_sent_behind_an_interrupt_waits_for_the_interrupted_ones_end(first: tuple[Said, ...]) -> None:
    talk = Talk(conversations(), Records())
    if first:
        talk.turn(*first[:1], answer="Hi")
    cut = (*first, user("Tell me"))
    on = (*cut, reply("Once"), user("Stop"))

    async def interrupt() -> None:
        agent = await talk.known.agent_for("n", talk.known.chain(cut, ""), cut, talk.records)
        going = asyncio.create_task(talk.known.agent_for("n", talk.known.chain(on, ""), on, talk.records))
        await asyncio.sleep(0.01)
        assert not going.done()
        talk.known.left("n", agent)
        assert await going == agent

    asyncio.run(asyncio.wait_for(interrupt(), 1))
    assert talk.records.forks == []


def test_a_turn_behind_one_of_several_answers_waits_for_none_of_the_others() -> None:
    talk, once = Talk(conversations(), Records()), (user("Hello"),)

    async def sampled() -> None:
        first, _other = [
            await talk.known.agent_for("n", talk.known.chain(once, ""), once, talk.records) for _ in range(2)
        ]
        talk.known.answered("n", first, talk.known.chain(once, ""), reply("Hi"), 1)
        talk.known.left("n", first)
        on = (*once, reply("Hi"), user("More"))
        assert await talk.known.agent_for("n", talk.known.chain(on, ""), on, talk.records) == first

    asyncio.run(asyncio.wait_for(sampled(), 1))


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_fork_stays_only_if_its_turn_was_answered(*, is_answered: bool) -> None:
    talk = Talk(conversations(), Records())
    talk.turn(user("Hello"), answer="Hi")
    talk.turn(user("Hello"), reply("Hi"), user("more"))
    other = (user("Hello"), reply("Hi"), user("other"))

    async def take() -> str:
        chain = talk.known.chain(other, "")
        fork = await talk.known.agent_for("n", chain, other, talk.records)
        assert fork in talk.records.remembered
        if is_answered:
            talk.known.answered("n", fork, chain, reply("so"), 2)
        talk.known.left("n", fork)
        if not is_answered:
            assert ("n", fork) in talk.known._busy, "nobody takes it while it is deleted"
        await asyncio.sleep(0.05)
        return fork

    fork = asyncio.run(take())
    assert (fork in talk.records.remembered) == is_answered
    assert not talk.known._busy


def test_a_fork_is_deleted_whose_reader_leaves_while_it_is_made() -> None:
    talk = Talk(conversations(), Records())
    talk.turn(user("Hello"), answer="Hi")
    talk.turn(user("Hello"), reply("Hi"), user("more"))
    other, before = (user("Hello"), reply("Hi"), user("other")), dict(talk.records.remembered)

    async def leave() -> None:
        looking = asyncio.create_task(talk.known.agent_for("n", talk.known.chain(other, ""), other, talk.records))
        await asyncio.sleep(0)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking

    asyncio.run(leave())
    assert len(talk.records.forks) == 1
    assert talk.records.remembered == before
    assert not talk.known._busy


def test_memories_are_compared_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, threads = Talk(conversations(), Records()), set[threading.Thread]()
    opening = (Said("system", "It is 10:30."), user("Hello"))
    first = talk.turn(*opening, answer="Hi")
    for name in ("common_messages", "at_any_time"):
        plain = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, plain=plain: (threads.add(threading.current_thread()), plain(*given))[1]
        )
    again = (Said("system", "It is 10:31."), user("Hello"), reply("Hi"), user("more"))
    restarted = conversations()
    chain = restarted.chain(again, "")
    threads.clear()
    assert asyncio.run(restarted.agent_for("n", chain, again, talk.records)) == first
    assert threads
    assert threading.main_thread() not in threads


def test_lines_are_looked_for_in_their_namespaces_turn() -> None:
    """A thread for each caller would leave the event loop a small part of the interpreter."""

    class Noted(Records):
        asked = 0

        async def beside(self, make: Callable[[], Made]) -> Made:
            self.asked += 1
            return make()

    talk, threads = Talk(conversations(), Noted()), threading.active_count()
    first = talk.turn(user("Hello"))
    line = "A line of a summary that is long enough to be its own."
    asyncio.run(talk.known.summarized(("n", first), talk.known.chain((), ""), (), line, talk.records))
    again = (user(line), user("more"))
    assert asyncio.run(talk.known.compacted("n", talk.known.chain(again, ""), again, talk.records)) == first
    assert (talk.records.asked, threading.active_count()) == (1, threads)


def test_a_turn_that_has_left_twice_leaves_the_next_one_busy() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi")
    asked = (user("Hello"), reply("Hi"), user("more"))
    memory = Memory(first, talk.known, "n", talk.known.chain(asked, ""))
    memory.left()
    assert asyncio.run(talk.known.agent_for("n", talk.known.chain(asked, ""), asked, talk.records)) == first
    memory.left()
    assert talk.turn(*asked) != first


def test_equal_conversations_take_no_more_room_than_one() -> None:
    talk = Talk(conversations(), Records())
    for _ in range(5):
        talk.turn(user("Hello"), answer="Hi")
    assert len(talk.known._known["n"]) == 1
    assert talk.turn(user("Hello"), reply("Hi"), user("more")) == list(talk.records.remembered)[-1]


def test_after_a_restart_the_stored_messages_report_which_agent_it_was() -> None:
    records = Records()
    first = Talk(conversations(), records).turn(user("Hello"), answer="Hi")
    restarted = Talk(conversations(), records)
    assert restarted.turn(user("Hello"), reply("Hi"), user("more")) == first
    # From the middle of what is stored: a branch of its newest version, which the engine cuts.
    branch = Talk(conversations(), records).turn(user("Hello"), reply("Hi"), user("other"))
    assert branch != first
    assert records.forks == [(first, None)]


def test_a_namespace_of_many_conversations_pushes_none_of_another_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TIPS", 8)
    known = conversations()
    mine, others = Talk(known, Records(), "mine"), Talk(known, Records(), "others")
    first = mine.turn(user("It is 10:00."), answer="Hi")
    for number in range(20):
        others.turn(user(f"It is 10:00, say {number}."))
    mine.records.is_down = True  # then RAM alone knows it
    assert mine.turn(user("It is 11:00."), reply("Hi"), user("more")) == first
    assert [len(known._known[name]) for name in ("mine", "others")] == [2, 6]
    assert [len(known._known[name]._alike) for name in ("mine", "others")] == [2, 6], "each has a time"


def test_namespaces_hints_and_keys_keep_conversations_apart() -> None:
    known, records = conversations(), Records()
    asked = (user("Hello"), reply("Hi"), user("more"))
    first = Talk(known, records).turn(user("Hello"), answer="Hi")
    assert Talk(known, Records(), "other").turn(*asked) != first
    assert Talk(known, records).turn(*asked, hint="another user") != first
    other_key = Conversations(b"k" * 32, new_name=lambda: "x", now=lambda: START)
    name = asyncio.run(other_key.agent_for("n", other_key.chain([user("Hello")], ""), [user("Hello")], records))
    assert name.split("/")[1] != first.split("/")[1]


def test_a_store_that_is_down_costs_a_memory_and_not_the_turn() -> None:
    records = Records()
    Talk(conversations(), records).turn(user("Hello"), answer="Hi")
    records.is_down = True
    assert Talk(conversations(), records).turn(user("Hello"), reply("Hi"), user("more")).startswith(PREFIX)


def _many(count: int) -> Records:
    records = Records()
    for number in range(count):
        records.remembered[f"{PREFIX}a/{number}"] = ()
        records.used[f"{PREFIX}a/{number}"] = START + timedelta(hours=number)
    records.remembered["ada"] = ()
    return records


def test_what_is_too_much_is_deleted_and_nothing_that_is_used() -> None:
    records, now = _many(6), [START]
    known = conversations(lambda: now[0], max_kept=3)
    records.pinned.add(f"{PREFIX}a/1")
    now[0] += timedelta(hours=6)
    assert asyncio.run(known.tidy("n", records)) == 2
    records.pinned.clear()
    assert asyncio.run(known.tidy("n", records)) == 0  # now and then, not each time
    now[0] -= timedelta(days=400)  # a clock that was set back makes nobody wait for it
    assert asyncio.run(known.tidy("n", records)) == 1
    assert sorted(records.remembered) == ["ada", f"{PREFIX}a/3", f"{PREFIX}a/4", f"{PREFIX}a/5"]


def test_a_clock_that_is_set_forward_deletes_no_conversation() -> None:
    """The store counts for how long each was not used, by a clock that nobody sets."""
    records, now = _many(3), [START]
    known = conversations(lambda: now[0])
    now[0] += timedelta(days=400)
    assert asyncio.run(known.tidy("n", records)) == 0
    assert len(records.remembered) == 4
    assert records.expiring == {f"{PREFIX}a/{number}" for number in range(3)}


def test_a_conversation_that_had_a_turn_since_the_list_was_read_stays() -> None:
    class Slow(Records):
        async def kept(self, name_prefix: str, opening: str = "") -> list[Kept]:
            found = await super().kept(name_prefix, opening)
            self.versions[f"{PREFIX}a/0"] = 2
            return found

    records = Slow()
    records.remembered |= _many(2).remembered
    records.used |= _many(2).used
    asyncio.run(conversations(max_kept=0).tidy("n", records))
    assert sorted(records.remembered) == ["ada", f"{PREFIX}a/0"]


def test_the_form_of_a_calls_arguments_and_its_id_do_not_matter() -> None:
    talk = Talk(conversations(), Records())
    asked = user("weather?")

    async def first() -> str:
        agent = await talk.known.agent_for("n", talk.known.chain([asked], ""), [asked], talk.records)
        said = Said("assistant", "", tool_calls=(ToolUse("c1", "weather", '{"a": 1, "b": 2}'),))
        talk.known.answered("n", agent, talk.known.chain([asked], ""), said, 1)
        talk.known.left("n", agent)
        return agent

    agent = asyncio.run(first())
    repeated = Said("assistant", "", tool_calls=(ToolUse("other", "weather", '{"b":2,"a":1}'),))
    assert talk.turn(asked, repeated, Said("tool", "sunny", tool_call_id="other")) == agent


def test_arguments_that_no_engine_takes_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Said("assistant", "", tool_calls=(ToolUse("", "f", text),)) for text in ('{"a": 1}', '{"a":1}'))
    assert canonical(one) == canonical(other)
    monkeypatch.setattr(comparing, "_MOST_ARGUMENTS", 6)
    assert canonical(one) != canonical(other)


@given(st.text(st.characters(codec=None)), st.integers(1, 5))
def test_a_long_text_is_digested_as_if_it_were_encoded_at_once(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "_PIECE", piece)
        assert canonical(Said("user", text, 'a"')) == json.dumps(["user", 'a"', text.strip(), []]).encode() + b"\n"


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 99), st.booleans()), min_size=1, max_size=12))
def test_no_turn_extends_an_agent_that_remembers_something_else(steps: list[tuple[str, int, bool]]) -> None:
    """Whatever order conversations grow and restart in: what the agent remembered is how the request begins, or the
    agent is a new one or a fork."""
    known, records = conversations(), Records()
    lines: list[tuple[Said, ...]] = [()]
    for text, place, is_restarted in steps:
        known = conversations() if is_restarted else known
        line = lines[place % len(lines)]
        asked = (*line, user(text))
        before = dict(records.remembered)
        agent = asyncio.run(known.agent_for("n", known.chain(asked, ""), asked, records))
        assert agent not in before or asked[: len(before[agent])] == before[agent]
        records.remembered[agent] = (*asked, reply("r" + text))
        known.answered("n", agent, known.chain(asked, ""), reply("r" + text), 0)
        known.left("n", agent)
        lines.append(records.remembered[agent])


def test_a_key_that_others_can_read_is_kept_and_what_repairs_it_is_reported(tmp_path: Path) -> None:
    """Another key would find no conversation again."""
    key = _key(tmp_path)
    file = tmp_path / "conversations.key"
    file.chmod(0o644)
    with pytest.raises(CredentialFileError, match="chmod 600"):
        _key(tmp_path)
    file.chmod(0o600)
    assert _key(tmp_path) == key
