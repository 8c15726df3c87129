"""Copies of KV that the MLX thread makes: of running turns, of memories, and of pinned ones."""

from collections.abc import Collection, Iterable, Mapping

from kvasir.formats.block_file import FileBytes

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.engine.files.snapshots import PendingFiles, blocks_alone, memory_snapshot, running_snapshot
from inference_svc.engine.scheduling.hot_memories import HotMemories, ResidentMemory
from inference_svc.engine.scheduling.schedulable import Status
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.pages.pool import KvPool
from inference_svc.model.model_info import ModelInfo


class LeavingFiles:
    """Files of one engine's KV, and forks of its memories. On the MLX thread."""

    def __init__(
        self, model: ModelInfo, pool: KvPool, memories: HotMemories, turns: Iterable[Sequence], batch: DecodeBatch
    ) -> None:
        """`turns`: all that are not over. `batch`: that of the turns that decode, which may hold their newest rows."""
        self._model = model
        self._pool = pool
        self._memories = memories
        self._turns = turns
        self._batch = batch

    @property
    def is_copied_by_threads(self) -> bool:
        """Whether copies take the MLX thread no time. From any thread."""
        return self._pool.is_copied_by_threads

    def full_blocks(
        self, sequence: Sequence, first_block: int, max_blocks: int
    ) -> PendingFiles[tuple[FileBytes, ...]] | None:
        found = self._full_blocks(sequence, first_block, max_blocks)
        if found is None:
            return None
        return found.made_into(lambda snapshot: tuple(data for _, data in snapshot.blocks))

    def running_blocks(self, key: AgentKey, first_block: int, max_blocks: int | None) -> PendingFiles[Snapshot] | None:
        """Full blocks from `first_block` on, at most `max_blocks`, of the key's running turn or else of its memory."""
        sequence = begun_turn(self._turns, key)
        if sequence is not None:
            return self._full_blocks(sequence, first_block, max_blocks)
        whole = memory_snapshot(self._memories.get(key), self._model, first_block, max_blocks)
        return whole and whole.made_into(blocks_alone)

    def _full_blocks(
        self, sequence: Sequence, first_block: int, max_blocks: int | None
    ) -> PendingFiles[Snapshot] | None:
        if sequence.kv is None:
            return None  # it was preempted, or its KV is on its way: the memory holds other blocks than the turn's
        self._batch.flush(sequence.kv)
        return running_snapshot(sequence, self._model, first_block, max_blocks)

    def pin(
        self, key: AgentKey, first_block: int, max_blocks: int, stored_windows: Mapping[int, Collection[int]]
    ) -> tuple[ResidentMemory, PendingFiles[Snapshot]] | None:
        first = memory_snapshot(self._memories.get(key), self._model, first_block, max_blocks, stored_windows)
        pinned = self._memories.outgoing.pin(key)
        return None if pinned is None or first is None else (pinned, first)

    def pinned_piece(
        self, pinned: ResidentMemory, first_block: int, max_blocks: int, stored_windows: Mapping[int, Collection[int]]
    ) -> PendingFiles[Snapshot] | None:
        found = pinned if self._memories.outgoing.is_pinned(pinned) else None
        return memory_snapshot(found, self._model, first_block, max_blocks, stored_windows)

    def fork(self, source: AgentKey, target: AgentKey, tag: object = None) -> bool:
        """Give `target` the memory of `source` without its tag, which is one agent's. False if there is none, or if it
        has another tag than this one."""
        memory = self._memories.get(source)
        if memory is None or begun_turn(self._turns, target) is not None:
            return False
        if tag is not None and memory.tag is not tag:
            return False
        self._memories.put(target, ResidentMemory(memory.kv.fork(), memory.state, memory.chain))
        return True


def begun_turn(turns: Iterable[Sequence], key: AgentKey) -> Sequence | None:
    """The key's turn that has begun and is not over. It may be preempted."""
    of_key = (each for each in turns if each.agent_key == key and each.plan.is_remembered)
    return next((each for each in of_key if each.status is not Status.WAITING), None)
