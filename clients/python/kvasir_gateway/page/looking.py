"""The panels of the pages, read from the engine: each on its own, so that one that fails spoils no other."""

import asyncio
import textwrap
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient
from kvasir.errors import KvasirError
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.waits import ANSWER_S, SILENCE_S

from kvasir_gateway.engine import CallerAtEngine
from kvasir_gateway.page import tree
from kvasir_gateway.page.conversation.transcript import transcript
from kvasir_gateway.page.numbers.chart import Chart, chart
from kvasir_gateway.page.numbers.history import History, Parted, Speed

_VERSIONS_A_PAGE = 200
_MOST_READ, _MOST_READ_TOKENS = 16, 20_000  # versions whose messages are read, and how long they are at most
_MOST_CHARS = 70
COMMAND_S = SILENCE_S  # a program that begins, and looks at others
_SOURCES = ("hot", "warm", "shared", "replay", "cold")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Panel(Generic[_Answer]):
    """A part of a page, or why it cannot be shown."""

    value: _Answer | None
    problem: str = ""


async def panel(work: Awaitable[_Answer], within_s: float = ANSWER_S) -> Panel[_Answer]:
    """The answer of an engine, or of a command, that may take too long."""
    try:
        async with asyncio.timeout(within_s):
            return Panel(await work)
    except KvasirError as error:
        return Panel(None, error.message)
    except TimeoutError:
        return Panel(None, f"no answer within {within_s:g} s")


@dataclass(frozen=True, slots=True)
class Health:
    """The engine, and what the caller's namespace has of it."""

    stats: pb.GetStatsResponse
    mine: pb.NamespaceStats
    capabilities: pb.GetCapabilitiesResponse


async def health(client: AioInferenceClient, namespace: str) -> Health:
    stats, capabilities = await asyncio.gather(client.get_stats(), client.get_capabilities())
    return Health(stats, own_stats(stats, namespace), capabilities)


def own_stats(stats: pb.GetStatsResponse, namespace: str) -> pb.NamespaceStats:
    """The caller's own counters. Only an admin of the service sees several namespaces; another's own may have any name,
    where the gateway has no keys."""
    if len(stats.namespaces) == 1 and not stats.HasField("engine"):
        return stats.namespaces[0]
    return next(
        (each for each in stats.namespaces if each.namespace == namespace), pb.NamespaceStats(namespace=namespace)
    )


@dataclass(frozen=True, slots=True)
class Reuse:
    """The last hour: where turns' memories came from, why less was reused, and where prompts parted from memories."""

    sources: Chart
    misses: Chart
    parted: Sequence[Parted]
    speed: Speed | None


def reuse(history: History, namespace: str, asking: str) -> Reuse:
    """`asking`: the namespace of the caller's key; empty where there are no keys."""
    minutes = history.last_hour(namespace)
    return Reuse(
        chart([minute.sources for minute in minutes], _SOURCES),
        chart([minute.misses for minute in minutes], ()),
        history.parted(asking),
        history.speed(asking),
    )


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """An agent, where its memory lies, and its history."""

    agent: cachestore_pb2.Agent
    usage: cachestore_pb2.GetUsageResponse
    hot: pb.HotMemory | None
    rows: Sequence[tree.Row]
    next_page_token: str
    said: Mapping[int, str]  # by version what was said last


async def agent(caller: CallerAtEngine, agent_id: str, page_token: str) -> AgentSeen:
    """Raises NotFound."""
    client = caller.at(agent_id)
    found, usage, hot, listed = await asyncio.gather(
        client.get_agent(agent_id),
        client.get_usage(agent_id),
        client.list_hot_memories([agent_id]),
        client.list_snapshots(agent_id, page_size=_VERSIONS_A_PAGE, page_token=page_token),
    )
    rows = tree.rows(listed.snapshots, has_older=bool(listed.next_page_token))
    said = await _said_last(caller, listed.snapshots[:_MOST_READ])
    return AgentSeen(found, usage, hot[0] if hot else None, rows, listed.next_page_token, said)


async def _said_last(caller: CallerAtEngine, versions: Sequence[cachestore_pb2.SnapshotVersion]) -> dict[int, str]:
    """The last message of somebody in each version: where branches part, it tells them apart."""
    found = {}
    for each in versions:
        if each.token_count <= _MOST_READ_TOKENS:
            read = await panel(transcript(caller, each.agent_id, (each.kv_identity_hash, each.version)))
            newest_first = reversed(read.value.messages) if read.value else ()
            text = next((said.content[:500] for said in newest_first if said.role == "user"), "")
            found[each.version] = textwrap.shorten(text, _MOST_CHARS, placeholder="…")
    return found
