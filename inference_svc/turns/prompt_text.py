"""The text of a turn's prompt: the caller's own, or a conversation through the model's template.

What of a conversation is volatile stays as the agent's memory has it, by rules with names: the date that a template
prints, the order of tools, dates and clocks in systems' texts. So the prompt follows from the memory and the request
alone, and the memory is reused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvasir import errors, volatile
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.memory.recall import Recollection
from inference_svc.model.prompting import Prompting
from inference_svc.text import differences, tools_order
from inference_svc.text.conversation import Dialogue, dialogue, json_of_messages, lasting_chars, render
from inference_svc.text.differences import Difference
from inference_svc.text.literal_text import from_outside
from inference_svc.text.prefix_matching import common_prefix_length
from inference_svc.text.system_values import kept_values, without_notes
from inference_svc.text.template_clock import TemplateClock
from inference_svc.turns.continuing import Continuation
from inference_svc.turns.turn_data import MessagesInput, PromptInput, TurnRequest
from inference_svc.turns.turn_state import TurnState, continuation, rules_in_force


async def prompt_text(
    prompting: Prompting, request: TurnRequest, messages: Sequence[manifest_pb2.Message], clock: TemplateClock
) -> tuple[str, Dialogue | None]:
    """The text, and the conversation that it renders. `messages` are all messages, the remembered ones included.
    Raises InvalidArgument that names the field.
    """
    given = request.input
    if isinstance(given, PromptInput):
        return from_outside(given.prompt), None
    assert isinstance(given, MessagesInput)  # tokens have their text already
    objects = request.objects
    # Where a long conversation was shortened, some of the given ones are not among them.
    if remembered := messages[: max(len(messages) - len(given.messages), 0)]:
        objects = objects.also(json_of_messages(remembered, "remembered_messages"))
        objects.check_size()
    await prompting.read(request.namespace, objects)

    def rendered() -> tuple[str, Dialogue]:
        conversation = dialogue(messages, request.tools, objects, prompting.specials, request.begun)
        return render(prompting.template_at(clock, request.template_settings), conversation), conversation

    return await prompting.run(request.namespace, rendered)


def remembered_time_ms(turn: TurnState, recollection: Recollection) -> int:
    """What the turn's template is told that the time is: what the memory's was told, where its conversation goes on and
    the rule holds. 0: the turn's own.
    """
    memory = recollection.continued
    if memory is None or not memory.template_time_ms:
        return 0
    if volatile.TEMPLATE_DATE not in rules_in_force(turn.request, recollection):
        return 0
    return memory.template_time_ms if _goes_on(turn, recollection) else 0


def _goes_on(turn: TurnState, recollection: Recollection) -> bool:
    """Whether it is the memory's conversation, and no other."""
    how = turn.continuation or continuation(turn.request, recollection)
    return how in (Continuation.EXTENDED, Continuation.REWOUND)


def keep_values(turn: TurnState, recollection: Recollection) -> None:
    """Dates and clocks of systems' texts stay those that the memory has. Notes whether the newest are to be told."""
    memory, request = recollection.continued, turn.request
    rules = rules_in_force(request, recollection) & {volatile.SYSTEM_DATE, volatile.SYSTEM_CLOCK}
    given = request.input
    if not rules or memory is None or not isinstance(given, MessagesInput) or given.is_append:
        return
    if _goes_on(turn, recollection):
        kept = kept_values(given.messages, memory.messages, rules)
        turn.request = replace(request, input=replace(given, messages=kept.messages))
        turn.kept, turn.note = set(kept.rules), kept.note


def remembered_order(turn: TurnState, recollection: Recollection) -> manifest_pb2.ToolsOrder | None:
    """The order in which the memory has its tools, also for a branch: it has no meaning. None: the turn's own."""
    memory = recollection.continued
    if memory is None or volatile.TOOLS_ORDER not in rules_in_force(turn.request, recollection):
        return None
    return memory.tools_order


