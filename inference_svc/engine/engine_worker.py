"""The work of the MLX thread: it begins turns, steps them, ends them, and keeps the memories that they leave.

A step decodes one token for each generating turn, as one batch, and computes cells of prompts beside it, one prompt at
a time. A turn that fails or is cancelled changes no memory: the rows that it overwrote are put back, to the bit. When
an interactive turn finds no room, background turns are preempted for it (`preempted_turns`).
"""

import logging
from collections.abc import Callable, Collection, Hashable, Sequence

from kvasir.errors import Cancelled, Internal, KvasirError, Unavailable
from kvasir.formats.block_file import FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.engine.active_sequence import MOST_REWIND_POINTS, ActiveSequence, begin
from inference_svc.engine.api import AgentKey, Event, SamplingParams, Snapshot, TurnPlan
from inference_svc.engine.preempted_turns import PreemptedTurns
from inference_svc.engine.sampling import Sampler, sample
from inference_svc.engine.scheduling.hot_memories import HotMemories, ResidentMemory
from inference_svc.engine.scheduling.mask_budget import MaskBudget
from inference_svc.engine.scheduling.room_shares import Room
from inference_svc.engine.scheduling.schedulable import Rules
from inference_svc.engine.scheduling.scheduler import Scheduler
from inference_svc.engine.turn import Turn
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.capacity import capacity_rows
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner

OnEvents = Callable[[list[Event]], None]
logger = logging.getLogger(__name__)
# Files of preempted turns that are not stored yet may take this part of the budget, beside it.
_UNSTORED_PART = 2


def turn_bytes(plan: TurnPlan, model: ModelInfo) -> int:
    """KV bytes that a turn needs if it generates all of its tokens. Known before any byte is allocated."""
    rows_bytes = capacity_rows(len(plan.token_ids) + plan.sampling.max_tokens) * model.kv_bytes_per_token
    return rows_bytes + model.live_state_bytes + MOST_REWIND_POINTS * model.state_bytes


