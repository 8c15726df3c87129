"""The memories that the engine keeps between turns, and the budget that they share with the running turns. Pure.

To make room, idle memories are dropped. Namespaces that hold more than their share of the budget lose memories first,
and only as many as exceed the share, so that one namespace with many agents does not drop another's few. Then all
namespaces lose some: an idle memory keeps no turn waiting. Within each group memories of background agents go first,
then the order is that of `ExpectedUse`. Memories share pages: dropping one frees only what nobody else holds. A memory
that a running turn extends is not dropped, and none is dropped if that would not make enough room.

The prefix that a cancelled turn had prefilled stays for turns of its namespace that begin alike. It goes before all
memories, and with the agent's next memory. Unstored memories go last, and not at all while they are on their way to the
store (`Owed`). A memory that is being stored is pinned besides, so that its publication sends it unchanged while its
agent goes on.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.engine.api import AgentKey, Priority
from inference_svc.engine.scheduling.memory_ledger import MemoryLedger, Reservation
from inference_svc.kv.pages.page_allocator import PageAllocator
from inference_svc.text.token_ids import SequenceState

if TYPE_CHECKING:  # so that the budget is tested where there is no MLX
    from inference_svc.kv.sequence_kv import SequenceKV

_REMEMBERED = 4_096  # agents whose rhythm is known, with and without a memory
_PLANNED_TURNS = 16  # a plan that read a memory is submitted within so many turns of others, or never


class Owed(Protocol):
    """What is known of a memory's way to the store. The MLX thread asks."""

    @property
    def is_safe(self) -> bool:
        """The store has the memory."""
        ...

    @property
    def is_owed(self) -> bool:
        """The store lacks the memory, and may still get it."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whoever wants its room must wait: it is being sent, or is tried once more before it goes."""
        ...

    def want(self) -> None:
        """Somebody waits for its room."""


@dataclass(eq=False)
class ResidentMemory:
    """An agent's KV and its tokens, the last of which may have none. `chain` holds the chain hashes of the full blocks.
    Only `tag` and `owed` change.
    """

    kv: "SequenceKV"
    state: SequenceState
    chain: tuple[str, ...]
    tag: object = None
    priority: Priority = Priority.INTERACTIVE  # of the turn that left it
    owed: Owed | None = None  # None: nothing is known of it

    def __post_init__(self) -> None:
        # Counted once: other threads ask while pages may be given back.
        self.page_count, self.state_bytes = sum(1 for _ in self.kv.pages), self.kv.state_bytes


@dataclass(eq=False)
class BegunPrefix(ResidentMemory):
    """What a cancelled turn had prefilled. All of it serves whoever goes on from `memory`, its begin any turn."""

    memory: ResidentMemory | None = None


@dataclass
class _Rhythm:
    last: int  # turn number of the agent's last turn
    interval: int | None = None  # turns between its last two
    planned: int | None = None  # turn number at which its next turn was planned


class ExpectedUse:
    """Which hot memory to drop first: the one whose agent is expected last.

    The time is counted in turns of all agents. An agent is expected again after as many turns as lay between its last
    two. An agent that had one turn only, or that is overdue, is expected after as many turns as it has been silent. So
    among strangers the least recently used memory goes first. Of agents that take turns in a ring too large for the
    budget, the agent that has just had its turn goes and the others stay: least recently used would drop each memory
    just before its turn, and no agent would ever find its own (LESSONS 27).
    """

    def __init__(self) -> None:
        self._now = 0
        self._rhythms: dict[AgentKey, _Rhythm] = {}  # last turn first to go

    def took_turn(self, key: AgentKey) -> None:
        self._now += 1
        before = self._rhythms.pop(key, None)
        self._rhythms[key] = _Rhythm(self._now, None if before is None else self._now - before.last)
        if len(self._rhythms) > _REMEMBERED:
            del self._rhythms[next(iter(self._rhythms))]

    def plans(self, key: AgentKey) -> None:
        """A turn of the agent is being planned: its memory is about to be used."""
        if rhythm := self._rhythms.get(key):
            rhythm.planned = self._now

    def turns_until(self, key: AgentKey) -> int:
        """After how many turns of all agents this agent is expected. An unknown agent is expected last."""
        rhythm = self._rhythms.get(key)
        if rhythm is None:
            return self._now + 1
        if rhythm.planned is not None and self._now - rhythm.planned < _PLANNED_TURNS:
            return -1
        silent = self._now - rhythm.last
        if rhythm.interval is not None and silent <= rhythm.interval:
            return rhythm.interval - silent
        return silent


