"""How a turn's request stands to its agent's memory: the same conversation, another, a retry. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from kvasir import errors, volatile
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clocks import without_times

from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.outcomes import MissReason, Source
from inference_svc.memory.recall import Recollection
from inference_svc.text.kept_messages import as_remembered
from inference_svc.text.prefix_matching import Outcome, common_prefix_length
from inference_svc.text.templates.system_values import without_notes
from inference_svc.turns.turn_data import Continuation, MessagesInput, TurnRequest

Messages = Sequence[manifest_pb2.Message]


def is_same_conversation(given: Messages, remembered: Messages, *, at_any_time: bool = False) -> bool:
    """Whether both begin alike, but for systems' messages. `at_any_time`: a date in the first text may be another."""
    said, known = ([_said_by(each) for each in some if each.role != "system"][:2] for some in (given, remembered))
    if said[:1] == known[:1]:
        return bool(said)
    if not at_any_time or len(said) < 2 or said[1:] != known[1:] or said[1][0] != "assistant":
        return False
    return [said[0][0], without_times(said[0][1])] == [known[0][0], without_times(known[0][1])]


def in_common(given: Messages, remembered: Messages) -> int:
    """With how many messages both begin. Systems' messages do not count."""
    said, known = ([_said_by(each) for each in some if each.role != "system"] for some in (given, remembered))
    return common_prefix_length(said, known)


def goes_on(given: Messages, remembered: Messages) -> bool:
    """Whether all messages of others to the model stand in the given messages too. Replies come back in other forms."""
    asked, known = _asked(given), _asked(remembered)
    return len(given) >= len(without_notes(remembered)) and asked[: len(known)] == known


def of_text(match: Outcome) -> Continuation:
    """The same for a raw prompt, or one that could not be compared as messages."""
    if match is Outcome.NONE:
        return Continuation.REPLACED
    return Continuation.REWOUND if match is Outcome.DIVERGE else Continuation.EXTENDED


def whole_conversation(
    request: TurnRequest, recollection: Recollection, *, is_retry: bool
) -> tuple[manifest_pb2.Message, ...]:
    """All messages of the prompt. Raises FailedPrecondition or Unavailable when there is no memory to append to."""
    if not isinstance(request.input, MessagesInput):
        return ()
    given, memory = request.input.messages, recollection.continued
    if not request.input.is_append:
        return given
    if memory is not None and memory.messages:
        # A retry of a turn that was cut: its messages are remembered already, and its partial reply is dropped. Not by
        # an older version, which goes on as before.
        return memory.messages[:-1] if is_retry and recollection.base is None else (*memory.messages, *given)
    if not _is_remembered(recollection) or (memory is None and request.memory.expected_version == 0):
        return given
    _refuse_append(request.agent_id, recollection)
    return ()


def as_its_agent_has_it(request: TurnRequest, recollection: Recollection) -> TurnRequest:
    """A whole conversation without what its agent left out of it, where it goes on from the rest."""
    memory, given = recollection.continued, request.input
    if memory is None or memory.shortened is None or not isinstance(given, MessagesInput) or given.is_append:
        return request
    known, shorter = memory.messages, as_remembered(given.messages, memory.messages, memory.shortened)
    if shorter is None:
        return request
    # A caller may send just what is remembered, and the same words may come again: more in common decides.
    as_sent, as_cut = ((in_common(messages, known), goes_on(messages, known)) for messages in (given.messages, shorter))
    if as_cut < as_sent or not is_same_conversation(shorter, known):
        return request
    return replace(request, input=MessagesInput(shorter, is_cut=True))


def what_is_left_out(
    request: TurnRequest, recollection: Recollection, how: Continuation | None
) -> manifest_pb2.Shortened | None:
    """What the turn's messages lack because its memory lacks it; nothing where the caller's messages are the prompt."""
    memory, given = recollection.continued, request.input
    if memory is None or memory.shortened is None or not isinstance(given, MessagesInput):
        return None
    goes_on_from_it = how in (Continuation.EXTENDED, Continuation.REWOUND)
    if not goes_on_from_it or not (given.is_append or given.is_cut):
        return None
    shortened = manifest_pb2.Shortened()
    shortened.CopyFrom(memory.shortened)
    shortened.is_after_turn = False
    return shortened


def check_existing(request: TurnRequest, recollection: Recollection) -> None:
    """Raise NotFound for an agent that remembers nothing, if the caller minds."""
    if request.memory.expects_memory and not _is_remembered(recollection):
        raise errors.NotFound.of(
            "agent_id",
            f"agent {request.agent_id!r} remembers nothing yet",
            reason="AGENT_NOT_FOUND",
            agent_id=request.agent_id,
        )


