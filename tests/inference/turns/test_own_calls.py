"""Which messages of a conversation that comes back the memory's own take the place of."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.engine.api import SamplingParams
from inference_svc.memory.agent_memory import AgentMemory, Publication
from inference_svc.memory.lines.line_states import Standing
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import Recollection
from inference_svc.text.conversation import json_of_messages
from inference_svc.text.given_json import GivenJson
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds
from inference_svc.turns.phases import Prompted, Recalled
from inference_svc.turns.prompts.own_calls import with_own_calls
from inference_svc.turns.prompts.texts import _with_own_calls
from inference_svc.turns.turn_data import Continuation, MessagesInput, PromptSettings, TurnRequest

ASKED, MORE = (manifest_pb2.Message(role="user", content=text) for text in ("Where?", "And now?"))


def called(arguments: str, content: str = "", reasoning: str = "", name: str = "look") -> manifest_pb2.Message:
    call = manifest_pb2.ToolCall(id="c", name=name, arguments_json=arguments)
    return manifest_pb2.Message(role="assistant", content=content, reasoning=reasoning, tool_calls=[call])


def own(message: manifest_pb2.Message, *, is_reply: bool = True) -> manifest_pb2.Message:
    found = manifest_pb2.Message(is_reply=is_reply)
    found.MergeFrom(message)
    return found


def unread(_reply: str) -> manifest_pb2.Message:
    raise AssertionError("its calls stand apart")


@pytest.mark.parametrize(
    ("given", "is_same"),
    [
        (called('{"b":[1,2],"a":{"x":1}}'), True),
        (called('{"a": {"x": 1}, "b": [2, 1]}'), False),
        (called('{"a": {"x": true}, "b": [1, 2.0]}'), False),
        (called('{"a": {"x": 1}, "b": [1, 2.5]}'), False),
        (called('{"a": {"x": 1}, "b": [1, 2]}', "So:"), False),
        (called('{"a": {"x": 1}, "b": [1, 2]}', reasoning="Hm."), False),
        (called('{"a": {"x": 1}, "b": [1, 2]}', name="see"), False),
    ],
)
def test_equal_calls_are_the_memorys_whatever_their_spelling(given: manifest_pb2.Message, is_same: bool) -> None:
    mine = own(called('{"a": {"x": 1}, "b": [1, 2.0]}'))
    found = with_own_calls((ASKED, given, MORE), (ASKED, mine), unread)
    assert found == (ASKED, mine if is_same else given, MORE)


def test_calls_keep_the_ids_that_their_results_name() -> None:
    """A template may print them: one of its own would name no result."""
    given, mine = called('{"a":1}'), own(called('{"a": 1}'))
    mine.tool_calls[0].id = "mine"
    [_, found] = with_own_calls((ASKED, given), (ASKED, mine), unread, "c")
    assert [(call.id, call.arguments_json) for call in found.tool_calls] == [("c", '{"a": 1}')]
    plain = manifest_pb2.Message(role="assistant", content="<call>", is_reply=True)
    for prompt, message in (("Where? c", given), ("Where?", plain)):
        assert with_own_calls((ASKED, given), (ASKED, plain), lambda _: mine, prompt) == (ASKED, message)


def test_calls_in_a_replys_text_are_read_and_those_behind_another_text_or_of_others_are_left() -> None:
    given, texts = called('{"a":1}'), list[str]()
    plain = manifest_pb2.Message(role="assistant", content="<call>", is_reply=True)

    def read(reply: str) -> manifest_pb2.Message:
        texts.append(reply)
        return called('{"a": 1}')

    system, note = manifest_pb2.Message(role="system", content="S"), manifest_pb2.Message(role="user", is_note=True)
    assert with_own_calls((system, ASKED, given, MORE), (ASKED, note, plain), read) == (system, ASKED, plain, MORE)
    assert texts == ["<call>"]
    assert with_own_calls((MORE, given), (ASKED, plain), read) == (MORE, given)
    imported = own(called('{"a": 1}'), is_reply=False)
    assert with_own_calls((ASKED, given), (ASKED, imported), unread) == (ASKED, given)
    assert with_own_calls((ASKED, given, MORE, given), (ASKED, plain), read) == (ASKED, plain, MORE, given)


def test_a_turn_is_not_refused_where_both_spellings_are_more_json_than_it_may_have() -> None:
    large = "x" * (600 << 10)
    said, mine = (ASKED, called(f'{{"a":"{large}"}}')), own(called(f'{{"a": "{large}"}}'))
    memory = AgentMemory(
        RememberedText("text", TokenIds((1,)), TokenChars((4,))),
        (ASKED, mine),
        manifest_pb2.Turn(),
        0,
        "",
        Publication(Standing(None)),
    )
    settings = PromptSettings(objects=GivenJson(json_of_messages(said, "messages")))
    request = TurnRequest("r", "ns", "a", MessagesInput(said), "", SamplingParams(1), True, prompt=settings)
    made = Prompted(Recalled(request, Recollection(memory, Source.HOT, None), Continuation.EXTENDED, said), "prompt")

    async def run(_namespace: str, work: Callable[[], Any]) -> Any:
        return work()

    prompting: Any = SimpleNamespace(run=run, message_of=unread)
    assert asyncio.run(_with_own_calls(prompting, made)) is made
