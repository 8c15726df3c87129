"""Calls that agents made before the gateway started: by their ids, a compacted conversation is known again."""

import re
from collections.abc import Collection, Sequence
from datetime import datetime

from kvasir.formats import manifest

from kvasir_gateway.reading.records import PREFIX, AgentRecords, Kept
from kvasir_gateway.turn import Said

_MAX_AGENTS = 8  # of a namespace, those that were used last before the gateway started, and as many since
_MAX_CALLS = 64  # of an agent, its newest
_MOST_AT_ONCE = 8  # that are known of a newest reply, whose calls still stand in its text
# As the engine writes ids. Clients send others' calls, too: examples, and the history of another provider.
_ENGINES_ID = re.compile("[A-Z2-7]{9}")


class MadeCalls:
    """Of each namespace the calls in its agents' memories, which are read once."""

    def __init__(self, started: datetime) -> None:
        self._started = started
        self._agents: dict[str, list[tuple[Kept, frozenset[str]]]] = {}

    async def makers(self, namespace: str, call_ids: Collection[str], records: AgentRecords) -> list[Kept]:
        """The agents that made one of these calls, the last used one first. Raises KvasirError."""
        engines = [call for call in call_ids if _ENGINES_ID.fullmatch(call)]
        if not engines:
            return []
        found = self._agents.get(namespace)
        if found is None:
            kept = await records.kept(PREFIX)
            # Chats since then, whose calls are known, must not push out those before.
            since, before = (
                [agent for agent in kept if not agent.is_copy and (agent.used_at >= self._started) is is_since]
                for is_since in (True, False)
            )
            kept = since[:_MAX_AGENTS] + before[:_MAX_AGENTS]
            read = [(agent, await records.messages(agent.agent_id)) for agent in kept]
            found = [(agent, _newest_calls(said)) for agent, said in read]
            if all(said for _, said in read):  # else the store did not answer, and is queried again
                self._agents[namespace] = found
        return [agent for agent, calls in found if not calls.isdisjoint(engines)]


def _newest_calls(said: Sequence[Said]) -> frozenset[str]:
    # A call that still stands in its reply's text is named by its result.
    named = [name for each in said for name in (*(call.id for call in each.tool_calls), each.tool_call_id)]
    calls = [name for name in dict.fromkeys(named) if _ENGINES_ID.fullmatch(name)]
    if said and said[-1].reply_id:
        calls += [manifest.call_id(said[-1].reply_id, number) for number in range(_MOST_AT_ONCE)]
    return frozenset(calls[-_MAX_CALLS:])
