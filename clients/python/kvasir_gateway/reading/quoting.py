"""Conversations that a request quotes in a text of its own: opencode requests a summary so."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir_gateway.reading.comparing import results_of_text
from kvasir_gateway.reading.records import PREFIX, AgentRecords, Kept
from kvasir_gateway.turn import Said

_MAX_READ = 8  # agents of a namespace, those that were used last
# Of a line its end is compared: clients write before it who said it, or which tool was called. Fewer characters in all
# are a greeting and its answer, equal in many conversations.
_END_CHARS = 40


@dataclass(frozen=True, slots=True)
class Quoted:
    """An agent whose conversation a request quotes; empty: none."""

    agent_id: str = ""
    messages: Sequence[Said] = ()


async def newest(records: AgentRecords) -> list[tuple[Kept, Sequence[Said]]]:
    """The agents that were used last, but for copies, the newest first, and what they remember. Raises KvasirError."""
    kept = [agent for agent in await records.kept(PREFIX) if not agent.is_copy][:_MAX_READ]
    return [(agent, await records.messages(agent.agent_id)) for agent in kept]


def chars_in_common(said: Sequence[Said], quoting: Sequence[Said]) -> int:
    """How much of a conversation's lines and calls a request quotes; 0 for fewer than half, or for none of its
    user's."""
    users, calls = set(_line_ends(said, "user")), set(_call_ends(said))
    # Clients quote a call by its arguments alone, and no line of a reply in whose text it stands.
    texts = [each for place, each in enumerate(said) if not results_of_text(said, place)]
    lines = users.union(_line_ends(texts, "assistant"))
    common = (lines | calls).intersection(_quoted_ends(quoting))
    known = lines if calls.isdisjoint(common) else lines | calls
    is_quoted = 2 * len(common) >= len(known) and not users.isdisjoint(common)
    chars = sum(map(len, common))
    return chars if chars >= _END_CHARS and is_quoted else 0


def _line_ends(messages: Sequence[Said], role: str) -> Iterator[str]:
    lines = (line.strip() for message in messages if message.role == role for line in message.content.splitlines())
    yield from (line[-_END_CHARS:] for line in lines if line)


def _call_ends(messages: Sequence[Said]) -> Iterator[str]:
    """Of the arguments of an assistant's calls, as JSON without spaces."""
    calls = (call for message in messages if message.role == "assistant" for call in message.tool_calls)
    yield from (_compact(call.arguments_json)[-_END_CHARS:] for call in calls if call.arguments_json)


def _quoted_ends(messages: Sequence[Said]) -> Iterator[str]:
    """Of each line its end, and that of what follows the name of who said it; of a call that of its arguments."""
    for message in messages:
        for line in message.content.splitlines() if message.role != "system" else ():
            _, _, text = line.partition(": ")
            call = line[line.find("{") : line.rfind("}") + 1]
            yield from (part.strip()[-_END_CHARS:] for part in (line, text, call))


def _compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments
