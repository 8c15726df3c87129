"""Which messages of a conversation that comes back the memory's own take the place of."""

import pytest
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.turns.prompts.own_calls import with_own_calls

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
