"""Summaries that clients asked for, so that a conversation which begins with one goes on in the agent whose history it
takes the place of: as its next version, and the versions before it stay.

In RAM alone: a summary that is not known any more costs an agent, not a memory.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvasir_gateway.turn import Said

_MAX_SUMMARIES = 1000  # of all namespaces; the oldest is dropped
_MAX_LINES = 64
# Clients write a text of theirs around a summary, and may strip tags. Shorter lines are headings, equal in many.
_LEAST_CHARS = 40


@dataclass(frozen=True, slots=True)
class _Summary:
    agent_id: str
    session: bytes
    lines: frozenset[bytes]


class Summaries:
    """By namespace and agent the newest summary of its conversation."""

    def __init__(self) -> None:
        self._summaries: OrderedDict[tuple[str, str], _Summary] = OrderedDict()

    def add(self, namespace: str, agent_id: str, session: bytes, messages: Sequence[Said], text: str) -> None:
        """`messages`: what it is a summary of. Their own lines, as a project's rules, may begin any conversation."""
        lines = frozenset(_lines(text)[:_MAX_LINES]) - _lines_of(messages)
        if lines:
            self._summaries.pop((namespace, agent_id), None)
            self._summaries[namespace, agent_id] = _Summary(agent_id, session, lines)
        if len(self._summaries) > _MAX_SUMMARIES:
            self._summaries.popitem(last=False)

    def used(self, namespace: str, agent_id: str) -> None:
        """A conversation went on from it: another that repeats a line of it does not."""
        self._summaries.pop((namespace, agent_id), None)

    async def agent_of(self, namespace: str, session: bytes, messages: Sequence[Said]) -> str:
        """The agent whose summary these messages repeat, a line of it at least; else nothing."""
        known = [each for (space, _), each in self._summaries.items() if space == namespace and each.session == session]
        if not known:
            return ""
        said = await asyncio.to_thread(_lines_of, messages)  # of a long conversation it takes its time
        best = max(reversed(known), key=lambda each: len(each.lines & said))
        return best.agent_id if best.lines & said else ""


def _lines_of(messages: Sequence[Said]) -> set[bytes]:
    return {line for message in messages for line in _lines(message.content)}


def _lines(text: str) -> list[bytes]:
    lines = (line.strip() for line in text.splitlines())
    return [_digest(line) for line in lines if len(line) >= _LEAST_CHARS]


def _digest(line: str) -> bytes:
    return blake3(line.encode("utf-8", "surrogatepass")).digest(8)
