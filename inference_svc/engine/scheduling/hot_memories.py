"""The memories that the engine keeps between turns, and the budget that they share with the running turns. Pure.

To make room, idle memories are dropped. Namespaces that hold more than their share of the budget lose memories first,
and only as many as exceed the share, so that one namespace with many agents does not drop another's few. Then all
namespaces lose some: an idle memory keeps no turn waiting. Within each group memories of background agents go first,
then the order is that of `expected_use`. A memory that a running turn extends is never dropped, and none is dropped if
that would not make enough room.
"""

from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from inference_svc.engine.api import AgentKey, HotMemory, Priority
from inference_svc.engine.scheduling.expected_use import ExpectedUse
from inference_svc.engine.scheduling.memory_ledger import MemoryLedger
from inference_svc.text.sequence_state import SequenceState


class Sized(Protocol):
    """What the budget must know of KV."""

    @property
    def allocated_bytes(self) -> int: ...


KvT = TypeVar("KvT", bound=Sized)


@dataclass
class ResidentMemory(Generic[KvT]):
    """An agent's KV and its tokens. `chain` holds the chain hashes of the full blocks. Only the tag ever changes."""

    kv: KvT
    state: SequenceState
    chain: tuple[str, ...]
    tag: object = None
    priority: Priority = Priority.INTERACTIVE  # of the turn that left it

    @property
    def shareable_tokens(self) -> int:
        return self.state.shareable_tokens


