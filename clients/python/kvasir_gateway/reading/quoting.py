"""Conversations that a request quotes in a text of its own: opencode asks so for a summary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir_gateway.reading.records import PREFIX, AgentRecords, Kept
from kvasir_gateway.turn import Said

_MAX_READ = 8  # agents of a namespace, those that were used last
# Of a line its end is compared: clients write before it who said it. Shorter ones are equal in many conversations.
_END_CHARS = 40


@dataclass(frozen=True, slots=True)
class Quoted:
    """An agent whose conversation a request quotes; empty: none."""

    agent_id: str = ""
    messages: Sequence[Said] = ()


async def newest(records: AgentRecords) -> list[tuple[Kept, Sequence[Said]]]:
    """The agents that were used last, but for copies, the newest first, and what they remember. Raises KvasirError."""
    kept = sorted(await records.kept(PREFIX), key=lambda agent: agent.used_at, reverse=True)
    kept = [agent for agent in kept if not agent.is_copy][:_MAX_READ]
    return [(agent, await records.messages(agent.agent_id)) for agent in kept]


def lines_in_common(said: Sequence[Said], quoting: Sequence[Said]) -> int:
    """How many lines of a conversation a request quotes; 0 for fewer than half of them: two conversations that read one
    file have its lines in common.
    """
    known = set(_ends(said, "user", "assistant"))
    common = len(known.intersection(_ends(quoting, "user", "assistant", "tool")))
    return common if 2 * common >= len(known) else 0


def _ends(messages: Sequence[Said], *roles: str) -> Iterator[str]:
    for message in messages:
        lines = message.content.splitlines() if message.role in roles else ()
        yield from (end for line in lines if len(end := line.strip()[-_END_CHARS:]) == _END_CHARS)