def continuation(request: TurnRequest, recollection: Recollection) -> Continuation | None:
    """What the turn does to its agent's line; None if the match of its prompt decides."""
    memory, given = recollection.continued, request.input
    if not _is_remembered(recollection):
        return Continuation.NEW
    if memory is None:
        return _beside_unread(request, recollection)
    if not isinstance(given, MessagesInput) or not memory.messages:
        return None
    if given.is_append or goes_on(given.messages, memory.messages):
        return Continuation.EXTENDED if recollection.base is None else Continuation.REWOUND
    at_any_time = bool(rules_in_force(request, recollection))
    if is_same_conversation(given.messages, memory.messages, at_any_time=at_any_time):
        return Continuation.REWOUND
    return Continuation.REPLACED if request.memory.replaces else Continuation.BRANCHED


def rules_in_force(request: TurnRequest, recollection: Recollection) -> frozenset[str]:
    """The caller's own rules, else the agent's label, else the caller's defaults. Raises InvalidArgument."""
    label = recollection.settings.volatile
    if request.memory.rules is not None and not (label and request.memory.has_default_rules):
        return request.memory.rules
    return volatile.from_label(label) if label else volatile.DEFAULT


def _beside_unread(request: TurnRequest, recollection: Recollection) -> Continuation:
    """The same for a memory that cannot be read: no other conversation takes its place without the caller's word."""
    given, hot, miss = request.input, recollection.unproven, recollection.miss
    if request.memory.replaces:
        return Continuation.REPLACED
    if miss is None or not miss.is_store_away:  # it will not be readable later either
        return Continuation.BRANCHED if isinstance(given, MessagesInput) else Continuation.REPLACED
    # What the agent remembered last is known well enough to protect it.
    return Continuation.UNDECIDED if hot is None or may_follow(request, hot) else Continuation.BRANCHED


def may_follow(request: TurnRequest, found: AgentMemory) -> bool:
    """Whether a turn that could not read its agent's memory, `found`, leaves one that goes on from it."""
    recollection = Recollection(found, Source.COLD, found.publication.standing.head)
    request = as_its_agent_has_it(request, recollection)
    return continuation(request, recollection) is not Continuation.BRANCHED


def _is_remembered(recollection: Recollection) -> bool:
    """Whether the agent remembers something, as far as is known: a memory that cannot be read is there."""
    memory = recollection.continued
    return recollection.is_unread if memory is None else bool(memory.transcript.token_ids)


def _refuse_append(agent_id: str, recollection: Recollection) -> None:
    miss = recollection.miss
    if recollection.memory is None and miss is not None and miss.is_sealed:
        # No retry brings the key back.
        raise errors.FailedPrecondition.of("append_messages", miss.detail, reason="NAMESPACE_SEALED")
    if recollection.memory is None and miss is not None and miss.went_back is not None:
        # A retry is answered alike. The caller chooses: a text of its own, or a version that is older than it knows.
        known, newest = miss.went_back
        older = f"name base_version {newest}, roll the agent back to it, " if newest else ""
        raise errors.FailedPrecondition.of(
            "append_messages",
            f"{miss.detail}; send all messages, {older}or restart the engine",
            reason="AGENT_WENT_BACK",
            agent_id=agent_id,
            version=known,
            head_version=newest,
        )
    if recollection.memory is None and miss is not None and miss.is_store_away:
        # Without the agent's memory this would be another conversation, not a miss.
        raise errors.Unavailable(
            f"append_messages: the agent's memory cannot be read now ({miss.detail}); send all messages, or retry",
            reason="MEMORY_UNREADABLE",
            metadata={"agent_id": agent_id},
            retry_after_s=1.0,
        )
    if recollection.memory is None and miss is not None and miss.reason is not MissReason.NEW_AGENT:
        raise errors.FailedPrecondition.of(
            "append_messages",
            f"the agent's memory cannot be read ({miss.detail}); send all messages, or roll back",
            reason="MEMORY_DAMAGED",
            agent_id=agent_id,
        )
    raise errors.FailedPrecondition.of(
        "append_messages", "the agent remembers no messages; send all of them", reason="NO_MESSAGES", agent_id=agent_id
    )


def _asked(messages: Messages) -> list[tuple[str, str]]:
    return [_said_by(message) for message in messages if message.role not in ("system", "assistant")]


def _said_by(message: manifest_pb2.Message) -> tuple[str, str]:
    """Role and text. Clients send a text back without the space around it."""
    return message.role, message.content.strip()
