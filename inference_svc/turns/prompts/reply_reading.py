"""Replies as they are read while they come, as they are remembered, and as a retry reads them again."""

from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.model.prompting import Prompting, RememberedReply
from inference_svc.text.conversation import tool_fields
from inference_svc.text.literal_text import without_guards
from inference_svc.text.replies.remembered_reply import Said, reply_message
from inference_svc.text.replies.reply_parts import ReplyPart, ReplyReader
from inference_svc.text.templates.template_names import REASONING
from inference_svc.turns.phases import Ran
from inference_svc.turns.turn_data import MessagesInput, TurnRequest


def reply_reader(request: TurnRequest, prompting: Prompting, prompt: str, begun: str = "") -> ReplyReader:
    """Reads the reply, of which `begun` was read before."""
    reader = _reader(request, prompting, prompt)
    reader.push(begun)
    return reader


def _reader(request: TurnRequest, prompting: Prompting, prompt: str) -> ReplyReader:
    """A reply to a raw prompt, or in a requested format, is all answer."""
    constraint = request.sampling.constraint
    is_formatted = constraint is not None and not constraint.has_calls
    if not isinstance(request.input, MessagesInput) or is_formatted:
        return ReplyReader()
    tools = tool_fields(request.prompt.tools, request.prompt.objects)
    reply_id, is_bound = f"{request.request_id}-{request.choice}", constraint is not None and constraint.begins_reply
    return prompting.reader(prompt, tools, reply_id, begins_with=prompting.tool_start if is_bound else "")


async def remembered_reply(prompting: Prompting, ran: Ran) -> tuple[RememberedReply, tuple[manifest_pb2.Message, ...]]:
    """Text and messages to remember."""
    return await prompting.run(ran.planned.request.namespace, lambda: _remembered_reply(prompting, ran))


def _remembered_reply(prompting: Prompting, ran: Ran) -> tuple[RememberedReply, tuple[manifest_pb2.Message, ...]]:
    ended, prompt, prompted = ran.ended, ran.prepared.text, ran.planned.prompted
    said = prompting.remembered_reply(prompt, ended.prompt_tokens, ended.generated_text, ended.text, ended.state)
    if prompted.dialogue is None:
        return said, ()
    told = Said(said.reply)
    if ran.has_reasoned or ran.calls:
        stop_text = ended.generated_text.removeprefix(ended.text)
        part = reply_reader(prompted.request, prompting, prompt).whole(said.reply, stop_text)
        told = Said(said.reply, ran.calls, True, part.answer, part.reasoning)
    if prompted.dialogue.begun is not None:
        begun = prompted.dialogue.begun
        text = begun["content"]
        is_trimmed = not without_guards(prompt).endswith(without_guards(text))
        told = told.behind(text.rstrip() if is_trimmed else text, begun.get(REASONING, ""))
    reply = reply_message(
        prompting.template_at(prompted.clock, prompted.request.prompt.template_settings),
        prompted.dialogue,
        said=told,
        rendered_text=said.transcript.text,
        tool_start=prompting.tool_start,
        is_trusted=ran.planned.is_text_own and ran.planned.recollection.is_text_own,
    )
    return said, (*prompted.recalled.messages, reply)


def reply_again(
    request: TurnRequest, prompting: Prompting, memory: AgentMemory
) -> tuple[ReplyPart, tuple[manifest_pb2.ToolCall, ...]]:
    """The whole reply of the turn that made a memory, and its calls."""
    transcript, turn = memory.transcript.text, memory.turn
    reader = reply_reader(request, prompting, transcript[: turn.prompt_chars])
    behind = without_guards(transcript[turn.prompt_chars :]).removeprefix(turn.reply)
    return reader.whole(turn.reply, behind), tuple(reader.calls)
