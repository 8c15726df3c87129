"""The texts of a turn: its prompt, and its reply as it comes, as it is remembered, and as a retry reads it again. What
is volatile stays as the agent's memory has it, by rules with names, so that the memory is reused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvasir import errors, volatile
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import manifest as manifests

from inference_svc.engine.engine import Engine, check_fits
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.recall import Recollection
from inference_svc.memory.store.answers import EventCursor
from inference_svc.model.prompting import Prompting, RememberedReply
from inference_svc.text import differences
from inference_svc.text.conversation import Dialogue, dialogue, json_of_messages, lasting_chars, render, tool_fields
from inference_svc.text.differences import Difference
from inference_svc.text.given_json import GivenJson
from inference_svc.text.kept_messages import Messages, Shorter, shorter, summary_of
from inference_svc.text.literal_text import from_outside, without_guards
from inference_svc.text.prefix_matching import common_prefix_length
from inference_svc.text.replies.remembered_reply import Said, reply_message
from inference_svc.text.replies.reply_parts import ReplyPart, ReplyReader
from inference_svc.text.templates import tools_order
from inference_svc.text.templates.system_values import kept_values, without_notes
from inference_svc.text.templates.template_clock import TemplateClock
from inference_svc.text.templates.template_names import REASONING
from inference_svc.turns.phases import Prompted, Ran, Recalled
from inference_svc.turns.prompts.continuing import (
    as_its_agent_has_it,
    check_existing,
    continuation,
    rules_in_force,
    what_is_left_out,
    whole_conversation,
)
from inference_svc.turns.prompts.own_calls import with_own_calls
from inference_svc.turns.turn_data import Continuation, MessagesInput, PromptInput, TokensInput, TurnRequest

_LARGE_BYTES = 1 << 20  # of an input


async def prompt_text(
    prompting: Prompting, request: TurnRequest, messages: Sequence[manifest_pb2.Message], clock: TemplateClock
) -> tuple[str, Dialogue | None]:
    """The text, and the conversation that it renders, of all `messages`. Raises InvalidArgument with the field."""
    given = request.input
    if isinstance(given, PromptInput):
        return from_outside(given.prompt), None
    assert isinstance(given, MessagesInput)  # tokens have their text already
    objects = request.prompt.objects
    # Where a long conversation was shortened, some of the given ones are not among them.
    if remembered := messages[: max(len(messages) - len(given.messages), 0)]:
        objects = objects.also(json_of_messages(remembered, "remembered_messages"))
        objects.check_size()
    await prompting.read(request.namespace, objects)

    def rendered() -> tuple[str, Dialogue]:
        conversation = dialogue(messages, request.prompt.tools, objects, prompting.specials, request.prompt.begun)
        return render(prompting.template_at(clock, request.prompt.template_settings), conversation), conversation

    # Other turns wait for no render of ten thousand messages, which takes longer than their own steps together.
    is_large = request.origin.size_bytes > _LARGE_BYTES
    return await prompting.run(request.namespace, rendered, is_large_render=is_large)


def recalled_by(
    request: TurnRequest, recollection: Recollection, cursor: EventCursor | None, *, is_retry: bool = False
) -> Recalled:
    """What a turn makes of its agent's memory. Raises NotFound, FailedPrecondition, Unavailable without one."""
    how = None
    if request.key is not None:
        check_existing(request, recollection)
        request = as_its_agent_has_it(request, recollection)
        how = None if request.is_warming else continuation(request, recollection)
    recalled = _with_kept_values(Recalled(request, recollection, how, event_cursor=cursor))
    shortened = what_is_left_out(recalled.request, recollection, how)
    messages = whole_conversation(recalled.request, recollection, is_retry=is_retry)
    return replace(recalled, messages=messages, shortened=shortened)


