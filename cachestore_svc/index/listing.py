"""Listings in pages: a token names the last entry of its page and its filter, so it is right while others write."""

import base64
import binascii
import json
from collections.abc import Sequence
from functools import partial

from blake3 import blake3
from kvasir.errors import InvalidArgument

from cachestore_svc.facts import records
from cachestore_svc.facts.limits import check_text
from cachestore_svc.index.catalog import Catalog, CatalogView
from cachestore_svc.index.values import AgentFilter

_AGENTS_AT_ONCE = 128  # agents of one operation of the index: some milliseconds, and a usual page
_PAGE_BYTES = 2 << 20  # A page ends here too: 4 MiB is what a gRPC peer takes by default
_FIELD_BYTES = 16
_MARK_BYTES = 8
_LINE_BYTES = 512


def page_size(asked: int) -> int:
    """Things per page; 0 means the default, and more than the most means the most. Raises InvalidArgument."""
    if asked < 0:
        raise InvalidArgument.of("page_size", f"expected 0 or more, got {asked}")
    return min(asked or records.DEFAULT_PAGE_SIZE, records.MAX_PAGE_SIZE)


def agents_page(
    catalog: Catalog, namespace: str, wanted: AgentFilter, size: int, token: str, default_retained: int
) -> records.AgentPage:
    """Agents behind the token's place, by their UTF-8 bytes (those of a sealed namespace in an order of its own), read
    a few at a time: no other operation waits long."""
    listing = (wanted.name_prefix, *(text for label in sorted(wanted.labels.items()) for text in label))
    after = page_place(token, listing)
    listed: list[records.AgentRecord] = []
    left_bytes = _PAGE_BYTES
    while True:
        # Few of the agents may be wanted: then a page of one would read one agent at a time.
        at_once = (
            _AGENTS_AT_ONCE if wanted.labels or wanted.name_prefix else min(size - len(listed) + 1, _AGENTS_AT_ONCE)
        )
        looked_at, found = catalog.read(namespace, partial(_agents_after, wanted, after, at_once, default_retained))
        for agent in found:
            left_bytes -= _size_bytes(agent)
            # A page has at least one, or it would never end.
            if len(listed) == size or (listed and left_bytes < 0):
                return records.AgentPage(tuple(listed), page_token(listed[-1].agent_id, listing))
            listed.append(agent)
        if len(looked_at) < at_once:
            return records.AgentPage(tuple(listed), "")
        after = looked_at[-1]


def _agents_after(
    wanted: AgentFilter, after: str, count: int, default_retained: int, view: CatalogView
) -> tuple[list[str], list[records.AgentRecord]]:
    return view.agents_after(wanted, after, count, default_retained)


def _size_bytes(agent: records.AgentRecord) -> int:
    """About what an agent takes in a message, a little more rather than less."""
    labels = sum(len(name.encode()) + len(value.encode()) + _FIELD_BYTES for name, value in agent.labels.items())
    lines = sum(len(line.origin_detail.encode()) + len(line.request_id.encode()) for line in agent.lines)
    names = len(agent.agent_id.encode()) * (1 + len(agent.lines))
    return labels + lines + names + _LINE_BYTES * (1 + len(agent.lines))


def snapshots_page(view: CatalogView, query: records.LineQuery, size: int, token: str) -> records.SnapshotPage:
    listing = (query.agent_id, query.kv_identity_hash or "")
    after_line, before = _snapshot_place(token, listing)
    found = view.snapshots_after(query, before, after_line, size + 1)
    last = found[size - 1] if len(found) > size else None
    place = page_token(f"{last.kv_identity_hash}:{last.version}", listing) if last else ""
    return records.SnapshotPage(tuple(found[:size]), place)


def _snapshot_place(token: str, listing: Sequence[str]) -> tuple[str, int]:
    if not token:
        return "", records.MAX_VERSION
    line, _, version = page_place(token, listing).partition(":")
    if not version.isascii() or not version.isdecimal() or len(version) > 16:
        raise InvalidArgument.of("page_token", "not one of ours")
    return line, int(version)


def page_token(place: str, listing: Sequence[str]) -> str:
    """A place in a listing, opaque to the caller. `listing`: the filter of the listing."""
    return base64.urlsafe_b64encode(_mark(listing) + place.encode()).decode()


def page_place(token: str, listing: Sequence[str]) -> str:
    """The place that a token names; "" for the start. Raises InvalidArgument for another listing's."""
    if not token:
        return ""
    try:
        named = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        mark, place = named[:_MARK_BYTES], named[_MARK_BYTES:].decode()
    except (binascii.Error, ValueError):
        raise InvalidArgument.of("page_token", "not one of ours") from None
    check_text(place, "page_token")
    if mark != _mark(listing):
        raise InvalidArgument.of("page_token", "it belongs to another listing; begin without one")
    return place


def _mark(listing: Sequence[str]) -> bytes:
    return blake3(json.dumps(list(listing)).encode()).digest(_MARK_BYTES)
