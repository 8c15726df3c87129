"""Requests for a title or a summary leave no memory; a summary in a history's place goes on in the same agent."""

import asyncio
import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx2 as httpx
import pytest
from blake3 import blake3
from kvasir.clients import Reply
from kvasir.formats.manifest import call_id
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.options.gateway import SIDE_CALLS
from kvasir_gateway import answering
from kvasir_gateway.reading.compaction import Summaries
from kvasir_gateway.reading.side_calls import SIDE_RULES, side_call_of, side_rules_of
from kvasir_gateway.turn import Said, ToolUse, Turn

from cachestore_svc.facts.limits import check_labels
from tests.gateway.conftest import Front
from tests.gateway.dialects.test_conversations import START, Records, Talk, conversations, reply, user
from tests.gateway.serving import MODEL, running_gateway

# As clients ask; the words are ours.
TITLES = [
    (Said("system", "You generate titles. The title names the thread and nothing else."), user("Fix the build.")),
    (user("Generate a title for this conversation:\n"), user('"Fix the build."')),
    (user("### Task:\nGenerate a concise title summarizing the chat history.\n<chat_history>…</chat_history>"),),
    (user("<chat_history>hello</chat_history>\n" + "x" * 2000 + "\nGive three tags for the conversation above."),),
    (Said("system", "Say whether this message begins a new conversation topic."), user("And now the tests.")),
]
SUMMARIES = [
    (Said("system", "You are a context summarization assistant."), user("<conversation>\n" + "x" * 90_000)),
    (
        user("Fix it."),
        reply("Done."),
        user("Answer with text only. Write a detailed summary of the conversation so far."),
    ),
    (user("Fix it."), reply("Done."), user("This is a CONTEXT CHECKPOINT COMPACTION. Write a handoff summary.")),
]
TURNS = [
    (Said("system", "You are a helpful assistant that stays on topic."), user("What is the title of this film?")),
    (Said("system", "A conversation may be summarized."), user("Hi"), reply("Hi"), user("Fix the build.")),
    (user("Summarize this conversation:\n" + "x" * 20_000),),  # somebody may ask on
    (user("Generate a title for this conversation"), reply("Builds"), Said("tool", "a summary of the conversation")),
]
TOOL = pb.Tool(name="look")
BESIDE = Records().beside


def found(messages: tuple[Said, ...], **fields: Any) -> str:
    return side_call_of(Turn(model="", messages=messages, **fields), list(SIDE_RULES.values()))


def test_titles_and_summaries_are_side_calls_and_turns_are_not() -> None:
    assert [found(messages) for messages in TITLES] == ["title"] * len(TITLES)
    assert [found(messages) for messages in SUMMARIES] == ["summary"] * len(SUMMARIES)
    assert [found(messages) for messages in TURNS] == [""] * len(TURNS)
    assert found((user("quota"),), sampling={"max_tokens": 1}) == "probe"
    assert found((user("quota"),), sampling={"max_tokens": 2}) == ""
    # An agent that begins is offered tools; whoever names a response later wants it kept.
    assert found(TITLES[0], tools=(TOOL,)) == ""
    assert found(SUMMARIES[1], tools=(TOOL,)) == "summary"
    assert found(TITLES[0], is_stored=True) == ""


def test_of_many_messages_the_first_and_the_last_are_read() -> None:
    few, title = [user("Hi")] * 40, user("Generate a title for this conversation.")
    assert [found((*few[:at], title, *few[at:])) for at in (3, 20, 40)] == ["title", "", "title"]


def test_rules_are_switched_by_name() -> None:
    assert side_rules_of("none") == []
    assert list(SIDE_RULES) == list(SIDE_CALLS)
    assert side_call_of(Turn(model="", messages=TITLES[0]), side_rules_of("summary")) == ""
    with pytest.raises(ValueError, match="'titles' is none of title, summary, probe, none"):
        side_rules_of("titles")


SUMMARY = "1. What was asked for:\n- the build of the library is to be mended, without new warnings"
COMPACTED = (user(f"This goes on from an earlier conversation.\n{SUMMARY}\nGo on."),)


def compacted(talk: Talk, messages: tuple[Said, ...], hint: str = "session", namespace: str = "n") -> str:
    chain = talk.known.chain(messages, hint)
    return asyncio.run(talk.known.compacted(namespace, chain, messages, talk.records))


