"""What agents remember in the engine: their KV between turns, and its copies for others.

All methods may be called from any thread, do not block, and touch no tensor.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Self, TypeVar

from inference_svc.engine.api import AgentKey, HotMemory, Snapshot
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.engine.files.snapshots import PendingFiles, memory_snapshot, when_there
from inference_svc.engine.mlx_thread import Letter, MlxThread
from inference_svc.engine.scheduling.hot_memories import Owed, ResidentMemory
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.sequence_state import SequenceState

ResultT = TypeVar("ResultT")


class PinnedMemory:
    """A memory as a turn left it, kept for its publication whatever its agent does next. Its room is given back by
    `release`, or once nobody refers to it; under pressure it goes as `owed` says.
    """

    def __init__(
        self,
        pinned: ResidentMemory,
        post: Callable[[Callable[[EngineWorker], Any]], "Future[Any]"],
    ) -> None:
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
        """The piece that was copied with the pin, once."""
        first, self._first = self._first, None
        return first

    def goes_as(self, owed: Owed) -> None:
        self._pinned.owed = owed

    def piece(
        self,
        first_block: int,
        max_blocks: int,
        stored_windows: Mapping[int, Collection[int]],
    ) -> "Future[Snapshot | None]":
        """As `EngineMemories.pin` takes the first one. None if the room was wanted, or given back."""
        pinned = self._pinned
        wanted = first_block, max_blocks, stored_windows
        return when_there(lambda: self._post(lambda worker: worker.leaving.pinned_piece(pinned, *wanted)))

    def release(self) -> None:
        """Idempotent."""
        pinned = self._pinned
        self._post(lambda worker: worker.memories.unpin(pinned))


class EngineMemories:
    """The hot memories of one engine."""

    def __init__(self, thread: MlxThread[EngineWorker], worker: EngineWorker, model: ModelInfo) -> None:
        self._thread = thread
        self._worker = worker
        self._model = model

    @property
    def is_copied_by_threads(self) -> bool:
        """Whether threads copy KV from the device, so that a copy may be large."""
        return self._worker.leaving.is_copied_by_threads

    def sizes(self) -> dict[AgentKey, int]:
        """Allocated KV bytes of each, also of those that running turns extend."""
        return self._worker.memories.sizes()

    def agents(self) -> set[AgentKey]:
        """Agents that have one. Cheaper than `sizes`."""
        return self._worker.memories.keys()

    def get(self, key: AgentKey) -> HotMemory | None:
        """The key's memory as of its last whole turn. Counts as a use: it is evicted later."""
        self._worker.memories.expect_use(key)
        memory = self._worker.memories.get(key)
        return HotMemory(memory.state, memory.tag) if memory is not None else None

    def tag_of(self, key: AgentKey) -> object:
        """The tag of the key's hot memory; None if there is no memory. Does not count as a use."""
        memory = self._worker.memories.get(key)
        return memory.tag if memory is not None else None

    def tag(self, key: AgentKey, tag: object, owed: Owed | None = None) -> None:
        """Attach an object to the key's hot memory: say, the store version that equals it. A turn that changes the
        memory removes the tag. `owed`: its way to the store. Without effect if there is no memory.
        """
        if (memory := self._worker.memories.get(key)) is not None:
            memory.tag, memory.owed = tag, owed

    def drop(self, key: AgentKey) -> "Future[bool]":
        """Forget the key's memory, once no turn of the key runs; True if there was one."""
        return self._when_idle(key, lambda worker: worker.memories.drop(key))

    def fork(self, source: AgentKey, target: AgentKey) -> "Future[bool]":
        """Give `target` the memory of `source`, but not its tag, without copying rows until one of them writes. Waits
        until no turn of `source` runs. False if there is none.
        """
        return self._when_idle(source, lambda worker: worker.fork(source, target))

    def snapshot(
        self,
        key: AgentKey,
        first_block: int,
        *,
        blocks_only: bool = False,
        max_blocks: int | None = None,
        stored_windows: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> "Future[Snapshot | None]":
        """Tensor files of the key's memory from block `first_block` on; None if there is no memory. Waits until no turn
        of the key runs.

        `max_blocks`: at most so many, and the tail only with the memory's last block. `stored_windows`: by window,
        blocks of these tokens that the caller has. `blocks_only`: full blocks alone, at once, of the running turn if
        there is one. Bytes are copies: later turns do not change them. Rows from a turn's `cached_tokens` on may differ
        from those before it, even for equal tokens: publish from block `cached_tokens // 256`.
        """

        def whole(worker: EngineWorker) -> PendingFiles[Snapshot] | None:
            return memory_snapshot(worker.memories.get(key), self._model, first_block, max_blocks, stored_windows)

        if blocks_only:
            return when_there(
                lambda: self._thread.post(lambda worker: worker.leaving.running_blocks(key, first_block, max_blocks))
            )
        return when_there(lambda: self._when_idle(key, whole))

    def pin(
        self,
        key: AgentKey,
        first_block: int,
        max_blocks: int,
        stored_windows: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> "Future[PinnedMemory | None]":
        """Keep the key's memory as its last turn left it, and take its first piece: at most `max_blocks` from
        `first_block` on. The tail, windows and states come with the last block. None if there is no memory.
        `stored_windows`: by window, blocks of these tokens that the caller has. A turn that is submitted later changes
        nothing of it.
        """

        def pinned(worker: EngineWorker) -> PendingFiles[PinnedMemory] | None:
            taken = worker.leaving.pin(key, first_block, max_blocks, stored_windows)
            return None if taken is None else taken[1].made_into(PinnedMemory(taken[0], self._thread.post).with_first)

        return when_there(lambda: self._thread.post(pinned))

    def _when_idle(self, key: AgentKey, work: Callable[[EngineWorker], ResultT]) -> "Future[ResultT]":
        letter = Letter(work, Future())
        posted = self._thread.post(lambda worker: worker.when_idle(key, lambda: letter.deliver(worker)))
        posted.add_done_callback(lambda done: letter.result.cancel() if done.cancelled() else None)
        return letter.result


def nothing(_worker: EngineWorker) -> None:
    """A letter that only wakes the thread."""