class OutgoingMemories:
    """Memories on their way to the store: pinned as they were, or hot, and not to be dropped before they are there."""

    def __init__(self, memories: Mapping[AgentKey, ResidentMemory], ledger: MemoryLedger) -> None:
        self.pinned: list[ResidentMemory] = []
        self.awaited: list[ResidentMemory] = []  # memories and pins that do not go now
        self._memories = memories
        self._ledger = ledger

    @property
    def droppable(self) -> list[ResidentMemory]:
        return [each for each in self.pinned if each.owed is not None and each not in self.awaited]

    def pin(self, key: AgentKey) -> ResidentMemory | None:
        """Keep the key's memory as it is now, whatever becomes of it, until `unpin`; None if there is none. Its pages
        are shared. A pin without `owed` is not dropped for room.
        """
        if (memory := self._memories.get(key)) is None:
            return None
        pinned = ResidentMemory(memory.kv.fork(), memory.state, memory.chain)
        self.pinned.append(pinned)
        self._ledger.resident_state_bytes += pinned.state_bytes
        return pinned

    def is_pinned(self, memory: ResidentMemory) -> bool:
        """Whether the pin is still there; its room may have been wanted."""
        return memory in self.pinned

    def unpin(self, memory: ResidentMemory) -> None:
        """Idempotent."""
        if memory in self.pinned:
            self.pinned.remove(memory)
            memory.kv.release()
            self._ledger.resident_state_bytes -= memory.state_bytes

    def look_at_owed(self) -> None:
        """Note what is on its way to the store now, for all questions until the next call."""
        self.awaited = [
            each
            for each in (*self._memories.values(), *self.pinned)
            if (each.owed is not None and each.owed.is_awaited)
        ]

    def want_room(self) -> None:
        """Turns wait for room: what is awaited shall hurry."""
        for memory in self.awaited:
            if memory.owed is not None:
                memory.owed.want()


