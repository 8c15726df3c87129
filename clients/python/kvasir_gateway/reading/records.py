"""A caller's agents in the store, read and changed through the engine."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from kvasir import expires_after
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument, KvasirError, NotFound
from kvasir.formats import manifest

from kvasir_gateway.turn import Place, Said, ToolUse

Made = TypeVar("Made")
PREFIX = "conversation/"  # of the names of agents that no caller named
# The label of an agent whose conversation was compacted: the digest of its newest opening.
_OPENING = "conversation.opening"
_SUMMARY = "conversation.summary"  # of one whose client has requested a summary; `reading/compaction.py` writes it
_UNUSED_FOR = "7d"  # by the store, which counts time that surely passed: a clock that is set deletes nothing
_COPIED = (cachestore_pb2.ORIGIN_IMPORT, cachestore_pb2.ORIGIN_PULL)
_AGENTS_AT_ONCE = 8  # of which one request reads the memory

DigestsOf = Callable[[Iterable[Said]], Iterator[str]]  # of all beginnings of what was said, from that of nothing on


@dataclass(frozen=True, slots=True)
class Kept:
    """An agent of the store, as far as conversations need it."""

    agent_id: str
    used_at: datetime
    is_copy: bool = False  # an archive or a copy of another store's brought it
    opening: str = ""  # of a compacted conversation the newest
    summary: str = ""  # that its client was given, as `compaction.Summaries` writes it
    expires: bool = False  # it has the label of the days that it may stay unused
    version: int = 0  # its newest
    is_elsewhere: bool = False  # another store owns it, or is about to


class Beside(Protocol):
    """Does work that would hold up the event loop."""

    def __call__(self, make: Callable[[], Made]) -> Awaitable[Made]: ...


class AgentRecords:
    """What the store knows about a caller's agents. Each agent is read at the engine that knows most of it."""

    def __init__(self, client: AioInferenceClient, at: Callable[[str], AioInferenceClient], beside: Beside) -> None:
        """`at`: the engine that knows most of an agent. `beside`: does work that would hold up the event loop."""
        self._client = client
        self._at = at
        self.beside = beside

    async def kept(self, name_prefix: str, opening: str = "") -> list[Kept]:
        """All agents whose names begin so, the last used first; of a compacted conversation those that have this newer
        opening."""
        labels = {_OPENING: opening} if opening else {}
        found = [_kept(agent) async for agent in self._client.every_agent(name_prefix=name_prefix, labels=labels)]
        return sorted(found, key=lambda agent: agent.used_at, reverse=True)

    async def note(self, agent_id: str, *, summary: str, opening: str = "") -> None:
        """Keep the summary that its client was given; "" once it is used. `opening`: the conversation's from now on."""
        labels = {_OPENING: opening} if opening else {}
        await self._at(agent_id).update_agent(agent_id, labels=labels | {_SUMMARY: summary})

    async def let_expire(self, agent_id: str) -> None:
        """From now on the store deletes it once nobody has used it for a week."""
        await self._at(agent_id).update_agent(agent_id, labels={expires_after.LABEL: _UNUSED_FOR})

    async def messages(self, agent_id: str) -> Sequence[Said]:
        """What an agent remembers; nothing when that is not known."""
        try:
            _, data = await self._at(agent_id).get_snapshot(agent_id)
            return await self.beside(lambda: _remembered(manifest.parse(data)))
        except KvasirError:
            return ()

    async def said_until(self, places: Collection[Place], digests_of: DigestsOf) -> dict[Place, Sequence[Said]]:
        """What was said until each of these replies, and the reply; without those that nobody remembers any more.
        Each agent is read once, and a few at a time."""
        few = asyncio.Semaphore(_AGENTS_AT_ONCE)

        async def one(agent_id: str) -> dict[Place, Sequence[Said]]:
            async with few:
                return await self._said_by(agent_id, [each for each in places if each.agent_id == agent_id], digests_of)

        reading = [asyncio.create_task(one(agent_id)) for agent_id in {place.agent_id for place in places}]
        try:
            found = await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
        return {place: said for each in found for place, said in each.items()}

    async def _said_by(
        self, agent_id: str, places: Sequence[Place], digests_of: DigestsOf
    ) -> dict[Place, Sequence[Said]]:
        """Versions that are kept name their turns. A reply of an older turn is found in an agent of a conversation,
        which keeps all its messages, behind the same messages."""
        try:
            versions = (await self._at(agent_id).list_snapshots(agent_id)).snapshots
        except NotFound:
            return {}
        found: dict[Place, Sequence[Said]] = {}
        newest: Sequence[Said] = ()
        for version in versions:
            with contextlib.suppress(NotFound, InvalidArgument):  # retired meanwhile, or not to be read
                _, data = await self._at(agent_id).get_snapshot(agent_id, version=version.version)
                request_id, said = await self.beside(partial(_turn_of, data))
                newest = newest or said
                if said:  # an agent that is prompted in plain text has no messages
                    found |= {place: said for place in places if place.request_id == request_id}
            if len(found) == len(places):
                return found
        if not agent_id.startswith(PREFIX):
            return found
        return found | await self.beside(lambda: _replies_behind(newest, {*places} - {*found}, digests_of))

    async def fork(self, source: str, name: str, version: int | None) -> int:
        """Returns the fork's newest version."""
        return _newest(await self._at(source).fork_agent(source, name, version=version))

    async def delete(self, agent_id: str, only_version: int | None = None) -> None:
        """`only_version`: where a turn was stored in it after all, it stays."""
        if only_version is None or _newest(await self._at(agent_id).get_agent(agent_id)) == only_version:
            await self._at(agent_id).delete_agent(agent_id)