def summarized(talk: Talk, agent_id: str, text: str, hint: str = "session", messages: tuple[Said, ...] = ()) -> None:
    place, chain = ("n", agent_id), talk.known.chain((), hint)
    asyncio.run(talk.known.summarized(place, chain, messages, text, talk.records))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_summary_that_takes_the_historys_place_goes_on_in_the_same_agent_also_after_a_restart(
    is_restarted: bool,
) -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi", hint="session")
    summarized(talk, first, SUMMARY)
    if is_restarted:
        talk.known = conversations()
    assert compacted(talk, COMPACTED) == first
    assert compacted(talk, COMPACTED) == "", "it is busy"
    talk.known.left("n", first)
    talk.records.remembered[first] = (*COMPACTED, reply("I go on."))
    talk.known = conversations()
    assert talk.turn(*COMPACTED, reply("I go on."), user("more"), hint="session") == first


def test_a_summary_is_used_once_also_after_a_restart() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi", hint="session")
    summarized(talk, first, SUMMARY)
    assert compacted(talk, COMPACTED) == first
    talk.known = conversations()
    assert compacted(talk, COMPACTED) == ""


def test_a_summarys_label_has_no_text_and_a_strange_one_is_ignored() -> None:
    """Its digests are keyed: who reads labels cannot guess a line."""
    talk = Talk(conversations(), Records())
    first, other = (talk.turn(user(text), answer="Hi", hint="session") for text in ("Hello", "Good day"))
    summarized(talk, first, SUMMARY)
    line = SUMMARY.splitlines()[1]
    assert blake3(line.encode()).digest(8) not in base64.b64decode(talk.records.summaries[first])
    talk.records.summaries[other] = "no digests!"
    talk.known = conversations()
    assert compacted(talk, COMPACTED) == first


def test_of_many_summaries_in_the_store_the_last_are_known() -> None:
    known, lines = Summaries(bytes(32)), [f"{number}: {'x' * 40}" for number in range(102)]
    labels = {line: Summaries(bytes(32)).add("n", line, bytes(32), (), line) for line in lines}
    known.read("n", labels)
    found = [asyncio.run(known.agent_of("n", bytes(32), (user(line),), BESIDE)) for line in (*lines[:3], lines[-1])]
    assert found == ["", "", lines[2], lines[-1]]


def test_labels_of_a_namespace_push_out_no_summary_of_another_nor_a_newer_one() -> None:
    known, line = Summaries(bytes(32)), "x" * 40
    label = known.add("other", "theirs", bytes(32), (), line)
    known.add("n", "newest", bytes(32), (), line)
    known.read("n", {str(number): label for number in range(1002)})
    found = [asyncio.run(known.agent_of(namespace, bytes(32), (user(line),), BESIDE)) for namespace in ("other", "n")]
    assert found == ["theirs", "newest"]


def test_a_long_summarys_label_fits_the_store_and_knows_lines_of_all_its_parts() -> None:
    known, lines = Summaries(bytes(32)), [f"{number}: {'x' * 40}" for number in range(200)]
    for count in (1, 23, 24, 40, 200):
        label = known.add("n", "a", bytes(32), (), "\n".join(lines[:count]))
        check_labels({"conversation.summary": label})
        assert label == Summaries(bytes(32)).add("n", "a", bytes(32), (), "\n".join(lines[:count])), "text order"
        restarted = Summaries(bytes(32))
        restarted.read("n", {"a": label})
        for part in (lines[:count][:10], lines[:count][-10:]):
            assert asyncio.run(restarted.agent_of("n", bytes(32), [user(line) for line in part], BESIDE)) == "a"


def test_a_summary_that_the_store_refuses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi", hint="session")
    talk.records.is_down = True
    summarized(talk, first, SUMMARY)
    assert "conversations.summary_not_kept error=" in caplog.text
    assert SUMMARY.splitlines()[1] not in caplog.text


