"""Replies back into messages: the form in which a reply is remembered, so that the next turn extends its memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument

from inference_svc.text.conversation import ChatTemplate, Dialogue, json_of_messages, render, unclaimed
from inference_svc.text.given_json import GivenJson


@dataclass(frozen=True, slots=True)
class Said:
    """A reply, and its parts. Special tokens that were spelled letter by letter have guards in all texts."""

    reply: str
    tool_calls: Sequence[manifest_pb2.ToolCall] = ()
    is_apart: bool = False  # it has calls, reasoning, which may be empty, or heads of messages: its parts follow
    answer: str = ""
    reasoning: str = ""

    def behind(self, begun: str, reasoning: str) -> "Said":
        """The same behind what its caller had begun: one message."""
        is_apart = self.is_apart or bool(reasoning)
        answer = begun + (self.answer if self.is_apart else self.reply)
        return Said(begun + self.reply, self.tool_calls, is_apart, answer, reasoning + self.reasoning)


def reply_message(
    template: ChatTemplate,
    conversation: Dialogue,
    *,
    said: Said,
    rendered_text: str,
    tool_start: str,
    is_trusted: bool = True,
) -> manifest_pb2.Message:
    """The assistant's message to remember: the form that the template renders back to `rendered_text`. Reasoning and
    tool calls in fields of their own where they render to the same characters; else the reply as it was, if that does,
    so that the next turn extends the memory instead of diverging from it. Where none does, the form that the template
    takes with what follows. `tool_start` stands before the calls. `is_trusted`: whether the message may count as a
    reply later; no message of a line that was imported does.
    """
    plain = manifest_pb2.Message(role="assistant", content=said.reply, is_reply=True)
    if not is_trusted:
        plain = unclaimed(plain)
    forms = [*_apart(plain, said, tool_start), plain]
    if len(forms) == 1:
        return plain
    try:
        objects = GivenJson(json_of_messages(forms[:1], "reply"))
        objects.check_size()
        objects.read()
    except InvalidArgument:
        return plain  # the arguments are no JSON object
    rendered = [conversation.with_message(form, objects) for form in forms]
    for form, known in zip(forms, rendered, strict=True):
        if _begins_with(template, known, rendered_text):
            return form
        # Some templates write what ends a call with its result.
        if said.tool_calls and _begins_with(template, _with_results(known, said.tool_calls), rendered_text):
            return form
    goes_on = _goes_on(template, rendered[0], said.tool_calls)
    if not said.tool_calls:
        return forms[0] if goes_on else plain
    # Its arguments lost the guards that the reply has, so it does not count as one.
    return unclaimed(forms[0]) if goes_on and not _goes_on(template, rendered[-1], said.tool_calls) else plain


def _apart(plain: manifest_pb2.Message, said: Said, tool_start: str) -> Iterator[manifest_pb2.Message]:
    """The reply with parts in fields of their own: all of them, or its calls alone."""
    more: dict[str, Any] = {"role": "assistant", "tool_calls": said.tool_calls, "is_reply": plain.is_reply}
    if said.is_apart:
        whole = manifest_pb2.Message(content=said.answer, reasoning=said.reasoning, **more)
        yield whole if plain.is_reply else unclaimed(whole)
    if said.tool_calls:
        yield manifest_pb2.Message(content=plain.content[: max(plain.content.find(tool_start), 0)], **more)


def _begins_with(template: ChatTemplate, conversation: Dialogue, text: str) -> bool:
    try:
        return render(template, conversation, add_generation_prompt=False).startswith(text)
    except InvalidArgument:
        return False


def _goes_on(template: ChatTemplate, called: Dialogue, tool_calls: Sequence[manifest_pb2.ToolCall]) -> bool:
    """Whether the template takes the results of calls, an answer and a question behind a conversation."""
    called = _with_results(called, tool_calls)
    answers = [manifest_pb2.Message(role="assistant", content="x")] if tool_calls else []
    for message in (*answers, manifest_pb2.Message(role="user", content="x")):
        called = called.with_message(message, GivenJson())
    return _begins_with(template, called, "")


def _with_results(called: Dialogue, tool_calls: Sequence[manifest_pb2.ToolCall]) -> Dialogue:
    for call in tool_calls:
        result = manifest_pb2.Message(role="tool", content="x", name=call.name, tool_call_id=call.id)
        called = called.with_message(result, GivenJson())
    return called
