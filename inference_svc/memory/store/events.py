"""The store's events: changes of agents since the engine last knew them."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Collection

from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.formats.digest import Digest

from inference_svc.memory.store.answers import EventCursor, StoreEvent, event_of, moves, takes_back
from inference_svc.memory.store.connection import StoreConnection
from inference_svc.memory.store.patience import Budget


class StoreEvents:
    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection
        self._cursor: cachestore_pb2.EventCursor | None = None

    @property
    def cursor(self) -> EventCursor | None:
        """The place in the store's history up to which events are known; None before the store was ever watched."""
        return None if self._cursor is None else EventCursor(self._cursor.incarnation, self._cursor.sequence)

    async def was_taken_back(self, agent_id: str, since: EventCursor | None) -> bool:
        """Whether a change that is no turn has happened to the agent since, or may have. Raises KvasirError."""
        return await self._has_happened(lambda response: takes_back(response, agent_id), since)

    async def was_changed(self, agent_id: str, since: EventCursor | None, own: Collection[Digest]) -> bool:
        """The same, and whether a turn made a version. Turns that made the manifests `own` do not count."""

        def is_change(response: cachestore_pb2.WatchEventsResponse) -> bool:
            return takes_back(response, agent_id) or moves(response, agent_id, own)

        return await self._has_happened(is_change, since)

    async def was_surely_taken_back(self, budget: Budget, agent_id: str, since: EventCursor | None) -> bool:
        """The same as a part of a turn, where lost events prove nothing. Raises StoreMiss."""

        def is_change(response: cachestore_pb2.WatchEventsResponse) -> bool:
            return response.WhichOneof("event") != "lost" and takes_back(response, agent_id)

        if since is None:
            return False
        return await self._connection.read(lambda: self._has_happened(is_change, since), budget)

    async def newest(self) -> EventCursor:
        """The place of now in the store's history. Raises KvasirError like any call of the store."""
        async with contextlib.aclosing(self._connection.client.watch(None)) as responses:
            latest = await anext(responses, None)
        if latest is None:
            raise errors.Unavailable("the store ended its events", reason="STOPPING", retry_after_s=1.0)
        return EventCursor(latest.cursor.incarnation, latest.cursor.sequence)

    async def _has_happened(
        self, what: Callable[[cachestore_pb2.WatchEventsResponse], bool], since: EventCursor | None
    ) -> bool:
        if since is None:
            return True
        now = await self.newest()
        if now == since:
            return False
        cursor = cachestore_pb2.EventCursor(incarnation=since.incarnation, sequence=since.sequence)
        async with contextlib.aclosing(self._connection.client.watch(cursor)) as responses:
            async for each in responses:
                if what(each):
                    return True
                if each.cursor.sequence >= now.sequence:
                    return False
        raise errors.Unavailable("the store ended its events", reason="STOPPING", retry_after_s=1.0)

    async def was_taken_back_within(self, budget: Budget, agent_id: str, since: EventCursor | None) -> bool:
        """`was_taken_back` as a part of a turn. Raises StoreMiss when the store does not answer within the budget."""
        return await self._connection.read(lambda: self.was_taken_back(agent_id, since), budget)

    async def watch(self) -> AsyncGenerator[StoreEvent, None]:
        async with contextlib.aclosing(self._connection.client.watch(self._cursor)) as responses:
            try:
                async for each in responses:
                    self._cursor = each.cursor
                    if (event := event_of(each)) is not None:
                        yield event
            except errors.Unauthenticated:
                self._connection.breaker.try_again()
                raise
