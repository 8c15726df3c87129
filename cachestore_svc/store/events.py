"""Events of a namespace, for readers that keep a cursor."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from cachestore_svc.core.core import Core
from cachestore_svc.facts.limits import check_range
from cachestore_svc.facts.records import MAX_PAGE_SIZE, EventBatch, EventCursor


class Events:
    def __init__(self, core: Core) -> None:
        self._core = core

    def after(self, namespace: str, cursor: EventCursor | None, limit: int = 1000) -> EventBatch:
        """Events after a cursor; None means "from now on" and answers the cursor of now. Raises InvalidArgument."""
        check_range("limit", limit, 1, MAX_PAGE_SIZE)
        kept = self._core.config.event_history
        return self._core.read(namespace, lambda view: view.events_after(kept, cursor, limit))

    def watching(self, namespace: str, callback: Callable[[], object]) -> AbstractContextManager[None]:
        """For this time `callback` is called on a store's thread after commits with events of the namespace, and where
        there may be some.
        """
        return self._core.watchers.watching((namespace,), callback)
