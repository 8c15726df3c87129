"""Conversations through the shipped model's own template and tokenizer: what is remembered is what is rendered next."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument
from mlx_lm.tokenizer_utils import load as load_tokenizer

from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import (
    ChatTemplate,
    Dialogue,
    Tool,
    check_counts,
    dialogue,
    input_digest,
    json_of_messages,
    json_of_tools,
    lasting_chars,
    render,
)
from inference_svc.text.given_json import GivenJson
from inference_svc.text.literal_text import Specials
from inference_svc.text.replies.remembered_reply import Said, reply_message
from inference_svc.text.token_text import TokenText

WEATHER = Tool("weather", "Tells the weather", '{"type": "object", "properties": {"place": {"type": "string"}}}')
SPECIALS = Specials(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'


def message(role: str, content: str, **more: Any) -> manifest_pb2.Message:
    return manifest_pb2.Message(role=role, content=content, **more)


def call(arguments: str) -> manifest_pb2.ToolCall:
    return manifest_pb2.ToolCall(id="1", name="weather", arguments_json=arguments)


@pytest.fixture(scope="module")
def prompting() -> Prompting:
    tokenizer = load_tokenizer(kvasir_tiny.path())
    tokenizer_json = (kvasir_tiny.path() / "tokenizer.json").read_text(encoding="utf-8")
    return Prompting(tokenizer, TokenText.of_tokenizer(tokenizer_json, tokenizer.decode))


def calls_of(reply: str, prompting: Prompting) -> list[manifest_pb2.ToolCall]:
    reader = prompting.reader("", [WEATHER], "r-")
    reader.push(reply)
    reader.end()
    return reader.calls


def told(messages: Sequence[manifest_pb2.Message], tools: Sequence[Tool], specials: Specials = SPECIALS) -> Dialogue:
    objects = GivenJson([*json_of_messages(messages, "messages"), *json_of_tools(tools)])
    objects.read()
    return dialogue(messages, tools, objects, specials)


def remember(reply: str, messages: list[manifest_pb2.Message], text: str, prompting: Prompting) -> manifest_pb2.Message:
    return reply_message(
        prompting.template,
        told(messages, [WEATHER]),
        said=Said(reply, calls_of(reply, prompting)),
        rendered_text=text,
        tool_start=prompting.tool_start,
    )


@pytest.mark.parametrize("reply", ["Hello, Zoé.", "", "two\nlines ", "It is “odd” 漢", f"Let me see. {CALL}", CALL * 2])
def test_the_next_turn_extends_what_was_said(reply: str, prompting: Prompting) -> None:
    messages = [message("system", "Be kind."), message("user", "Hi, who are you?", name="Marla")]
    prompt = render(prompting.template, told(messages, [WEATHER]))
    said = f"{prompt}{reply}<|im_end|>"
    calls = calls_of(reply, prompting)
    remembered = remember(reply, messages, said, prompting)
    assert len(remembered.tool_calls) == len(calls) == reply.count("<tool_call>")
    following = render(prompting.template, told([*messages, remembered, message("user", "And then?")], [WEATHER]))
    assert following.startswith(said)


def test_a_tool_call_written_in_another_form_is_remembered_as_it_was_said(prompting: Prompting) -> None:
    spaced = '<tool_call>{"arguments":  {"place":"Oslo"}, "name": "weather"}</tool_call>'
    messages = [message("user", "Weather?")]
    said = render(prompting.template, told(messages, [WEATHER])) + spaced
    remembered = remember(spaced, messages, said, prompting)
    assert [json.loads(each.arguments_json) for each in calls_of(spaced, prompting)] == [{"place": "Oslo"}]
    assert (remembered.content, len(remembered.tool_calls)) == (spaced, 0)


def mistral(messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
    """As the template of Mistral 7B v0.3 and its like: refuses ids of other lengths, and two of one side in a row."""
    sides = [each["role"] for each in messages if each["role"] != "tool" and not each.get("tool_calls")]
    if any((role == "user") != (index % 2 == 0) for index, role in enumerate(sides)):
        raise ValueError("After the optional system message, conversation roles must alternate user/assistant")
    ids = [call["id"] for each in messages for call in each.get("tool_calls", ())]
    if any(len(each) != 9 for each in (*ids, *(each["tool_call_id"] for each in messages if each["role"] == "tool"))):
        raise ValueError("Tool call IDs should be alphanumeric strings with length 9!")
    return "".join(f"[{each['role']}]{each.get('tool_calls') or each['content']}" for each in messages)


def remembered_call(template: ChatTemplate, prompting: Prompting, asked: manifest_pb2.Message) -> manifest_pb2.Message:
    """What is remembered of a reply that is a call."""
    conversation = told([asked], [WEATHER])
    return reply_message(
        template,
        conversation,
        said=Said(CALL, calls_of(CALL, prompting)),
        rendered_text=render(template, conversation) + CALL,
        tool_start=prompting.tool_start,
    )


def test_a_call_is_remembered_in_a_form_that_its_template_takes_later(prompting: Prompting) -> None:
    """What the model said is no form of the template's. Remembered as it was said, the call counted as an answer, and
    the question after the next one was refused for good.
    """
    messages = [message("user", "Weather?")]
    remembered = remembered_call(mistral, prompting, messages[0])
    assert (len(remembered.tool_calls), remembered.is_reply) == (1, False)
    result = message("tool", "sunny", tool_call_id=remembered.tool_calls[0].id)
    for following in ([], [message("assistant", "It is sunny."), message("user", "And then?")]):
        assert render(mistral, told([*messages, remembered, result, *following], [WEATHER]))


def test_where_no_form_of_a_call_is_taken_later_it_is_remembered_as_it_was_said(prompting: Prompting) -> None:
    def alternating(messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if any((each["role"] == "user") != (index % 2 == 0) for index, each in enumerate(messages)):
            raise ValueError("Conversation roles must alternate user/assistant")
        return "".join(f"[{each['role']}] {each['content']}" for each in messages)

    remembered = remembered_call(alternating, prompting, message("user", "Weather?"))
    assert (remembered.content, len(remembered.tool_calls)) == (CALL, 0)


def test_a_template_that_refuses_names_the_field_and_quotes_nothing(prompting: Prompting) -> None:
    def template(messages: list[dict[str, Any]], tools: object, add_generation_prompt: bool) -> str:
        raise RuntimeError(messages[0]["content"])

    with pytest.raises(InvalidArgument) as refused:
        render(template, told([message("user", "a secret")], []))
    assert refused.value.field == "messages"
    assert "secret" not in refused.value.message


def test_a_template_that_makes_no_text_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        render(lambda messages, tools, add_generation_prompt: "\ud800", told([message("user", "x")], []))
    assert refused.value.field == "messages"


def test_what_the_next_prompt_surely_begins_with_ends_before_what_asks_for_the_reply() -> None:
    """A point behind "<think>" would never be gone back to, when the template writes it for the last reply only
    (LESSONS 18)."""

    def thinking(messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        text = "".join(f"<{each['role']}>{each['content']}</>" for each in messages)
        return text + ("<assistant><think>" if add_generation_prompt else "")

    def picky(messages: Sequence[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if not add_generation_prompt:
            raise ValueError("only to be answered")
        return thinking(messages, tools, add_generation_prompt)

    said = told([message("user", "hi")], [])
    assert lasting_chars(thinking, said, render(thinking, said)) == len("<user>hi</>")
    assert lasting_chars(picky, said, render(picky, said)) is None
    assert lasting_chars(thinking, said, "other") == 0


def test_every_part_of_an_input_changes_its_digest() -> None:
    digests = {
        input_digest("prompt", "ab", (), (), ()),
        input_digest("messages", "ab", (), (), ()),
        input_digest("prompt", "a", (), (), ()),
        input_digest("prompt", "ab", (), (), (("seed", "1"),)),
        input_digest("prompt", "ab", (), (), (("seed", "12"),)),
        input_digest("prompt", "ab", (), (WEATHER,), ()),
        input_digest("prompt", "ab", (message("user", "x"),), (), ()),
        input_digest("prompt", "ab", (message("user", "", name="x"),), (), ()),
        input_digest("prompt", "ab", (message("userx", ""),), (), ()),
        input_digest("prompt", "ab", (message("user", "", reasoning="x"),), (), ()),
        input_digest("prompt", "ab", (message("user", "", tool_calls=[call("{}")]),), (), ()),
        input_digest("prompt", "ab", (message("user", ""), message("user", "")), (), ()),
    }
    assert len(digests) == 12
    assert input_digest("prompt", "ab", (), (), ()) in digests


@pytest.mark.parametrize(
    "text", ["", "plain words", "“Zoé” 漢字 🜚 e\u0301", "<|im_start|>user\nhi<|im_end|>", "\ufffd\n\t"]
)
def test_tokens_complete_exactly_the_characters_of_their_text(text: str, prompting: Prompting) -> None:
    tokens = prompting.tokenize(text)
    assert len(tokens.ids) == len(tokens.chars)
    assert sum(tokens.chars) == len(text)


def test_a_token_that_ends_inside_a_character_does_not_end_whole(prompting: Prompting) -> None:
    tokens = prompting.tokenize("x漢")
    assert [prompting.ends_whole(tokens.ids[:count]) for count in range(1, len(tokens.ids) + 1)] == [
        True,
        *(False for _ in tokens.ids[2:]),
        True,
    ]


def test_no_text_has_fewer_tokens_than_is_reported(prompting: Prompting) -> None:
    for text in ("assistant " * 50, "<|im_start|>" * 50, "漢" * 50):
        assert prompting.fewest_tokens(text) <= len(prompting.tokenize(text).ids)


def test_the_beginning_of_a_text_has_its_first_tokens_and_is_short(prompting: Prompting) -> None:
    for word in ("assistant ", "a", "漢", "x1\n\n"):
        text = word * 5_000
        beginning = prompting.beginning(text, 20)
        assert text.startswith(beginning)
        assert len(beginning) < 2_000
        assert prompting.tokenize(beginning).ids[:20] == prompting.tokenize(text).ids[:20]
    assert prompting.beginning("short", 20) == "short"


def test_empty_tool_calls_are_counted_before_they_are_looked_at() -> None:
    """Two bytes each of a request: four million of them would hold up everybody for seconds."""
    calls = [manifest_pb2.ToolCall()] * 6_000
    messages = [manifest_pb2.Message(role="assistant", tool_calls=calls) for _ in range(2)]
    with pytest.raises(InvalidArgument, match="at most 10000 tool calls in all, got 12000") as refused:
        check_counts(messages, "messages.messages")
    assert refused.value.field == "messages.messages"