def test_a_store_that_hangs_holds_up_the_end_of_a_summary_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Records):
        async def note(self, agent_id: str, *, summary: str, opening: str = "") -> None:
            if summary:
                await asyncio.Event().wait()
            await super().note(agent_id, summary=summary, opening=opening)

    monkeypatch.setattr(answering, "SOON_S", 0.02)
    talk = Talk(conversations(), Hanging())
    first = talk.turn(user("Hello"), answer="Hi")
    turn = Turn(model="", messages=(user("Hello"), reply("Hi"), *SUMMARIES[0][1:]))
    ready = replace(answering.Turns(talk.known).ready(turn), side_call="summary")
    own: dict[str, Any] = {"records": talk.records, "summarized": first, "messages": turn.messages}
    memory = answering.SideMemory(first, talk.known, "n", ready.chain, side_call=ready.side_call, **own)
    told = Reply()
    told.add(pb.GenerateResponse(delta=pb.Delta(text=SUMMARY)))

    async def answered() -> None:
        await asyncio.wait_for(memory.answered(told), 5)

    asyncio.run(answered())
    assert compacted(talk, COMPACTED, "") == first, "it is known in RAM"


def test_while_the_store_is_down_a_summary_is_known_in_ram_and_read_later() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi", hint="session")
    summarized(talk, first, SUMMARY)
    talk.known = conversations()
    talk.records.is_down = True
    assert compacted(talk, COMPACTED) == ""
    talk.records.is_down = False
    assert compacted(talk, COMPACTED) == first
    talk.known.left("n", first)
    talk.records.is_down = True
    summarized(talk, first, SUMMARY)
    assert compacted(talk, COMPACTED) == first


MADE_ID = call_id("a reply", 0)
MADE = Said("assistant", "", tool_calls=(ToolUse(MADE_ID, "look", "{}"),))
DONE = Said("tool", "done", tool_call_id=MADE_ID)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_calls_of_an_agent_behind_another_beginning_are_its_compacted_conversation(is_restarted: bool) -> None:
    """pi lets another request sum up, and keeps the newest messages."""
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), said=MADE)
    if is_restarted:
        talk.known = conversations()
    assert compacted(talk, (user("Hello"), MADE, DONE), "") == "", "it goes on"
    assert compacted(talk, (user("A summary of it."), MADE, DONE), "") == first


@pytest.mark.parametrize(("made", "hint"), [("call_0", "anna"), ("call_0", "bob"), (MADE_ID, "bob")])
def test_an_equal_calls_id_that_the_client_made_or_of_another_session_makes_no_conversation_another_agents(
    made: str, hint: str
) -> None:
    """Examples, a prefetched call, and the history of another provider are in many conversations."""
    talk = Talk(conversations(), Records())
    calls = (Said("assistant", "", tool_calls=(ToolUse(made, "look", "{}"),)), Said("tool", "x", tool_call_id=made))
    anna = talk.turn(user("Task of Anna."), *calls, answer="Done.", hint="anna")
    for known in (talk.known, conversations()):
        talk.known = known
        assert compacted(talk, (user("Task of Bob."), *calls), hint) == ""
    talk.known = conversations()
    assert (compacted(talk, (user("Task of Anna, in short."), *calls), "anna") == anna) == (made == MADE_ID)


def test_memories_are_read_for_calls_once_and_for_no_calls_of_other_engines() -> None:
    class Counted(Records):
        read = 0

        async def messages(self, agent_id: str) -> Sequence[Said]:
            self.read += 1
            return await super().messages(agent_id)

    records = Counted()
    talk = Talk(conversations(), records)
    talk.turn(Said("system", "It is 10:30."), user("Hello"), said=MADE)
    talk.known = conversations()
    for number in range(3):
        compacted(talk, (user(f"Task {number}."), Said("assistant", "", tool_calls=(ToolUse("c", "look", "{}"),))), "")
    assert records.read == 0
    other = Said("assistant", "", tool_calls=(ToolUse(call_id("other", 0), "look", "{}"),))
    for number in range(3):
        compacted(talk, (user(f"Task {number}."), other), "")
    assert records.read == 1


def test_chats_after_a_restart_push_out_no_calls_from_before_it() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Task of Anna."), said=MADE)
    talk.known = conversations(now=lambda: START + timedelta(hours=1))
    for number in range(20):
        later = talk.turn(user(f"Chat {number}."))
        talk.records.used[later] = START + timedelta(hours=2)
    assert compacted(talk, (user("Task of Anna, in short."), MADE, DONE), "") == first