def _with_kept_values(recalled: Recalled) -> Recalled:
    """Dates and clocks of systems' texts stay those that the memory has, and the newest ones become a note."""
    request, memory = recalled.request, recalled.recollection.continued
    rules = rules_in_force(request, recalled.recollection) & {volatile.SYSTEM_DATE, volatile.SYSTEM_CLOCK}
    given = request.input
    if not rules or memory is None or not isinstance(given, MessagesInput) or given.is_append:
        return recalled
    if not _goes_on(recalled):
        return recalled
    kept = kept_values(given.messages, memory.messages, rules)
    request = replace(request, input=replace(given, messages=kept.messages))
    return replace(recalled, request=request, kept=frozenset(kept.rules), note=kept.note)


def _goes_on(recalled: Recalled) -> bool:
    how = recalled.continuation or continuation(recalled.request, recalled.recollection)
    return how in (Continuation.EXTENDED, Continuation.REWOUND)


def _remembered_time_ms(recalled: Recalled) -> int:
    """The time that the turn's template gets: the memory's, where its conversation goes on by the rule; 0: its own."""
    memory = recalled.recollection.continued
    if memory is None or not memory.template_time_ms:
        return 0
    if volatile.TEMPLATE_DATE not in rules_in_force(recalled.request, recalled.recollection):
        return 0
    return memory.template_time_ms if _goes_on(recalled) else 0


def _remembered_order(recalled: Recalled) -> manifest_pb2.ToolsOrder | None:
    """The order in which the memory has its tools, also for a branch: it has no meaning. None: the turn's own."""
    memory = recalled.recollection.continued
    if memory is None or volatile.TOOLS_ORDER not in rules_in_force(recalled.request, recalled.recollection):
        return None
    return memory.tools_order


async def prompted(
    prompting: Prompting, recalled: Recalled, begun_with: tuple[int, manifest_pb2.ToolsOrder | None] | None = None
) -> Prompted:
    """The prompt of a turn. `begun_with`: time and order of tools of another engine's template; else the memory's."""
    told_ms, order = begun_with or (_remembered_time_ms(recalled), _remembered_order(recalled))
    request, given = recalled.request, recalled.request.input
    if isinstance(given, TokensInput):
        text, tokens = await prompting.run(request.namespace, lambda: prompting.spelled(given.token_ids))
        return Prompted(recalled, text, tokens=tokens)
    clock = prompting.clock(told_ms)
    recalled, tools_order = await _with_tools(prompting, recalled, order)
    is_time_untold = False
    try:
        text, conversation = await prompt_text(prompting, recalled.request, recalled.messages, clock)
    except errors.InvalidArgument:
        if (without := _without_notes(recalled)) is None:
            raise
        recalled, is_time_untold = without, True
        text, conversation = await prompt_text(prompting, recalled.request, recalled.messages, clock)
    made = Prompted(recalled, text, conversation, None, clock, tools_order, is_time_untold)
    return await _with_note(prompting, await _with_own_calls(prompting, made))


async def _with_own_calls(prompting: Prompting, made: Prompted) -> Prompted:
    """The prompt with the memory's spelling of calls that came back in another one, if more of the memory fits then."""
    recalled, memory, given = made.recalled, made.recalled.recollection.continued, made.request.input
    if memory is None or not isinstance(given, MessagesInput) or given.is_append or not _goes_on(recalled):
        return made
    remembered, request = memory.transcript.text, recalled.request
    common = common_prefix_length(remembered, made.text)
    if common == len(remembered) or not any(message.tool_calls for message in recalled.messages):
        return made
    tools = tool_fields(request.prompt.tools, request.prompt.objects)
    messages = await prompting.run(
        request.namespace,
        lambda: with_own_calls(
            recalled.messages, memory.messages, partial(prompting.message_of, tools=tools), made.text
        ),
    )
    if messages == recalled.messages:
        return made
    try:  # both spellings may be more JSON than a request may have, and a template may refuse the memory's
        request = replace(request, prompt=replace(request.prompt, objects=_with_json_of(request, messages)))
        text, conversation = await prompt_text(prompting, request, messages, made.clock)
    except errors.InvalidArgument:
        return made
    if common_prefix_length(remembered, text) <= common:
        return made
    recalled = replace(recalled, request=request, messages=messages)
    return replace(made, recalled=recalled, text=text, dialogue=conversation)


