"""The memories that the engine keeps between turns, and the budget that they and the running turns share. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from inference_svc.plan import HotMemory, SequenceKey, SequenceState


class Sized(Protocol):
    """KV, as far as the budget looks at it."""

    @property
    def allocated_bytes(self) -> int: ...


KvT = TypeVar("KvT", bound=Sized)


@dataclass
class Memory(Generic[KvT]):
    """An agent's KV and what it is of. `chain` holds the chain hashes of the full blocks. Only the tag ever changes."""

    kv: KvT
    state: SequenceState
    chain: tuple[str, ...]
    tag: object = None


class HotMemories(Generic[KvT]):
    """Memories by key, least recently used first to go. Changed on the MLX thread only, but for tags and uses."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._memories: dict[SequenceKey, Memory[KvT]] = {}
        self._uses: dict[SequenceKey, int] = {}
        self._clock = count()

    def get(self, key: SequenceKey) -> Memory[KvT] | None:
        """Counts as a use."""
        memory = self._memories.get(key)
        if memory is not None:
            self._uses[key] = next(self._clock)
        return memory

    def described(self, key: SequenceKey) -> HotMemory | None:
        """Counts as a use. From any thread."""
        memory = self.get(key)
        return None if memory is None else HotMemory(memory.state, memory.tag)

    def put(self, key: SequenceKey, memory: Memory[KvT]) -> None:
        self._memories[key] = memory
        self._uses[key] = next(self._clock)

    def tag(self, key: SequenceKey, tag: object) -> None:
        """From any thread. Without effect if there is no memory."""
        memory = self._memories.get(key)
        if memory is not None:
            memory.tag = tag

    def drop(self, key: SequenceKey) -> bool:
        """Forget it; True if there was one."""
        self._uses.pop(key, None)
        return self._memories.pop(key, None) is not None

    def sizes(self) -> dict[SequenceKey, int]:
        """Allocated bytes of each memory. From any thread; not counted as a use."""
        return {key: memory.kv.allocated_bytes for key, memory in list(self._memories.items())}

    def used_bytes(self, busy: Collection[SequenceKey] = ()) -> int:
        """KV of all memories but those of `busy` keys."""
        return sum(memory.kv.allocated_bytes for key, memory in self._memories.items() if key not in busy)

    def make_room(self, needed_bytes: int, running_bytes: int, busy: Collection[SequenceKey]) -> bool:
        """Whether `needed_bytes` fit beside the running turns. Drops idle memories, least recently used first, but only
        if that makes enough room.
        """
        if running_bytes + needed_bytes > self.budget_bytes:
            return False
        idle = sorted((key for key in self._memories if key not in busy), key=lambda key: self._uses.get(key, 0))
        while idle and running_bytes + needed_bytes + self.used_bytes(busy) > self.budget_bytes:
            self.drop(idle.pop(0))
        return True
