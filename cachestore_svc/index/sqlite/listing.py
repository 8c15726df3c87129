"""Listings in pages: a token names the last thing told, so a page stays right while others write."""

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Protocol, TypeVar

from kvasir.errors import InvalidArgument

from cachestore_svc.index.sqlite import agents, versions
from cachestore_svc.index.sqlite.blob_rows import find_namespace
from cachestore_svc.index.sqlite.index import Rows
from cachestore_svc.limits import check_range
from cachestore_svc.records import (
    DEFAULT_PAGE_SIZE,
    MAX_PAGE_SIZE,
    MAX_VERSION,
    AgentPage,
    AgentRecord,
    SnapshotPage,
    SnapshotVersion,
)

T = TypeVar("T")
# Agents of one operation of the index: some milliseconds.
_AGENTS_AT_ONCE = 50
# A page ends here too: 4 MiB is what a gRPC peer takes by default.
_PAGE_BYTES = 2 << 20
_FIELD_BYTES = 16
_LINE_BYTES = 512


class Read(Protocol):
    """Runs an operation that reads, in the turn of whoever asks."""

    def __call__(self, work: Callable[[Rows], T]) -> T: ...


def page_size(asked: int) -> int:
    """Things per page; 0 asks for the default. Raises InvalidArgument."""
    check_range("page_size", asked, 0, MAX_PAGE_SIZE)
    return asked or DEFAULT_PAGE_SIZE


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Which agents of a namespace are told: those whose names begin so and that have all these labels."""

    namespace: str
    name_prefix: str
    labels: Mapping[str, str]


def agents_page(read: Read, wanted: AgentFilter, after: str, size: int, default_retained: int) -> AgentPage:
    """Agents whose names follow `after`, in the order of their UTF-8 bytes, read a few at a time: whoever has a
    hundred thousand agents keeps nobody from the index.
    """
    listed: list[AgentRecord] = []
    left_bytes = _PAGE_BYTES
    while True:
        # Few of the agents may have the labels: then a page of one would ask for one agent at a time.
        at_once = _AGENTS_AT_ONCE if wanted.labels else min(size - len(listed) + 1, _AGENTS_AT_ONCE)
        looked_at, found = read(partial(_next_agents, wanted, after, at_once, default_retained))
        for agent in found:
            left_bytes -= _size_bytes(agent)
            # A page has at least one, or it would never end.
            if len(listed) == size or (listed and left_bytes < 0):
                return AgentPage(tuple(listed), page_token(listed[-1].agent_id))
            listed.append(agent)
        if len(looked_at) < at_once:
            return AgentPage(tuple(listed), "")
        after = looked_at[-1]


def _next_agents(
    wanted: AgentFilter, after: str, count: int, default_retained: int, rows: Rows
) -> tuple[list[str], list[AgentRecord]]:
    """So many names that follow, fewer if they are the last; and which of these agents are wanted."""
    found = rows.all(
        f"SELECT {agents.COLUMNS} FROM agents"  # noqa: S608
        " WHERE namespace_id = ? AND name > ? AND name >= ? ORDER BY name LIMIT ?",
        find_namespace(rows, wanted.namespace),
        after,
        wanted.name_prefix,
        count,
    )
    named = [agent for agent in starmap(agents.AgentRow, found) if agent.name.startswith(wanted.name_prefix)]
    labels = wanted.labels.items()
    labelled = (agent for agent in named if not labels or labels <= agents.labels_of(rows, agent.id).items())
    return [agent.name for agent in named], [agents.record(rows, agent, default_retained) for agent in labelled]


def _size_bytes(agent: AgentRecord) -> int:
    """About what an agent takes in a message, a little more rather than less."""
    labels = sum(len(name.encode()) + len(value.encode()) + _FIELD_BYTES for name, value in agent.labels.items())
    lines = sum(len(line.origin_detail.encode()) + len(line.request_id.encode()) for line in agent.lines)
    names = len(agent.agent_id.encode()) * (1 + len(agent.lines))
    return labels + lines + names + _LINE_BYTES * (1 + len(agent.lines))


def snapshots(rows: Rows, namespace: str, agent_id: str, kv_hash: str | None, size: int, token: str) -> SnapshotPage:
    """Versions of an agent's lines, each line newest first, lines by KV identity. Raises NotFound, InvalidArgument."""
    agent = agents.get_agent(rows, find_namespace(rows, namespace), agent_id)
    after_line, before = _snapshot_place(token)
    found: list[SnapshotVersion] = []
    for line in sorted(versions.lines_of(rows, agent.id), key=lambda each: each.kv_identity_hash):
        if line.kv_identity_hash >= after_line and kv_hash in (None, line.kv_identity_hash):
            limit = before if line.kv_identity_hash == after_line else MAX_VERSION
            found += versions.versions_of(rows, line.id, limit, size + 1 - len(found))
    is_more = len(found) > size
    last = found[size - 1] if is_more else None
    return SnapshotPage(tuple(found[:size]), page_token(f"{last.kv_identity_hash}:{last.version}") if last else "")


def _snapshot_place(token: str) -> tuple[str, int]:
    """The line and version after which a page begins."""
    if not token:
        return "", MAX_VERSION
    line, _, version = page_place(token).partition(":")
    if not version.isascii() or not version.isdecimal() or len(version) > 16:
        raise InvalidArgument("page_token: not one of ours", field="page_token")
    return line, int(version)


def page_token(place: str) -> str:
    """A place in a listing, opaque to the caller."""
    return base64.urlsafe_b64encode(place.encode()).decode()


def page_place(token: str) -> str:
    """The place that a token names; "" for the start. Raises InvalidArgument."""
    try:
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidArgument("page_token: not one of ours", field="page_token") from None