async def order_tools(prompting: Prompting, turn: TurnState, order: manifest_pb2.ToolsOrder | None) -> None:
    """Put the turn's tools in this order, if it is theirs, and note the order that they have then."""
    request = turn.request
    if not request.tools:
        return
    await prompting.read(request.namespace, request.objects)

    def ordered() -> tuple[TurnRequest, manifest_pb2.ToolsOrder | None]:
        own = tools_order.order_of(request.tools, request.objects)
        found = tools_order.in_order(request.tools, request.objects, order) if order not in (None, own) else None
        if found is None:
            return request, own
        tools, objects = found
        return replace(request, tools=tools, objects=objects), order

    turn.request, turn.tools_order = await prompting.run(request.namespace, ordered)
    if turn.request is not request:
        turn.kept.add(volatile.TOOLS_ORDER)


def drop_notes(turn: TurnState) -> bool:
    """Leave out notes, which another model's template may refuse; False if there are none."""
    given, messages = turn.request.input, without_notes(turn.messages)
    if len(messages) == len(turn.messages) or not isinstance(given, MessagesInput):
        return False
    turn.messages, turn.note = messages, None
    turn.request = replace(turn.request, input=replace(given, messages=without_notes(given.messages)))
    return True


async def with_note(prompting: Prompting, turn: TurnState, text: str) -> str:
    """The prompt with the newest dates and times behind its history. Without them where the template does not take a
    system message there, or prints it elsewhere.
    """
    note, conversation = turn.note, turn.dialogue
    if note is None or conversation is None:
        return text
    template = prompting.template_at(turn.clock, turn.request.template_settings)
    noted = replace(conversation.with_message(note, turn.request.objects), begun=conversation.begun)

    def told() -> str | None:
        try:
            lasting = lasting_chars(template, conversation, text)
            found = render(template, noted)
        except errors.InvalidArgument:
            return None
        is_behind = lasting is not None and found.startswith(text[:lasting])
        return found if is_behind and noted.messages[-1]["content"] in found[lasting:] else None

    found = await prompting.run(turn.request.namespace, told)
    turn.is_time_untold = found is None
    if found is None:
        return text
    turn.dialogue, turn.messages = noted, (*turn.messages, note)
    return found


async def find_difference(
    prompting: Prompting, turn: TurnState, recollection: Recollection, text: str
) -> Difference | None:
    """Where the prompt parts from the memory that it goes on from, and which rule would have helped."""
    memory = recollection.continued
    if memory is None:
        return None
    remembered = memory.transcript.text
    at = common_prefix_length(remembered, text)
    found = differences.difference(remembered, text, at)
    conversation, template = turn.dialogue, prompting.template_at(turn.clock, turn.request.template_settings)
    if found is None or conversation is None:
        return found

    def explained() -> Difference:
        try:
            place = differences.placed(found, text, conversation, template)
        except errors.InvalidArgument:  # it takes no conversation like this one
            return found
        return differences.explained(place, memory.messages, turn.messages, rules_in_force(turn.request, recollection))

    place = await prompting.run(turn.request.namespace, explained)
    if place.role == differences.TEMPLATE and (turn.tools_order is None) != (memory.tools_order is None):
        return replace(place, role=differences.TOOLS)
    helpful: Mapping[str, tuple[str, str, bool]] = {
        differences.TOOLS: ("order", volatile.TOOLS_ORDER, _are_same_tools(turn.tools_order, memory.tools_order)),
        differences.TEMPLATE: ("date", volatile.TEMPLATE_DATE, 0 < memory.template_time_ms != turn.clock.told_ms > 0),
    }
    what, rule, is_it = helpful.get(place.role, ("", "", False))
    if not is_it:
        return place
    rules = (rule,) if rule not in rules_in_force(turn.request, recollection) else ()
    return replace(place, what=what, rules=rules)


def _are_same_tools(one: manifest_pb2.ToolsOrder | None, other: manifest_pb2.ToolsOrder | None) -> bool:
    return one is not None and other is not None and one.set_hash == other.set_hash
