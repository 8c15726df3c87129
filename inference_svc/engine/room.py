"""Room for turns: requested with the fork in hand that a turn would begin with, so shared pages count once."""

from collections.abc import Collection, Hashable

from kvasir.errors import FailedPrecondition
from kvasir.formats.block_hash import BLOCK_TOKENS

from inference_svc.engine.api import AgentKey, Hot, HotMemoryGone, Restored
from inference_svc.engine.beginning import MOST_REWIND_POINTS, Reuse, forked_for, reuse_behind, reuse_of_memory
from inference_svc.engine.files.swapping import most_file_bytes
from inference_svc.engine.scheduling.hot_memories import HotMemories
from inference_svc.engine.scheduling.memory_ledger import Reservation
from inference_svc.engine.scheduling.prefix_sharing import prefix_source_of
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_info import ModelInfo

_UNSTORED_PART = 2  # files of preempted turns that are not stored yet may take this part of the budget, beside it


class KvRoom:
    """The pool's bytes, as the scheduler queries them (`room_shares.Room`) and as turns take them and give them up."""

    def __init__(self, pool: KvPool, model: ModelInfo, total_bytes: int, turns: Collection[Sequence]) -> None:
        """`turns`: all that are not over; the caller adds and removes them."""
        self.memories = HotMemories(pool.allocator, pool.page_bytes, total_bytes)
        self.total_bytes = total_bytes
        self._pool = pool
        self._model = model
        self._turns = turns

    def most_bytes(self, tokens: int) -> int:
        """KV bytes of a turn that comes to have so many tokens and shares none. From any thread."""
        return self.memories.ledger.size_bytes(self._pool.pages_for(tokens), self._state_bytes)

    @property
    def used_bytes(self) -> int:
        with_states = self._turns if self._model.has_states else ()
        states = sum(turn.kv.state_bytes for turn in with_states if turn.kv is not None)
        return self.memories.ledger.used_bytes + states

    def take(self, sequence: Sequence, protected: Collection[Hashable] | None) -> tuple[Reuse, SequenceKV]:
        """Reserve room for a turn, dropping memories for it; returns what it begins with and its fork. Raises
        FailedPrecondition (HOT_MEMORY_GONE) if the memory that it was planned with is not there, or does not fit beside
        what the turn adds to it: it is then planned again without it.
        """
        for reuse in self._reuses(sequence):
            forked = forked_for(sequence, reuse)
            reservation = self._reservation(sequence, reuse, forked)
            if self.memories.reserve(reservation, _kept(sequence, protected)):
                sequence.reservation = reservation
                return reuse, forked
            forked.release()
        assert sequence.swapped is None, "the scheduler admitted a turn without room"
        if sequence.plan.key is not None:
            self.memories.drop(sequence.plan.key)
        raise HotMemoryGone

    def give_up(self, sequence: Sequence) -> None:
        """The turn is over, or was preempted. Idempotent."""
        if sequence.reservation is not None:
            self.memories.ledger.release(sequence.reservation)
        sequence.reservation = None

    def drop_begun(self, of: AgentKey | str) -> None:
        """Drop what cancelled turns of an agent, or of a namespace, have prefilled. A cancel of those that are open
        leaves nothing either.
        """
        self.memories.begun.drop(of)
        for sequence in self._turns:
            if of in (sequence.plan.key, sequence.namespace):
                sequence.leaves_prefix = False

    def held_bytes(self, sequence: Sequence) -> int:
        return self.memories.ledger.reserved_bytes(sequence.reservation)

    def needed_bytes(self, sequence: Sequence) -> int:
        memory = self.memories.get(sequence.plan.key) if sequence.memory_key is not None else None
        shared = 0 if memory is None else memory.kv.start_before(sequence.reusable_tokens) // BLOCK_TOKENS
        shared_pages = shared * sum(not group.window for group in self._pool.groups)
        return self.most_bytes(sequence.most_tokens) - shared_pages * self._pool.page_bytes

    def missing_bytes(self, sequence: Sequence, protected: Collection[Hashable] | None) -> int:
        if self.most_bytes(sequence.most_tokens) <= self.memories.ledger.free_bytes:
            return 0  # whatever it shares
        try:
            reuses = self._reuses(sequence)
        except FailedPrecondition:
            return 0  # it begins in order to report it
        missing = []
        for reuse in reuses:
            forked = forked_for(sequence, reuse)
            reservation = self._reservation(sequence, reuse, forked)
            missing.append(self._missing(reservation, _kept(sequence, protected)))
            forked.release()
        if protected is None:  # nothing runs: its own memory may go, and the turn be planned again
            nothing = self._nothing()
            missing.append(self._missing(self._reservation(sequence, nothing, nothing.kv), None))
        return min(missing)

    def freed_bytes(self, sequence: Sequence) -> int:
        """What the turn may still take, and what nobody else holds of its KV and of the memory that it extends."""
        reservation, kv = sequence.reservation, sequence.kv
        if reservation is None or kv is None:
            return 0
        memory = self.memories.get(sequence.plan.key) if reservation.extends is not None else None
        pages = [list(held.pages) for held in (kv, None if memory is None else memory.kv) if held is not None]
        states = 0 if memory is None else memory.state_bytes
        return self.memories.begun.freed_bytes(pages) + self.memories.ledger.promised_to(reservation) + states

    def can_swap_out(self, sequences: Collection[Sequence]) -> bool:
        """Whether the files of these turns may be held in memory too."""
        more = sum(most_file_bytes(sequence, self._model) for sequence in sequences)
        held = sum(other.swapped.unstored_bytes for other in self._turns if other.swapped is not None)
        return not more or held + more <= self.total_bytes // _UNSTORED_PART

    def _reuses(self, sequence: Sequence) -> list[Reuse]:
        """What the turn may begin with, best first: prefixes that save more than its plan, its hot memory, nothing."""
        if sequence.swapped is not None:
            return [self._nothing()]
        is_hot = isinstance(sequence.plan.reuse, Hot)
        own = reuse_of_memory(sequence, self.memories.get(sequence.plan.key)) if is_hot else self._nothing()
        behind = reuse_behind(sequence, own, self.memories.begun.behind(own.memory))
        prefixes = [each for each in (behind, self._prefix_of(sequence)) if each is not None]
        return [*sorted(prefixes, key=lambda each: -each.tokens), own]

    def _prefix_of(self, sequence: Sequence) -> Reuse | None:
        """What another turn or memory holds of the turn's prompt, all of it shareable: the bits that the turn would
        compute itself. A turn whose files have these bits too shares the pages, and loads only the files behind them.
        """
        if sequence.namespace is None or self._model.has_states:
            return None
        restored = sequence.plan.reuse if isinstance(sequence.plan.reuse, Restored) else None
        least = BLOCK_TOKENS if restored is not None else None
        running = (other for other in self._turns if other.kv is not None)
        found = prefix_source_of(sequence, running, self.memories.of_namespace(sequence.namespace), least)
        if found is None or (kv := found.source.kv) is None:
            return None
        # Less than the whole prefix where the windows have gone on.
        tokens, planned = kv.start_before(found.shared_tokens), sequence.reusable_tokens
        if tokens < planned + BLOCK_TOKENS:
            tokens = min(tokens, restored.shareable_tokens) if restored is not None else 0
        is_all = tokens >= planned
        # Windows come from their own files, or all of them from the other's pages.
        if not tokens or tokens % BLOCK_TOKENS or (self._model.has_rewind_points and not is_all):
            return None
        return Reuse(kv, tokens, sequence.chain, tokens, is_shared=is_all)

    def _nothing(self) -> Reuse:
        return Reuse(SequenceKV(self._pool))

    def _reservation(self, sequence: Sequence, reuse: Reuse, forked: SequenceKV) -> Reservation:
        def kept_pages() -> int:
            arriving = sequence.arrival.load.kv if sequence.arrival is not None else None
            return (sequence.kv or arriving or forked).kept_pages

        extends = None if reuse.is_shared else sequence.memory_key
        most_pages = self._pool.pages_for(sequence.most_tokens)
        return Reservation(sequence.namespace, most_pages, self._state_bytes, extends, kept_pages)

    def _missing(self, reservation: Reservation, kept: Collection[Hashable] | None) -> int:
        return self.memories.missing_bytes(self.memories.ledger.promised_to(reservation), kept)

    @property
    def _state_bytes(self) -> int:
        return (1 + MOST_REWIND_POINTS) * self._model.state_bytes


def _kept(sequence: Sequence, protected: Collection[Hashable] | None) -> Collection[Hashable] | None:
    """The turn's own memory too: it must be what it was, if the turn fails."""
    return None if protected is None else {*protected, sequence.memory_key}
