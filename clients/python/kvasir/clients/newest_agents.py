"""The agents of a prefix that were stored last, and the others a few at a time, however many there are."""

from collections.abc import Iterator
from heapq import nlargest

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients.blocking_clients import StoreClient

FORGOTTEN_AT_ONCE = 16  # of the older ones


def newest_agents(store: StoreClient, prefix: str, most: int) -> tuple[list[pb.Agent], Iterator[str]]:
    """The newest first, at most so many; and the names of older ones, which are read later, page by page. Both raise a
    KvasirError.
    """
    newest = nlargest(most, store.every_agent(name_prefix=prefix), key=_place)
    return newest, _older(store, prefix, newest[-1]) if len(newest) == most else iter(())


def _older(store: StoreClient, prefix: str, than: pb.Agent) -> Iterator[str]:
    yield from (each.agent_id for each in store.every_agent(name_prefix=prefix) if _place(each) < _place(than))


def stored_unix_ms(agent: pb.Agent) -> int:
    """When its newest version was made, by the store's clock."""
    return int(max((line.created_at.ToMilliseconds() for line in agent.lines), default=0))


def _place(agent: pb.Agent) -> tuple[int, str]:
    return stored_unix_ms(agent), agent.agent_id
