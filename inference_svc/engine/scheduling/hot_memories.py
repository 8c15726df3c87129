"""The memories that the engine keeps between turns, and the budget that they and the running turns share. Pure.

What is dropped for room: first memories of namespaces that hold more than their share of the budget, and only as many
as are above it, so that one namespace's crowd does not drop another's few; of these, and then of all, memories of
background agents first, then by `expected_use`. Never one that a running turn extends, and nothing if it would not make
enough room. Idle memories keep no turn waiting: when nobody with more than its share has any, the others' go.
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
    """KV, as far as the budget looks at it."""

    @property
    def allocated_bytes(self) -> int: ...


KvT = TypeVar("KvT", bound=Sized)


@dataclass
class ResidentMemory(Generic[KvT]):
    """An agent's KV and what it is of. `chain` holds the chain hashes of the full blocks. Only the tag ever changes."""

    kv: KvT
    state: SequenceState
    chain: tuple[str, ...]
    tag: object = None
    priority: Priority = Priority.INTERACTIVE  # of the turn that left it

    @property
    def shareable_tokens(self) -> int:
        return self.state.shareable_tokens


class HotMemories(Generic[KvT]):
    """Memories by key, and the ledger of their bytes and the running turns'. Changed on the MLX thread only, but for
    tags and uses.

    A turn's way through it: `reserve` before it begins; then `leave` (its memory is the key's now) or `release` (what
    it extended is as it was before; after `drop` of it, gone).
    """

    def __init__(self, budget_bytes: int) -> None:
        self.ledger: MemoryLedger[Hashable, AgentKey] = MemoryLedger(budget_bytes)
        self._memories: dict[AgentKey, ResidentMemory[KvT]] = {}
        self._lent: dict[Hashable, AgentKey] = {}
        self._namespaces: dict[Hashable, str | None] = {}  # of those that hold reservations
        self._expected: ExpectedUse[AgentKey] = ExpectedUse()

    @property
    def budget_bytes(self) -> int:
        return self.ledger.total_bytes

    # --- memories ---

    def get(self, key: AgentKey) -> ResidentMemory[KvT] | None:
        return self._memories.get(key)

    def described(self, key: AgentKey) -> HotMemory | None:
        """For planning a turn of the key: the memory is about to be used, and is dropped later than others. From any
        thread.
        """
        memory = self._memories.get(key)
        if memory is None:
            return None
        self._expected.plans(key)
        return HotMemory(memory.state, memory.tag)

    def put(self, key: AgentKey, memory: ResidentMemory[KvT]) -> bool:
        """The key's memory, made outside a turn (a fork). Makes room for it; False, and the key keeps what it had, if
        there is none.
        """
        before = self.ledger.residents.get(key, 0)
        if self.ledger.is_lent(key) or not self._make_room(memory.kv.allocated_bytes - before, {key}, key.namespace):
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
        """Forget it; True if there was one. The bytes of one that a running turn extends stay with the turn."""
        self.ledger.drop(key)
        return self._memories.pop(key, None) is not None

    def keys(self) -> set[AgentKey]:
        """Whose memories there are. From any thread; not counted as a use."""
        return set(self._memories)

    def sizes(self) -> dict[AgentKey, int]:
        """Allocated bytes of each memory. From any thread; not counted as a use."""
        return {key: memory.kv.allocated_bytes for key, memory in list(self._memories.items())}

    def idle(self, namespace: str) -> list[tuple[AgentKey, str, ResidentMemory[KvT]]]:
        """Memories of a namespace that no running turn extends, as `PrefixGate.donor_of` takes them."""
        return [
            (key, namespace, memory)
            for key, memory in self._memories.items()
            if key.namespace == namespace and not self.ledger.is_lent(key)
        ]

    # --- turns ---

    def reserve(
        self,
        owner: Hashable,
        needed_bytes: int,
        key: AgentKey | None = None,
        *,
        extends: bool = False,
        spare: Collection[Hashable] = (),
        namespace: str | None = None,
    ) -> bool:
        """Hold `needed_bytes` for a turn of `key`, which `extends` the key's hot memory or begins without it. Drops
        idle memories, except those of `spare`, if that makes enough room. False, and nothing changed, if it does not.

        `needed_bytes`: the KV of all tokens that it may come to have, and what its plan holds besides (restored blobs,
        saved rows). What would not fit an empty budget is held as if it just did: the turn runs, alone.
        """
        needed_bytes = min(needed_bytes, self.budget_bytes)
        lent = key if extends else None
        kept = {*spare, *([lent] if lent is not None else [])}
        if not self._make_room(self.ledger.charge(needed_bytes, lent)[1], kept, namespace):
            return False
        self.ledger.reserve(owner, needed_bytes, lent)
        self._namespaces[owner] = namespace
        if lent is not None and lent in self._memories:
            self._lent[owner] = lent
        return True

    def missing_bytes(
        self,
        needed_bytes: int,
        key: AgentKey | None = None,
        *,
        extends: bool = False,
        spare: Collection[Hashable] = (),
    ) -> int:
        """What running turns would have to give up for a reservation that `reserve` refused; 0 if dropping idle
        memories, but those of `spare`, is enough.
        """
        lent = key if extends else None
        missing = self.ledger.charge(min(needed_bytes, self.budget_bytes), lent)[1]
        droppable = sum(size for idle, size in self.ledger.residents.items() if idle != lent and idle not in spare)
        return max(0, missing - self.ledger.free_bytes - droppable)

    def resize(self, owner: Hashable, needed_bytes: int) -> bool:
        """Hold more or less for a turn that runs: less once its plan's blobs are gone, more if there is room or
        dropping idle memories makes it. False, and nothing changed, if there is none.
        """
        more = needed_bytes - self.ledger.reserved_by(owner)
        return self._make_room(more, (), self._namespaces.get(owner)) and self.ledger.resize(owner, needed_bytes)

    def release(self, owner: Hashable) -> None:
        """The turn ended without a memory, was undone, or gave up its rows. What it extended is resident again, unless
        it was dropped or its buffers grew so far that it does not fit any more: then it is gone.
        """
        self._forget(owner)
        key = self._lent.pop(owner, None)
        if key is not None and (memory := self._memories.get(key)):
            self._keep(key, memory)

    def leave(self, owner: Hashable, key: AgentKey, memory: ResidentMemory[KvT]) -> bool:
        """The turn ended, and `memory` is the key's now. False if it does not fit (the turn used more than it had
        reserved, and nothing else can go): then the key has none.
        """
        self._forget(owner)
        self._lent.pop(owner, None)
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
        """Drop idle memories but those of `kept` until `missing_bytes` are free for a namespace, if that can be."""
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