class BegunPrefixes:
    """Prefixes, without states, that cancelled turns had prefilled: the last of each agent, and one of each prompt that
    had none. They serve turns of their namespaces that begin alike, until a memory needs the room.
    """

    def __init__(self, ledger: MemoryLedger) -> None:
        self._prefixes: dict[AgentKey, BegunPrefix] = {}  # the oldest first
        self._ledger = ledger

    @property
    def all(self) -> list[BegunPrefix]:
        return [*self._prefixes.values()]

    def of_namespace(self, namespace: str | None) -> list[BegunPrefix]:
        return [prefix for key, prefix in self._prefixes.items() if key.namespace == namespace]

    def behind(self, memory: ResidentMemory | None) -> BegunPrefix | None:
        """What a turn had prefilled behind all of this memory."""
        found = (prefix for prefix in self._prefixes.values() if prefix.memory is memory)
        return next(found, None) if memory is not None else None

    def keep(self, namespace: str, agent: AgentKey | None, prefix: BegunPrefix) -> None:
        """Instead of the agent's last one, and of those within what it shares."""
        shared = prefix.chain[: prefix.state.shareable_tokens // BLOCK_TOKENS]
        for key, other in [*self._prefixes.items()]:
            is_within = other.chain == shared[: len(other.chain)]
            if key == agent or (key.namespace == namespace and is_within):
                self.drop(key)
        self._prefixes[agent or AgentKey(namespace, prefix.chain[-1])] = prefix

    def drop(self, of: AgentKey | str | ResidentMemory) -> None:
        """Those of an agent, or of a namespace, or behind a memory."""
        for key in [key for key, each in self._prefixes.items() if of in (key, key.namespace, each.memory)]:
            self._prefixes.pop(key).kv.release()

    def make_room(self, needed_bytes: int | None = None) -> None:
        """Drop prefixes until so many bytes are free, or all."""
        for key in [*self._prefixes]:
            if needed_bytes is None or needed_bytes > self._ledger.free_bytes:
                self.drop(key)

    def freed_bytes(self, tables: list[list[int]]) -> int:
        """Bytes that become free with these page lists, after the prefixes, which share them."""
        begun = [list(prefix.kv.pages) for prefix in self.all]
        return self._ledger.freed_bytes([*begun, *tables]) - self._ledger.freed_bytes(begun)


class HotMemories:
    """Memories by key, and the ledger of their bytes and of the running turns'. Only the MLX thread changes it, except
    for expected uses and memories' tags.

    A turn calls `reserve` before it takes a page. At its end its reservation is released, after `put` if it leaves a
    memory.
    """

    def __init__(self, pages: PageAllocator, page_bytes: int, budget_bytes: int) -> None:
        self.ledger = MemoryLedger(pages, page_bytes, budget_bytes)
        self._memories: dict[AgentKey, ResidentMemory] = {}
        self.outgoing = OutgoingMemories(self._memories, self.ledger)
        self.begun = BegunPrefixes(self.ledger)
        self._expected = ExpectedUse()

    # --- memories ---

    def get(self, key: AgentKey | None) -> ResidentMemory | None:
        """From any thread, for all but its KV."""
        return None if key is None else self._memories.get(key)

    def expect_use(self, key: AgentKey) -> None:
        """A turn of the key is being planned: drop its memory later than others. From any thread."""
        if key in self._memories:
            self._expected.plans(key)

    def put(self, key: AgentKey, memory: ResidentMemory) -> None:
        self.drop(key)
        self.begun.drop(key)
        self._expected.took_turn(key)
        self._memories[key] = memory
        self.ledger.resident_state_bytes += memory.state_bytes

    def drop(self, key: AgentKey) -> bool:
        """Forget the key's memory; True if there was one."""
        memory = self._memories.pop(key, None)
        if memory is None:
            return False
        self.begun.drop(memory)
        memory.kv.release()
        self.ledger.resident_state_bytes -= memory.state_bytes
        return True

    @property
    def _all(self) -> list[ResidentMemory]:
        return [*self._memories.values(), *self.outgoing.pinned, *self.begun.all]

    @property
    def pages(self) -> set[int]:
        return {page for memory in self._all for page in memory.kv.pages}

    def sizes(self) -> dict[AgentKey, int]:
        """Bytes of each memory, with what it shares. From any thread."""
        return {key: self._size(memory) for key, memory in list(self._memories.items())}

    def of_namespace(self, namespace: str | None) -> list[ResidentMemory]:
        """Also the prefixes of its cancelled turns."""
        found = [memory for key, memory in self._memories.items() if key.namespace == namespace]
        return found + self.begun.of_namespace(namespace)

    def stored_keys(self) -> list[AgentKey]:
        """Keys of idle memories that the store has, in the order in which memories are dropped."""
        self.outgoing.look_at_owed()
        owed = {key: self._memories[key].owed for key in self._droppable(())}
        return [key for key, each in owed.items() if each is not None and each.is_safe]

    # --- turns ---

    def reserve(self, reservation: Reservation, protected: Collection[Hashable] | None = ()) -> bool:
        """Hold the reservation, before any page of it is taken. Drops idle memories that are not in `protected`, if
        that makes enough room; None: also memories that running turns extend. False, and nothing changed, if it does
        not.
        """
        needed_bytes = self.ledger.promised_to(reservation)
        if self.missing_bytes(needed_bytes, protected):
            return False
        if needed_bytes > self.ledger.free_bytes:
            self._make_room(needed_bytes, protected, reservation.namespace)
        self.ledger.reservations.append(reservation)
        return True

    def missing_bytes(self, needed_bytes: int, protected: Collection[Hashable] | None = ()) -> int:
        """Bytes that running turns would have to give up for a reservation of so many bytes; 0 if it is enough to drop
        idle memories, as `reserve` does.
        """
        missing = needed_bytes - self.ledger.free_bytes
        return 0 if missing <= 0 else max(0, missing - self._droppable_bytes(self._droppable(protected)))

    def _size(self, memory: ResidentMemory) -> int:
        return self.ledger.size_bytes(memory.page_count, memory.state_bytes)

    def _droppable(self, protected: Collection[Hashable] | None) -> list[AgentKey]:
        """Keys of the memories that may be dropped, in the order in which they are."""
        extended = {one.extends for one in self.ledger.reservations}
        able = [key for key, memory in self._memories.items() if memory not in self.outgoing.awaited]
        keys = [key for key in able if protected is None or not (key in extended or key in protected)]
        return sorted(keys, key=self._keeping_order)

    def _droppable_bytes(self, keys: Collection[AgentKey]) -> int:
        memories = [*(self._memories[key] for key in keys), *self.outgoing.droppable, *self.begun.all]
        states = sum(memory.state_bytes for memory in memories)
        return self.ledger.freed_bytes([list(memory.kv.pages) for memory in memories]) + states

    def _make_room(self, needed_bytes: int, protected: Collection[Hashable] | None, namespace: str | None) -> None:
        """Drop memories until so many bytes are free for a namespace; `missing_bytes` said that there are enough."""
        keys, held = self._droppable(protected), self._held()
        held[namespace] += needed_bytes - self.ledger.free_bytes
        share_bytes = self.ledger.total_bytes // len(held)
        for pinned in self.outgoing.droppable:  # frees nothing while the memory is hot, which can be pinned again
            self.outgoing.unpin(pinned)
        self.begun.make_room(needed_bytes)
        for is_for_all in (False, True):
            for key in [key for key in keys if key in self._memories]:
                if needed_bytes <= self.ledger.free_bytes:
                    return
                if is_for_all or held[key.namespace] > share_bytes:
                    held[key.namespace] -= self._size(self._memories[key])
                    self.drop(key)

    def _held(self) -> Counter[str | None]:
        """Bytes by namespace, of running turns and memories; what memories share counts for each of them."""
        held: Counter[str | None] = Counter()
        for key, memory in self._memories.items():
            held[key.namespace] += self._size(memory)
        for reservation in self.ledger.reservations:
            held[reservation.namespace] += self.ledger.reserved_bytes(reservation)
        return held

    def _keeping_order(self, key: AgentKey) -> tuple[bool, bool, int]:
        memory = self._memories[key]
        is_owed = memory.owed is not None and memory.owed.is_owed
        return is_owed, memory.priority is Priority.INTERACTIVE, -self._expected.turns_until(key)