class HotMemories(Generic[KvT]):
    """Memories by key, and the ledger of their bytes and of the running turns'. Only the MLX thread changes it, except
    for tags and expected uses.

    A turn calls `reserve` before it begins. At its end it calls `leave`, which makes its memory the key's, or
    `release`, which leaves the memory that it extended as it was (or gone, after `drop`).
    """

    def __init__(self, budget_bytes: int) -> None:
        self.ledger: MemoryLedger[Hashable, AgentKey] = MemoryLedger(budget_bytes)
        self._memories: dict[AgentKey, ResidentMemory[KvT]] = {}
        self._borrowed: dict[Hashable, AgentKey] = {}
        self._namespaces: dict[Hashable, str | None] = {}  # of those that hold reservations
        self._expected: ExpectedUse[AgentKey] = ExpectedUse()

    @property
    def budget_bytes(self) -> int:
        return self.ledger.total_bytes

    # --- memories ---

    def get(self, key: AgentKey) -> ResidentMemory[KvT] | None:
        return self._memories.get(key)

    def described(self, key: AgentKey) -> HotMemory | None:
        """The key's memory without its KV. From any thread."""
        memory = self._memories.get(key)
        return HotMemory(memory.state, memory.tag) if memory is not None else None

    def expect_use(self, key: AgentKey) -> None:
        """A turn of the key is being planned: drop its memory later than others. From any thread."""
        if key in self._memories:
            self._expected.plans(key)

    def put(self, key: AgentKey, memory: ResidentMemory[KvT]) -> bool:
        """Keep a memory that no turn made (a fork). Drops others to make room; False, and the key keeps its memory, if
        that is not enough.
        """
        before = self.ledger.residents.get(key, 0)
        if self.ledger.is_borrowed(key) or not self._make_room(
            memory.kv.allocated_bytes - before, {key}, key.namespace
        ):
            return False
        self._expected.took_turn(key)
        self._memories[key] = memory
        return self.ledger.keep(key, memory.kv.allocated_bytes)

    def tag(self, key: AgentKey, tag: object) -> None:
        """From any thread. Without effect if there is no memory."""
        memory = self._memories.get(key)
        if memory is not None:
            memory.tag = tag

    def drop(self, key: AgentKey) -> bool:
        """Forget the key's memory; True if there was one. If a running turn extends it, the turn keeps the bytes."""
        self.ledger.drop(key)
        return self._memories.pop(key, None) is not None

    def keys(self) -> set[AgentKey]:
        """Keys that have a memory. From any thread."""
        return set(self._memories)

    def sizes(self) -> dict[AgentKey, int]:
        """Allocated bytes of each memory. From any thread."""
        return {key: memory.kv.allocated_bytes for key, memory in list(self._memories.items())}

    def idle(self, namespace: str) -> list[tuple[AgentKey, str, ResidentMemory[KvT]]]:
        """Memories of a namespace that no running turn extends, in the form that `PrefixSharing` takes."""
        return [
            (key, namespace, memory)
            for key, memory in self._memories.items()
            if key.namespace == namespace and not self.ledger.is_borrowed(key)
        ]

    # --- turns ---

    def reserve(
        self,
        owner: Hashable,
        needed_bytes: int,
        key: AgentKey | None = None,
        *,
        extends: bool = False,
        protected: Collection[Hashable] = (),
        namespace: str | None = None,
    ) -> bool:
        """Hold `needed_bytes` for a turn of `key`, which `extends` the key's hot memory or begins without it. Drops
        idle memories that are not in `protected`, if that makes enough room. False, and nothing changed, if it does
        not.

        `needed_bytes`: the KV of all tokens that the turn may come to have, and the rows that it saves for an undo. A
        turn that would not fit an empty budget holds the whole budget: it runs, alone.
        """
        needed_bytes = min(needed_bytes, self.budget_bytes)
        borrowed = key if extends else None
        kept = {*protected, *([borrowed] if borrowed is not None else [])}
        if not self._make_room(self.ledger.bytes_needed(needed_bytes, borrowed)[1], kept, namespace):
            return False
        self.ledger.reserve(owner, needed_bytes, borrowed)
        self._namespaces[owner] = namespace
        if borrowed is not None and borrowed in self._memories:
            self._borrowed[owner] = borrowed
        return True

    def missing_bytes(
        self,
        needed_bytes: int,
        key: AgentKey | None = None,
        *,
        extends: bool = False,
        protected: Collection[Hashable] = (),
    ) -> int:
        """Bytes that running turns would have to give up for a reservation that `reserve` refused; 0 if it is enough to
        drop idle memories that are not in `protected`.
        """
        borrowed = key if extends else None
        missing = self.ledger.bytes_needed(min(needed_bytes, self.budget_bytes), borrowed)[1]
        droppable = sum(
            size for idle, size in self.ledger.residents.items() if idle != borrowed and idle not in protected
        )
        return max(0, missing - self.ledger.free_bytes - droppable)

    def release(self, owner: Hashable) -> None:
        """The turn ended without a memory, was undone, or was preempted. The memory that it extended is resident again,
        unless it was dropped, or its buffers grew so far that it no longer fits: then it is gone.
        """
        self._forget(owner)
        key = self._borrowed.pop(owner, None)
        if key is not None and (memory := self._memories.get(key)):
            self._keep(key, memory)

    def leave(self, owner: Hashable, key: AgentKey, memory: ResidentMemory[KvT]) -> bool:
        """The turn ended, and `memory` is the key's now. False if it does not fit, because the turn used more than it
        had reserved and no other memory can go: then the key has none.
        """
        self._forget(owner)
        self._borrowed.pop(owner, None)
        self._expected.took_turn(key)
        return self._keep(key, memory)

    def _forget(self, owner: Hashable) -> None:
        self.ledger.release(owner)
        self._namespaces.pop(owner, None)

    def _keep(self, key: AgentKey, memory: ResidentMemory[KvT]) -> bool:
        self.ledger.drop(key)
        size = memory.kv.allocated_bytes
        self._make_room(size, {key}, key.namespace)
        if self.ledger.keep(key, size):
            self._memories[key] = memory
            return True
        self._memories.pop(key, None)
        return False

    def _make_room(self, missing_bytes: int, kept: Collection[Hashable], namespace: str | None) -> bool:
        """Drop idle memories that are not in `kept` until `missing_bytes` are free for a namespace, if that can be."""
        sizes = {key: size for key, size in self.ledger.residents.items() if key not in kept}
        if missing_bytes > self.ledger.free_bytes + sum(sizes.values()):
            return False
        if missing_bytes <= self.ledger.free_bytes:
            return True
        held = self._held()
        held[namespace] += missing_bytes
        share_bytes = self.budget_bytes // len(held)
        others = []
        for key in sorted(sizes, key=self._keeping_order):
            if missing_bytes <= self.ledger.free_bytes:
                break
            if held[key.namespace] > share_bytes:
                held[key.namespace] -= sizes[key]
                self.drop(key)
            else:
                others.append(key)
        for key in others:
            if missing_bytes <= self.ledger.free_bytes:
                break
            self.drop(key)
        return True

    def _held(self) -> Counter[str | None]:
        """Bytes by namespace, of running turns and idle memories."""
        held: Counter[str | None] = Counter()
        for key, size in self.ledger.residents.items():
            held[key.namespace] += size
        for owner, namespace in self._namespaces.items():
            held[namespace] += self.ledger.reserved_by(owner)
        return held

    def _keeping_order(self, key: AgentKey) -> tuple[bool, int]:
        return self._memories[key].priority is Priority.INTERACTIVE, -self._expected.turns_until(key)
