"""A conversation as a person reads it: an agent's messages as of a version, each with its number."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient
from kvasir.errors import DataLoss, NotFound
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from kvasir_gateway.engine import CallerAtEngine
from kvasir_gateway.reading.records import said_by_all
from kvasir_gateway.turn import Said

MOST_SHOWN = 200
_MOST_STEPS = 64  # versions that are read to find a reply's own
Place = tuple[str, int]  # a line's KV identity, and a version of it


@dataclass(frozen=True, slots=True)
class Transcript:
    """What an agent remembered as of a version. `text`: of one that gets prompts without messages."""

    version: cachestore_pb2.SnapshotVersion
    messages: Sequence[Said]
    text: str

    def shown(self, begin: int = 0, end: int | None = None) -> Sequence[tuple[int, Said]]:
        """At most MOST_SHOWN of the messages from `begin` to `end`, the last ones, with their numbers from 0."""
        shown = range(len(self.messages))[begin:end][-MOST_SHOWN:]
        return [(number, self.messages[number]) for number in shown]


async def transcript(caller: CallerAtEngine, agent_id: str, place: Place | None) -> Transcript:
    """As of a place, or the newest version. Raises NotFound, DataLoss."""
    line, version = place or ("", None)
    snapshot, data = await caller.at(agent_id).get_snapshot(agent_id, line, version)
    if not data:
        raise DataLoss("the memory is too long for a page: `kvasir agents export` writes it to a file")
    return await caller.records.beside(lambda: _read(snapshot, data))


def _read(version: cachestore_pb2.SnapshotVersion, data: bytes) -> Transcript:
    """In any thread: an archive may bring 100,000 messages."""
    found: Any = manifest.parse(data)
    text = "" if found.messages else manifest.without_guards(found.text + found.pending.text)
    return Transcript(version, said_by_all(found.messages), text)


@dataclass(frozen=True, slots=True)
class Facts:
    """What stands beside a conversation: the agent, the bytes of its memory, and where they lie."""

    agent: cachestore_pb2.Agent
    usage: cachestore_pb2.GetUsageResponse
    hot: pb.HotMemory | None

    @property
    def newest(self) -> cachestore_pb2.SnapshotVersion:
        return self.agent.lines[0] if self.agent.lines else cachestore_pb2.SnapshotVersion()


async def facts(client: AioInferenceClient, agent_id: str) -> Facts:
    """Raises NotFound."""
    agent, usage, hot = await asyncio.gather(
        client.get_agent(agent_id), client.get_usage(agent_id), client.list_hot_memories([agent_id])
    )
    return Facts(agent, usage, hot[0] if hot else None)


async def version_with(caller: CallerAtEngine, agent_id: str, place: Place | None, messages: int) -> tuple[Place, bool]:
    """The version that remembers so many of a version's messages and no more; else that version, and False. Raises
    NotFound, DataLoss."""
    whole = await transcript(caller, agent_id, place)
    line = whole.version.kv_identity_hash
    if len(whole.messages) == messages:
        return (line, whole.version.version), True
    listed = await caller.at(agent_id).list_snapshots(agent_id, line, page_size=1000)
    known: Mapping[int, cachestore_pb2.SnapshotVersion] = {each.version: each for each in listed.snapshots}
    at = whole.version.base_version
    for _ in range(_MOST_STEPS):
        if at not in known:
            break
        try:
            earlier = await transcript(caller, agent_id, (line, at))
        except (NotFound, DataLoss):  # retired meanwhile, or not to be read
            break
        if await caller.records.beside(partial(eq, earlier.messages, whole.messages[:messages])):
            return (line, at), True
        at = known[at].base_version
    return (line, whole.version.version), False