def test_memories_that_a_store_could_not_give_are_read_later() -> None:
    class Late(Records):
        is_late = False

        async def messages(self, agent_id: str) -> Sequence[Said]:
            return () if self.is_late else await super().messages(agent_id)

    records = Late()
    talk = Talk(conversations(), records)
    anna = talk.turn(user("Task of Anna."), said=MADE, hint="anna")
    talk.known, records.is_late = conversations(), True
    compacted(talk, (user("Task of Anna, in short."), MADE), "anna")
    records.is_late = False
    assert compacted(talk, (user("Task of Anna, in short."), MADE), "anna") == anna


def test_a_side_call_that_has_an_agents_calls_behind_another_beginning_takes_nothing_of_its_memory() -> None:
    talk = Talk(conversations(), Records())
    made = Said("assistant", "", tool_calls=(ToolUse("c1", "look", "{}"),))
    first = talk.turn(user("Hello"), said=made)
    asked = (user("Sum up what was said."), made, Said("tool", "done", tool_call_id="c1"))
    chain = talk.known.chain(asked, "")
    taken = talk.known.compacted("n", chain, asked, talk.records, is_side_call=True)
    assert asyncio.run(taken) == ""
    assert asyncio.run(talk.known.agent_behind("n", chain, asked, talk.records)) == first, "it is read"


def test_a_projects_rule_that_a_summary_quotes_does_not_make_another_conversation_the_agents() -> None:
    rule = "- never push to the main branch without a review of somebody else"
    talk = Talk(conversations(), Records())
    first = talk.turn(user(rule), answer="Hi", hint="session")
    summary = f"{SUMMARY}\n{rule}"
    summarized(talk, first, summary, messages=(user(rule),))
    assert compacted(talk, (user(f"{rule}\nSomething else."),)) == ""
    assert compacted(talk, COMPACTED) == first
    talk.known.left("n", first)
    assert compacted(talk, COMPACTED) == "", "it was used"


@pytest.mark.parametrize(
    ("namespace", "hint", "text"),
    [("other", "session", SUMMARY), ("n", "another", SUMMARY), ("n", "session", "1. What was asked for:")],
)
def test_a_summary_of_another_caller_or_session_or_only_its_headings_is_none(
    namespace: str, hint: str, text: str
) -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi", hint="session")
    summarized(talk, first, SUMMARY)
    talk.records = talk.records if namespace == "n" else Records()
    assert compacted(talk, (user(text),), hint, namespace) == ""


def test_a_summary_of_an_agent_that_is_gone_begins_another() -> None:
    talk = Talk(conversations(), Records())
    first = talk.turn(user("Hello"), answer="Hi")
    summarized(talk, first, SUMMARY, hint="")
    del talk.records.remembered[first]
    assert compacted(talk, COMPACTED, "") == ""
    gone = (*COMPACTED, reply("x"), user("y"))
    assert asyncio.run(talk.known.agent_behind("n", talk.known.chain(gone, ""), gone, talk.records)) == ""


# A reply of one line that is long enough to be known again.
LONG_LINE = {
    "type": "json_schema",
    "json_schema": {
        "name": "summary",
        "schema": {
            "type": "object",
            "properties": {"summary": {"type": "string", "pattern": "^[a-z ]{60}$"}},
            "required": ["summary"],
        },
    },
}


