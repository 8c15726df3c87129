"""A memory that is kept for its publication."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Self

from inference_svc.engine.api import Snapshot
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.engine.files.snapshots import when_there
from inference_svc.engine.scheduling.hot_memories import Owed, ResidentMemory
from inference_svc.text.token_ids import SequenceState


class PinnedMemory:
    """A memory as a turn left it, kept for its publication; room is given back by `release`, or as `owed` reports."""

    def __init__(self, pinned: ResidentMemory, post: Callable[[Callable[[EngineWorker], Any]], "Future[Any]"]) -> None:
        self._pinned = pinned
        self._first: Snapshot | None = None
        self._post = post

    def __del__(self) -> None:
        self.release()

    @property
    def state(self) -> SequenceState:
        return self._pinned.state

    def with_first(self, piece: Snapshot) -> Self:
        self._first = piece
        return self

    def take_first(self) -> Snapshot | None:
        first, self._first = self._first, None
        return first

    def goes_as(self, owed: Owed) -> None:
        self._pinned.owed = owed

    def piece(
        self, first_block: int, max_blocks: int, stored_windows: Mapping[int, Collection[int]]
    ) -> "Future[Snapshot | None]":
        """As `EngineMemories.pin` takes the first one. None if the room was wanted, or given back."""
        pinned = self._pinned
        wanted = first_block, max_blocks, stored_windows
        return when_there(lambda: self._post(lambda worker: worker.leaving.pinned_piece(pinned, *wanted)))

    def release(self) -> None:
        pinned = self._pinned
        self._post(lambda worker: worker.memories.outgoing.unpin(pinned))