def _with_json_of(request: TurnRequest, messages: Messages) -> GivenJson:
    objects = request.prompt.objects.also(json_of_messages(messages, "remembered_messages"))
    objects.check_size()
    return objects


async def _with_tools(
    prompting: Prompting, recalled: Recalled, order: manifest_pb2.ToolsOrder | None
) -> tuple[Recalled, manifest_pb2.ToolsOrder | None]:
    """The turn with its tools in this order, if it is theirs, and the order that they have then."""
    request, given = recalled.request, recalled.request.prompt
    if not given.tools:
        return recalled, None
    await prompting.read(request.namespace, given.objects)

    def ordered() -> tuple[Recalled, manifest_pb2.ToolsOrder | None]:
        own = tools_order.order_of(given.tools, given.objects)
        found = tools_order.in_order(given.tools, given.objects, order) if order not in (None, own) else None
        if found is None:
            return recalled, own
        settings = replace(given, tools=found[0], objects=found[1])
        kept = recalled.kept | {volatile.TOOLS_ORDER}
        return replace(recalled, request=replace(request, prompt=settings), kept=kept), order

    return await prompting.run(request.namespace, ordered)


def _without_notes(recalled: Recalled) -> Recalled | None:
    """The turn without notes, which another model's template may refuse; None if there are none."""
    request, given, messages = recalled.request, recalled.request.input, without_notes(recalled.messages)
    if len(messages) == len(recalled.messages) or not isinstance(given, MessagesInput):
        return None
    request = replace(request, input=replace(given, messages=without_notes(given.messages)))
    return replace(recalled, request=request, messages=messages, note=None)


async def _with_note(prompting: Prompting, made: Prompted) -> Prompted:
    """The prompt with the newest dates and times behind its history, where the template prints them there."""
    note, conversation, request, text = made.recalled.note, made.dialogue, made.request, made.text
    if note is None or conversation is None:
        return made
    template = prompting.template_at(made.clock, request.prompt.template_settings)
    noted = replace(conversation.with_message(note, request.prompt.objects), begun=conversation.begun)

    def told() -> str | None:
        try:
            lasting = lasting_chars(template, conversation, text)
            found = render(template, noted)
        except errors.InvalidArgument:
            return None
        is_behind = lasting is not None and found.startswith(text[:lasting])
        return found if is_behind and noted.messages[-1]["content"] in found[lasting:] else None

    is_large = request.origin.size_bytes > _LARGE_BYTES
    found = await prompting.run(request.namespace, told, is_large_render=is_large)
    if found is None:
        return replace(made, is_time_untold=True)
    recalled = replace(made.recalled, messages=(*made.recalled.messages, note))
    return replace(made, recalled=recalled, text=found, dialogue=noted, is_time_untold=False)


async def with_messages(prompting: Prompting, prompted: Prompted, messages: Messages) -> Prompted:
    request = prompted.request
    objects = _with_json_of(request, messages)
    counter = await prompting.twin(request.namespace)
    await counter.read(request.namespace, objects)
    request = replace(request, prompt=replace(request.prompt, objects=objects))
    recalled = replace(prompted.recalled, request=request, messages=messages)
    return replace(prompted, recalled=recalled)


async def shorter_of(
    prompting: Prompting, prompted: Prompted, wanted_tokens: int, most_tokens: int, *, keeps_summary: bool | None = None
) -> Shorter | None:
    """The messages of a too long conversation that stay; counted with the tokenizer's copy, so that no turn waits."""
    request, messages, before = prompted.request, prompted.recalled.messages, prompted.recalled.shortened
    counter = await prompting.twin(request.namespace)
    template = counter.template_at(prompted.clock, request.prompt.template_settings)

    def tokens_of(candidate: Messages) -> int:
        text = render(template, dialogue(candidate, request.prompt.tools, request.prompt.objects, counter.specials))
        return len(counter.tokenize(text).ids)

    def found() -> Shorter | None:
        wanted, keeps = min(wanted_tokens, most_tokens), keeps_summary is not False
        bounds = {"wanted_tokens": wanted, "most_tokens": most_tokens}
        kept = shorter(messages, tokens_of, **bounds, before=before, keeps_summary=keeps)
        if kept is None and keeps_summary is None and summary_of(messages, before):
            kept = shorter(messages, tokens_of, **bounds, before=before, keeps_summary=False)
        return kept

    return await counter.run(request.namespace, found)