class EngineWorker:
    """The worker of the MLX thread. Other threads may use the tags and expected uses of `memories`, and the counts."""

    def __init__(
        self,
        runner: ModelRunner,
        model: ModelInfo,
        memory_budget_bytes: int,
        decoded_budget_bytes: int,
        rules: Rules,
        clock: Callable[[], float],
    ) -> None:
        self.memories: HotMemories[SequenceKV] = HotMemories(memory_budget_bytes)
        self.memory_used_bytes = 0
        self.computed_tokens = 0  # tokens that went through the model; reused tokens do not count
        self.preemptions = 0
        self._runner = runner
        self._model = model
        self._clock = clock
        self._rules = rules
        room = Room(memory_budget_bytes, self.memories.ledger.reserved_by, self._needed_bytes)
        self._scheduler: Scheduler[Turn] = Scheduler(room, rules)
        self._masks: MaskBudget[Turn] = MaskBudget()
        self._batch = DecodeBatch(runner.forward, decoded_budget_bytes // runner.compute_item_bytes)
        self._active: dict[Turn, ActiveSequence] = {}
        self._preempted = PreemptedTurns(runner, model, memory_budget_bytes // _UNSTORED_PART)
        self._refused: dict[Turn, Collection[Hashable]] = {}  # turns without room in this step; keys they protected
        self._no_draw = Sampler(SamplingParams(max_tokens=1))  # for tokens whose successor is known or not needed
        self._listeners: dict[Turn, OnEvents] = {}
        self._when_idle: dict[AgentKey, list[Callable[[], None]]] = {}

    def submit(self, turn: Turn, on_events: OnEvents) -> None:
        self._listeners[turn] = on_events
        self._scheduler.submit(turn, self._clock())

    def step(self, take_mail: Callable[[], None]) -> bool:
        """One step of all running turns; False if there was no work. `take_mail` is called between cells, so that a new
        turn or a cancel does not wait for a whole step.
        """
        for turn in self._scheduler.cancelled():
            self._guarded(turn, self._cancel)
        before_s = self._clock()
        self._begin_waiting()
        spent_s = self._clock() - before_s
        has_ended = self._finish_generated()  # turns whose memory is whole and that generate nothing
        decoding = self._scheduler.begin_step(self._clock())
        present = {*self._scheduler.running, *self._scheduler.waiting}
        if may_decode := self._masks.begin_step(decoding, present):
            self._decode(may_decode)
            self._emit_all()
        has_prefilled = self._prefill(take_mail, spent_s)
        self._finish_generated()
        self._masks.end_step(self._clock() - before_s)
        self._count_bytes()
        if not self._active:
            self._runner.release_unused()
        return bool(decoding) or has_prefilled or has_ended  # a turn that ended may have left room for another

    def close(self) -> None:
        for turn in list(self._listeners):
            self._abandon(turn, Unavailable("the engine is shutting down", retry_after_s=1.0))
        self._emit_all()

    def when_idle(self, key: AgentKey, work: Callable[[], None]) -> None:
        """Do `work` now, or as soon as no turn of the key runs or is preempted."""
        if not self._is_used(key):
            work()
        else:
            self._when_idle.setdefault(key, []).append(work)

    def resume(self, turn: Turn, blobs: Sequence[bytes]) -> None:
        """The answer to `Wanted`: the preempted turn's files, or as many leading ones as could be read."""
        if turn.is_restoring and turn in self._preempted:
            self._guarded(turn, lambda _: self._active.update({turn: self._preempted.take_back(turn, blobs)}))
            self._emit_all()

    def files_stored(self, turn: Turn) -> None:
        """The files of a preempted turn are no longer held in memory."""
        self._preempted.stored(turn)

    # --- memories ---

    def fork(self, source: AgentKey, target: AgentKey) -> bool:
        """Give `target` the memory of `source` without its tag, which is one agent's. False if there is none."""
        memory = self.memories.get(source)
        return memory is not None and self.memories.put(
            target, ResidentMemory(memory.kv.fork(), memory.state, memory.chain)
        )

    def snapshot(self, key: AgentKey, first_block: int, max_blocks: int | None = None) -> Snapshot | None:
        """The key's memory: blocks from `first_block` on, at most `max_blocks`. The tail and the states come with the
        last block.
        """
        memory = self.memories.get(key)
        if memory is None:
            return None
        tokens, last_block = memory.state.token_ids, len(memory.chain)
        if max_blocks is not None and first_block + max_blocks < last_block:
            last_block = first_block + max_blocks
            tokens = tokens[: last_block * BLOCK_TOKENS]
        files = self._files(memory.kv, tokens, memory.chain[:last_block], first_block)
        if last_block < len(memory.chain):
            return Snapshot(first_block, tuple(files), None, memory.state)
        tail = files.pop() if files and files[-1][0].kind == "tail" else None
        return Snapshot(first_block, tuple(files), tail, memory.state, self._states(memory))

    def running_blocks(self, key: AgentKey, first_block: int, max_blocks: int | None = None) -> Snapshot | None:
        """Full blocks from `first_block` on, at most `max_blocks`, of the key's running turn or else of its memory."""
        active = self._active_of(key)
        if active is None and self._is_used(key):
            return None  # its turn is preempted: the memory holds other blocks than the turn's
        if active is None:
            whole = self.snapshot(key, first_block, max_blocks)
            return whole and Snapshot(first_block, whole.blocks, None, whole.state)
        turn = active.turn
        tokens = turn.token_ids[: turn.full_blocks * BLOCK_TOKENS]
        active.chain = chain_hashes(self._model.kv_identity_hash, tokens, active.chain)
        last_block = len(active.chain) if max_blocks is None else min(first_block + max_blocks, len(active.chain))
        self._batch.flush(active.kv)
        files = self._files(active.kv, tokens[: last_block * BLOCK_TOKENS], active.chain[:last_block], first_block)
        return Snapshot(first_block, tuple(files), None, turn.state())

    def _files(
        self, kv: SequenceKV, token_ids: Sequence[int], chain: Sequence[str], first_block: int
    ) -> list[tuple[FileIdentity, bytes]]:
        if not kv.row_layers:
            return []  # no layer is kept in blocks
        identities = file_identities(self._model.kv_identity_hash, token_ids, chain, first_block)
        return [(identity, kv.to_file(self._model.kv_identity, identity)) for identity in identities]

    def _states(self, memory: ResidentMemory[SequenceKV]) -> tuple[tuple[FileIdentity, bytes], ...]:
        tokens, hash_ = memory.state.token_ids, self._model.kv_identity_hash
        identities = [state_identity(hash_, tokens, point, memory.chain) for point in memory.kv.rewind_points]
        return tuple((identity, memory.kv.to_file(self._model.kv_identity, identity)) for identity in identities)

    # --- beginning ---

    def _begin_waiting(self) -> None:
        """Restoring a memory takes time. While turns decode, that time counts as prefill of the step."""
        self._refused.clear()
        before_s = self._clock()

        def has_time() -> bool:
            decodes = any(not turn.is_prefilling for turn in self._active)
            return not decodes or self._clock() - before_s < self._rules.budget_s

        blocked = self._scheduler.begin_waiting(self._clock(), self._try_begin, has_time)
        if any(self._make_room(turn) for turn in blocked):
            self._scheduler.begin_waiting(self._clock(), self._try_begin, has_time)

    def _try_begin(self, turn: Turn, protected: Collection[Hashable]) -> bool:
        """Begin a waiting turn, or ask for the files of a preempted one; False if there is no room yet."""
        extends = turn.memory_key is not None
        needed, key, namespace = self._needed_bytes(turn), turn.plan.key, turn.namespace
        if not self.memories.reserve(turn, needed, key, extends=extends, protected=protected, namespace=namespace):
            self._refused.setdefault(turn, protected)
            return False
        if turn in self._preempted:
            turn.ask_for_files()
            self._emit(turn, self._listeners[turn])
        else:
            self._guarded(turn, lambda turn: self._begin(turn, protected))
        return True

    def _make_room(self, blocked: Turn) -> bool:
        """Preempt turns for a turn that found no room; whether any was preempted."""
        needed, extends = self._needed_bytes(blocked), blocked.memory_key is not None
        protected = self._refused.get(blocked, ())
        missing = self.memories.missing_bytes(needed, blocked.plan.key, extends=extends, protected=protected)
        turns = self._scheduler.preemptions(blocked, missing)
        if not self._preempted.have_room(turns):
            return False
        for turn in turns:
            self._guarded(turn, self._preempt)
        self._runner.release_unused()
        return bool(turns)

    def _preempt(self, turn: Turn) -> None:
        active = self._active[turn]
        self._batch.leave(active.kv)
        self._preempted.put(active)
        if active.memory is not None and turn.plan.key is not None:
            self.memories.drop(turn.plan.key)  # its rows are the turn's
        del self._active[turn]
        self.memories.release(turn)
        self._scheduler.preempted(turn, self._clock())
        self.preemptions += 1
        self._emit(turn, self._listeners[turn])

    def _needed_bytes(self, turn: Turn) -> int:
        """KV of all tokens that the turn may come to have, and of the rows that it overwrites and may put back."""
        memory = self.memories.get(turn.plan.key) if turn.plan.key is not None else None
        is_cut = turn.memory_key is not None and memory is not None
        saved = max(0, memory.kv.length - memory.kv.start_before(turn.reusable_tokens)) if is_cut and memory else 0
        return turn_bytes(turn.plan, self._model) + saved * self._model.kv_bytes_per_token

    def _begin(self, turn: Turn, protected: Collection[Hashable]) -> None:
        memory = self.memories.get(turn.plan.key) if turn.plan.key is not None else None
        active = self._shared(turn, protected) or begin(turn, memory, self._runner, self._model)
        self._active[turn] = active

    def _shared(self, turn: Turn, protected: Collection[Hashable]) -> ActiveSequence | None:
        """The turn with a fork of the prefix that another turn of its namespace computed, if that saves more than its
        own plan does.
        """
        if turn.namespace is None or self._model.has_states:
            return None
        prefix = self._scheduler.prefix_source_of(turn, self.memories.idle(turn.namespace))
        if prefix is None:
            return None
        source = prefix.source
        owner = self._active[source] if isinstance(source, Turn) else self.memories.get(source)  # type: ignore[arg-type]
        if owner is None or (turn.memory_key is not None and not self._leaves_its_memory(turn, protected)):
            return None
        return ActiveSequence.sharing(turn, owner.kv, prefix.shared_tokens)

    def _leaves_its_memory(self, turn: Turn, protected: Collection[Hashable]) -> bool:
        """Reserve room for the turn beside the memory that it was to extend, which becomes idle. False, and the turn's
        reservation is as before, if there is none.
        """
        key = turn.plan.key
        self.memories.release(turn)
        needed, namespace = turn_bytes(turn.plan, self._model), turn.namespace
        if self.memories.reserve(turn, needed, protected={key, *protected}, namespace=namespace):
            return True
        needed = self._needed_bytes(turn)
        self.memories.reserve(
            turn, needed, key, extends=True, protected=protected, namespace=namespace
        )  # as it was before
        return False

    # --- stepping ---

    def _decode(self, decoding: Sequence[Turn]) -> None:
        """Compute one more token of every decoding turn, in one forward pass. A turn that sampled its last token in the
        step before computes that token here, so that it remembers it, and ends.
        """
        try:
            order = self._joined(decoding)
            self.computed_tokens += len(order)
            logits = self._batch.step([turn.next_token for turn in order])
            drawn = sample([self._sampler_of(turn) for turn in order], logits)
        except Exception:
            logger.exception("decode.failed")
            self._lose(decoding)
            return
        self._runner.stepped()
        for turn, token in zip(order, drawn, strict=True):
            is_known = not turn.next_token_draws
            turn.decoded()
            if is_known:
                continue
            if turn.finish_reason is not None:
                self._guarded(turn, self._finish)
            elif isinstance(token, KvasirError):
                self._abandon(turn, token)
            else:
                turn.accept(token.token_id, token.logprobs)

    def _joined(self, decoding: Sequence[Turn]) -> list[Turn]:
        """Make the batch hold the turns that decode in this step and no others; returns them by slot. Turns that sit
        out, and turns that were cancelled since the step began, leave it.
        """
        by_kv = {id(self._active[turn].kv): turn for turn in decoding}
        # From the last slot on: when many turns leave at once, few are moved to take their places.
        for kv in [kv for kv in reversed(self._batch.sequences) if id(kv) not in by_kv]:
            self._batch.leave(kv)
        for turn in decoding:
            if self._active[turn].kv not in self._batch:
                self._batch.join(self._active[turn].kv)
        return [by_kv[id(kv)] for kv in self._batch.sequences]

    def _prefill(self, take_mail: Callable[[], None], spent_s: float) -> bool:
        """Compute cells of prompts while the scheduler grants them; `spent_s` of the step's time is spent already.
        Returns whether there was one.
        """
        began_s, cells = self._clock() - spent_s, 0
        while (turn := self._scheduler.grant_prefill(self._clock() - began_s)) is not None:
            self._guarded(turn, self._prefill_cell)
            self._emit_all()
            cells += 1
            take_mail()
        return cells > 0

    def _prefill_cell(self, turn: Turn) -> None:
        active = self._active[turn]
        cell = turn.next_cell()
        self.computed_tokens += len(cell)
        if not turn.next_cell_draws:
            self._runner.prefill(active.kv, cell, lambda: turn.is_cancelled)
            turn.prefilled(len(cell))
            if turn.is_at_rewind_point:
                active.kv.mark()
            return
        logits = self._runner.last_logits(active.kv, cell, lambda: turn.is_cancelled)
        [token] = sample([active.sampler], logits)
        turn.prefilled(len(cell))
        if isinstance(token, KvasirError):
            raise token
        turn.accept(token.token_id, token.logprobs)

    # --- ending ---

    def _finish_generated(self) -> bool:
        """Finish turns that have sampled their last token and need not compute its KV: turns without an agent, and
        turns that do not remember that token. Returns whether any finished. At a step's end, so that a listener's
        request for the turn's snapshot is served before the next step admits a turn that may need the room.
        """
        generated = [turn for turn in self._active if turn.finish_reason is not None]
        ending = [turn for turn in generated if turn.plan.key is None or turn.remembered <= turn.computed]
        for turn in ending:
            self._guarded(turn, self._finish)
        return bool(ending)

    def _finish(self, turn: Turn) -> None:
        active = self._active[turn]
        self._batch.leave(active.kv)
        if turn.plan.key is not None:
            memory = active.memory_left(self._runner, self._model.kv_identity_hash)
            self.memories.leave(turn, turn.plan.key, memory)
        turn.end()
        self._remove(turn)

    def _cancel(self, turn: Turn) -> None:
        has_generated = len(turn.token_ids) > turn.prompt_tokens
        if turn.finish_reason is not None or (turn.plan.keep_partial and has_generated):
            self._finish(turn)
        else:
            self._abandon(turn, Cancelled("the turn was cancelled; the agent remembers what it did before"))

    def _guarded(self, turn: Turn, work: Callable[[Turn], None]) -> None:
        """Do a turn's work. If it fails, only this turn ends."""
        try:
            work(turn)
        except KvasirError as error:
            self._abandon(turn, error)
        except Exception:
            logger.exception("turn.failed")
            self._forget(turn)
            self._abandon(turn, Internal("the turn failed in the engine"))

    def _lose(self, decoding: Sequence[Turn]) -> None:
        """A forward pass of these turns failed half-way: they end, and so does every other turn in the batch."""
        lost = [turn for turn, active in self._active.items() if turn in decoding or active.kv in self._batch]
        self._batch.discard()
        for turn in lost:
            self._forget(turn)
            self._abandon(turn, Internal("the turn failed in the engine"))

    def _forget(self, turn: Turn) -> None:
        """Drop the memory that the turn extends: its layers may disagree on their length now."""
        active = self._active.get(turn)
        if active is not None and active.memory is not None and turn.plan.key is not None:
            self.memories.drop(turn.plan.key)
            active.memory = None

    def _abandon(self, turn: Turn, error: KvasirError) -> None:
        """End the turn without effect on its memory. Its listener gets an end whatever happens here."""
        if active := self._active.get(turn):
            try:
                self._batch.leave(active.kv)
                active.undo()
            except Exception:
                logger.exception("turn.not_undone")
                self._forget(turn)
                del self._active[turn]
                if active.kv in self._batch:  # it left the batch of some layers only
                    self._lose(())
        turn.fail(error)
        self._remove(turn)

    def _remove(self, turn: Turn) -> None:
        """The turn is over: it leaves the schedule, and work that waited for its agent is done."""
        self._active.pop(turn, None)
        self._preempted.forget(turn)
        self.memories.release(turn)
        self._scheduler.remove(turn)
        self._emit(turn, self._listeners.pop(turn))
        if turn.plan.key is not None and not self._is_used(turn.plan.key):
            for work in self._when_idle.pop(turn.plan.key, ()):
                work()

    # --- events ---

    def _emit_all(self) -> None:
        for turn, on_events in list(self._listeners.items()):
            self._emit(turn, on_events)

    def _emit(self, turn: Turn, on_events: OnEvents) -> None:
        if events := turn.take_events():
            try:
                on_events(events)
            except Exception:
                logger.exception("turn.listener_failed")
                turn.is_cancelled = True

    def _active_of(self, key: AgentKey) -> ActiveSequence | None:
        return next((active for turn, active in self._active.items() if turn.plan.key == key), None)

    def _is_used(self, key: AgentKey) -> bool:
        """Whether a turn of the key has begun and is not over."""
        return self._active_of(key) is not None or self._preempted.has(key)

    def _sampler_of(self, turn: Turn) -> Sampler:
        draws = turn.next_token_draws and turn.finish_reason is None
        return self._active[turn].sampler if draws else self._no_draw

    def _count_bytes(self) -> None:
        active_bytes = sum(active.kv.allocated_bytes for active in self._active.values())
        self.memory_used_bytes = active_bytes + self.memories.ledger.resident_bytes