def _turn_of(manifest_bytes: bytes) -> tuple[str, Sequence[Said]]:
    """The request of a version's turn, and the messages until its reply."""
    parsed = manifest.parse(manifest_bytes)
    return parsed.turn.request_id, said_by_all(parsed.messages)


def _replies_behind(
    said: Sequence[Said], places: Iterable[Place], digests_of: DigestsOf
) -> dict[Place, Sequence[Said]]:
    """The messages of a memory until the replies at these places, where those before are the same."""
    digests = list(digests_of(said))
    return {
        place: said[: place.number + 1]
        for place in places
        if 0 <= place.number < len(said)
        and said[place.number].role == "assistant"
        and digests[place.number] == place.digest
    }


def _newest(agent: cachestore_pb2.Agent) -> int:
    return max((line.version for line in agent.lines), default=0)


def _kept(agent: cachestore_pb2.Agent) -> Kept:
    is_copy = any(line.origin in _COPIED or (line.is_brought and not line.is_text_own) for line in agent.lines)
    opening, summary = (agent.labels.get(name, "") for name in (_OPENING, _SUMMARY))
    expires, used_at = expires_after.LABEL in agent.labels, agent.used_at.ToDatetime(tzinfo=UTC)
    is_elsewhere = agent.HasField("ownership") and agent.ownership.state != cachestore_pb2.OWNER_STATE_OWNED
    return Kept(agent.agent_id, used_at, is_copy, opening, summary, expires, _newest(agent), is_elsewhere)


def _remembered(parsed: Any) -> Sequence[Said]:
    """An agent's messages. The calls of its newest reply are in its text, as the model wrote them. One that was cut is
    not among them: its reader may have less of it."""
    said = said_by_all(parsed.messages)
    if said and said[-1].role == "assistant" and parsed.turn.finish_reason == "cancelled":
        return said[:-1]
    if said and said[-1].role == "assistant" and parsed.turn.finish_reason == "tool_calls":
        said[-1] = replace(said[-1], reply_id=manifest.reply_id(parsed.turn.request_id))
    return said


def said_by_all(messages: Iterable[Any]) -> list[Said]:
    """What callers and the model said: no notes of the engine's own."""
    return [_said(message) for message in messages if not message.is_note]


def _said(message: Any) -> Said:
    calls = tuple(ToolUse(call.id, call.name, call.arguments_json) for call in message.tool_calls)
    content, reasoning = message.content, message.reasoning
    if message.is_reply:
        content, reasoning = manifest.without_guards(content), manifest.without_guards(reasoning)
    return Said(message.role, content, message.name, calls, message.tool_call_id, reasoning)