def check_length(engine: Engine, prompting: Prompting, text: str, field: str) -> None:
    """Refuse an absurdly long prompt without tokenizing it. Raises ContextExceeded."""
    check_fits(prompting.fewest_tokens(text), 0, engine.model.context_tokens, field=field, is_lower_bound=True)


async def rewind_point_chars(prompting: Prompting, made: Prompted) -> int | None:
    """Prompt characters after which a model with states records a rewind point."""
    if (conversation := made.dialogue) is None:
        return None
    template = prompting.template_at(made.clock, made.request.prompt.template_settings)
    return await prompting.run(made.request.namespace, lambda: lasting_chars(template, conversation, made.text))


async def with_difference(prompting: Prompting, made: Prompted) -> Prompted:
    """With the place where the prompt parts from its memory, and the rule that would have helped."""
    memory, recollection = made.recalled.recollection.continued, made.recalled.recollection
    if memory is None:
        return made
    remembered, text, request = memory.transcript.text, made.text, made.request
    found = differences.difference(remembered, text, common_prefix_length(remembered, text))
    conversation, template = made.dialogue, prompting.template_at(made.clock, request.prompt.template_settings)
    if found is None or conversation is None:
        return replace(made, difference=found)
    rules, messages = rules_in_force(request, recollection), made.recalled.messages

    def explained() -> Difference:
        try:
            place = differences.placed(found, text, conversation, template)
        except errors.InvalidArgument:  # it takes no conversation like this one
            return found
        return differences.explained(place, memory.messages, messages, rules)

    place = await prompting.run(request.namespace, explained)
    return replace(made, difference=_helped(place, made, memory, rules))


def _helped(place: Difference, made: Prompted, memory: AgentMemory, rules: frozenset[str]) -> Difference:
    """The difference, with the rule that is not in force and would have helped."""
    if place.role == differences.TEMPLATE and (made.tools_order is None) != (memory.tools_order is None):
        return replace(place, role=differences.TOOLS)
    is_other_time = 0 < memory.template_time_ms != made.clock.told_ms > 0
    helpful: Mapping[str, tuple[str, str, bool]] = {
        differences.TOOLS: ("order", volatile.TOOLS_ORDER, _are_same_tools(made.tools_order, memory.tools_order)),
        differences.TEMPLATE: ("date", volatile.TEMPLATE_DATE, is_other_time),
    }
    what, rule, is_it = helpful.get(place.role, ("", "", False))
    if not is_it:
        return place
    return replace(place, what=what, rules=() if rule in rules else (rule,))


def _are_same_tools(one: manifest_pb2.ToolsOrder | None, other: manifest_pb2.ToolsOrder | None) -> bool:
    return one is not None and other is not None and one.set_hash == other.set_hash


def reply_reader(request: TurnRequest, prompting: Prompting, prompt: str, begun: str = "") -> ReplyReader:
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
    reply_id = manifests.reply_id(request.request_id, request.choice)
    is_bound = constraint is not None and constraint.begins_reply
    return prompting.reader(prompt, tools, reply_id, begins_with=prompting.tool_start if is_bound else "")


async def remembered_reply(prompting: Prompting, ran: Ran) -> tuple[RememberedReply, tuple[manifest_pb2.Message, ...]]:
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
    transcript, turn = memory.transcript.text, memory.turn
    reader = reply_reader(request, prompting, transcript[: turn.prompt_chars])
    behind = without_guards(transcript[turn.prompt_chars :]).removeprefix(turn.reply)
    return reader.whole(turn.reply, behind), tuple(reader.calls)