class Chat:
    """Chat completions without an agent's name."""

    def __init__(self, front: Front, caller: str) -> None:
        self._front, self._caller = front, caller

    def ask(self, *messages: Said, max_tokens: int = 16, **fields: Any) -> httpx.Response:
        sent = [{"role": message.role, "content": message.content} for message in messages]
        answer = httpx.post(
            f"{self._front.gateway.url}/v1/chat/completions",
            json={"model": MODEL, "messages": sent, "max_tokens": max_tokens, **fields},
            headers=self._front.bearer(self._caller),
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer

    def agents(self) -> set[str]:
        url = f"{self._front.gateway.url}/v1/agents?name_prefix=conversation/&page_size=1000"
        listed = httpx.get(url, headers=self._front.bearer(self._caller)).json()
        return {agent["agent_id"] for agent in listed.get("agents", ())}

    def versions(self, agent: str) -> int:
        url = f"{self._front.gateway.url}/v1/agents/{agent.replace('/', '%2F')}/versions"
        return len(httpx.get(url, headers=self._front.bearer(self._caller)).json()["snapshots"])


def text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def cached(answer: httpx.Response) -> float:
    usage = answer.json()["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


@pytest.fixture
def mortal(front: Front) -> Iterator[Front]:
    """The same services behind a gateway that may be killed."""
    credentials = ("--credentials", str(front.house.root / "credentials.toml"))
    with running_gateway(front.house, *credentials, name="mortal") as gateway:
        yield replace(front, gateway=gateway)


@pytest.mark.long(3)
def test_side_calls_leave_no_memory_and_a_compacted_conversation_goes_on_in_its_agent_also_after_a_kill(
    mortal: Front,
) -> None:
    chat = Chat(mortal, "bob")
    before = chat.agents()
    title = chat.ask(*TITLES[1])
    assert (title.headers["x-kvasir-side-call"], title.headers["x-agent-memory"]) == ("title", "none")
    opening = (Said("system", "You live in a small town. " * 40), user("My name is Anna."))
    first = chat.ask(*opening)
    agent = first.headers["x-agent-id"]
    history = (*opening, reply(text(first)))
    asking = user("Write a detailed summary of the conversation so far.")
    asked = chat.ask(*history, asking, max_tokens=128, response_format=LONG_LINE)
    assert (asked.headers["x-kvasir-side-call"], asked.headers["x-agent-memory"]) == ("summary", "read-only")
    assert (asked.headers["x-agent-id"], cached(asked) > 0.9) == (agent, True)
    again = chat.ask(*history, user("What is my name?"))
    assert (again.headers["x-agent-id"], again.headers["x-agent-memory"]) == (agent, "extended")
    assert "Anna" in text(again)
    assert "x-kvasir-side-call" not in again.headers
    mortal.gateway.kill()
    mortal.gateway.start()
    compacted = (opening[0], user(f"This goes on from an earlier conversation.\n{text(asked)}\nGo on."))
    begun = chat.ask(*compacted)
    assert (begun.headers["x-agent-id"], begun.headers["x-agent-memory"]) == (agent, "replaced")
    assert cached(begun) > 0.5, "the instructions"
    assert chat.versions(agent) == 3
    assert chat.agents() - before == {agent}


@pytest.mark.long(2)
def test_a_turn_taken_for_a_side_call_becomes_a_memory_when_it_goes_on(front: Front) -> None:
    chat = Chat(front, "ada")
    asked = user("My name is Anna. Give me a title for this conversation.")
    guessed = chat.ask(asked)
    assert guessed.headers["x-kvasir-side-call"] == "title"
    on = chat.ask(asked, reply(text(guessed)), user("What is my name?"))
    assert on.headers["x-agent-memory"] == "new"
    more = chat.ask(asked, reply(text(guessed)), user("What is my name?"), reply(text(on)), user("And yours?"))
    assert (more.headers["x-agent-id"], more.headers["x-agent-memory"]) == (on.headers["x-agent-id"], "extended")


@pytest.mark.long(4)
def test_a_summary_requested_apart_is_of_the_conversation_that_it_quotes(mortal: Front) -> None:
    chat = Chat(mortal, "bob")
    before = chat.agents()
    asked = user("My name is Anna, and I live by the sea with my three sisters.")
    opening = (Said("system", "You live in a large town. " * 40), asked)
    first = chat.ask(*opening)
    agent = first.headers["x-agent-id"]
    transcript = f"[User]: {asked.content}\n[Assistant]: {text(first)}"
    summary = chat.ask(SUMMARIES[0][0], user(transcript), max_tokens=128, response_format=LONG_LINE)
    assert (summary.headers["x-kvasir-side-call"], summary.headers["x-agent-memory"]) == ("summary", "none")
    mortal.gateway.kill()
    mortal.gateway.start()
    begun = chat.ask(opening[0], user("What did we do so far?"), reply(text(summary)), user("Go on."))
    assert (begun.headers["x-agent-id"], begun.headers["x-agent-memory"]) == (agent, "replaced")
    assert chat.agents() - before == {agent}
