"""What the MLX thread does: begins turns, steps them, ends them, and keeps what they leave.

A turn that fails or is cancelled changes no memory: rows that it overwrote are put back, to the bit.
"""

import logging
from collections.abc import Callable, Sequence

from kvasir.block_file import FileIdentity
from kvasir.block_hash import BLOCK_TOKENS
from kvasir.errors import Cancelled, Internal, KvasirError, Unavailable

from inference_svc.hot_memories import HotMemories, Memory
from inference_svc.kv.capacity import capacity_rows
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model_runner import ModelRunner
from inference_svc.plan import Event, Hot, ModelInfo, SequenceKey, Snapshot, TurnPlan
from inference_svc.running_turn import RunningTurn, begin
from inference_svc.scheduler import Scheduler
from inference_svc.tensor_files import chain_hashes, file_identities
from inference_svc.turn import Turn

OnEvents = Callable[[list[Event]], None]
logger = logging.getLogger(__name__)


def turn_bytes(plan: TurnPlan, model: ModelInfo) -> int:
    """KV bytes that a turn may come to need, all of its tokens generated. Known before anything is allocated."""
    return capacity_rows(len(plan.token_ids) + plan.sampling.max_tokens) * model.kv_bytes_per_token


class EngineWorker:
    """The worker of the MLX thread. Only `memories`' tags and uses, and `memory_used_bytes`, are for other threads."""

    def __init__(self, runner: ModelRunner, model: ModelInfo, memory_budget_bytes: int) -> None:
        self.memories: HotMemories[SequenceKV] = HotMemories(memory_budget_bytes)
        self.memory_used_bytes = 0
        self._runner = runner
        self._model = model
        self._scheduler: Scheduler[Turn] = Scheduler()
        self._running: dict[Turn, RunningTurn] = {}
        self._listeners: dict[Turn, OnEvents] = {}
        self._when_idle: dict[SequenceKey, list[Callable[[], None]]] = {}

    def submit(self, turn: Turn, on_events: OnEvents) -> None:
        self._listeners[turn] = on_events
        self._scheduler.add(turn)

    def step(self) -> bool:
        """One step of all that runs; False if there was nothing to do."""
        for turn in [turn for turn in self._listeners if turn.is_cancelled]:
            self._guarded(turn, self._cancel)
        self._scheduler.admit(self._try_begin)
        step = self._scheduler.next_step()
        for turn in step.decode:
            self._guarded(turn, self._decode)
        if step.prefill is not None:
            self._guarded(step.prefill, self._prefill_cell)
        self._tell()
        self._finish_spoken()
        self.memory_used_bytes = self._used_bytes()
        return not step.is_empty

    def close(self) -> None:
        for turn in list(self._listeners):
            self._abandon(turn, Unavailable("the engine is shutting down", retry_after_s=1.0))
        self._tell()

    def when_idle(self, key: SequenceKey, work: Callable[[], None]) -> None:
        """Do `work` now, or as soon as no turn of the key runs."""
        if self._running_of(key) is None:
            work()
        else:
            self._when_idle.setdefault(key, []).append(work)

    def fork(self, source: SequenceKey, target: SequenceKey) -> bool:
        """Give `target` the memory of `source`, untagged: a tag is one agent's. False if there is none."""
        memory = self.memories.get(source)
        if memory is not None:
            self.memories.put(target, Memory(memory.kv.fork(), memory.state, memory.chain))
        return memory is not None

    def snapshot(self, key: SequenceKey, first_block: int, max_blocks: int | None = None) -> Snapshot | None:
        """The key's memory: blocks from `first_block` on, at most `max_blocks`, and with the last of them the tail."""
        memory = self.memories.get(key)
        if memory is None:
            return None
        tokens, last_block = memory.state.token_ids, len(memory.chain)
        if max_blocks is not None and first_block + max_blocks < last_block:
            last_block = first_block + max_blocks
            tokens = tokens[: last_block * BLOCK_TOKENS]
        files = self._files(memory.kv, tokens, memory.chain[:last_block], first_block)
        tail = files.pop() if len(tokens) % BLOCK_TOKENS else None
        return Snapshot(first_block, tuple(files), tail, memory.state)

    def running_blocks(self, key: SequenceKey, first_block: int, max_blocks: int | None = None) -> Snapshot | None:
        """Full blocks from `first_block` on, at most `max_blocks`: of the key's running turn, else of its memory."""
        running = self._running_of(key)
        if running is None:
            whole = self.snapshot(key, first_block, max_blocks)
            return whole and Snapshot(first_block, whole.blocks, None, whole.state)
        turn = running.turn
        tokens = turn.token_ids[: turn.full_blocks * BLOCK_TOKENS]
        running.chain = chain_hashes(self._model.kv_identity_hash, tokens, running.chain)
        last_block = len(running.chain) if max_blocks is None else min(first_block + max_blocks, len(running.chain))
        files = self._files(running.kv, tokens[: last_block * BLOCK_TOKENS], running.chain[:last_block], first_block)
        return Snapshot(first_block, tuple(files), None, turn.state())

    def _files(
        self, kv: SequenceKV, token_ids: Sequence[int], chain: Sequence[str], first_block: int
    ) -> list[tuple[FileIdentity, bytes]]:
        identities = file_identities(self._model.kv_identity_hash, token_ids, chain, first_block)
        return [(identity, kv.to_file(self._model.kv_identity, identity)) for identity in identities]

    def _try_begin(self, turn: Turn) -> bool:
        """Begin a waiting turn; False if there is no room for it yet."""
        key = turn.plan.key
        extends_memory = isinstance(turn.plan.reuse, Hot) and key is not None
        busy = self._busy_keys() | ({key} if extends_memory and key is not None else set())
        reserved = sum(turn_bytes(other.plan, self._model) for other in self._running)
        if not self.memories.make_room(turn_bytes(turn.plan, self._model), reserved, busy):
            return False
        self._guarded(turn, self._begin)
        return True

    def _begin(self, turn: Turn) -> None:
        memory = self.memories.get(turn.plan.key) if turn.plan.key is not None else None
        self._running[turn] = begin(turn, memory, self._runner, self._model)

    def _prefill_cell(self, turn: Turn) -> None:
        running = self._running[turn]
        cell = turn.next_cell()
        if turn.computed + len(cell) < turn.prompt_tokens:
            self._runner.prefill(running.kv, cell)
            turn.prefilled(len(cell))
        else:
            token = self._runner.prefill_and_sample(running.kv, cell, running.sampler)
            turn.prefilled(len(cell))
            turn.accept(token)

    def _decode(self, turn: Turn) -> None:
        running = self._running[turn]
        token = self._runner.prefill_and_sample(running.kv, turn.token_ids[-1:], running.sampler)
        turn.decoded()
        turn.accept(token)

    def _finish_spoken(self) -> None:
        """End the turns that spoke their last token. It is told by now: the KV that is still to be computed for it must
        not hold it up. At a step's end, so that a listener's request for the turn's snapshot is served before the next
        step admits a turn that may need the room.
        """
        for turn in [turn for turn in self._running if turn.finish_reason is not None]:
            self._guarded(turn, self._finish)

    def _finish(self, turn: Turn) -> None:
        if turn.plan.key is not None:
            memory = self._running[turn].memory_left(self._runner, self._model.kv_identity_hash)
            self.memories.put(turn.plan.key, memory)
        turn.end()
        self._remove(turn)

    def _cancel(self, turn: Turn) -> None:
        has_generated = len(turn.token_ids) > turn.prompt_tokens
        if turn.plan.keep_partial and has_generated:
            self._finish(turn)
        else:
            self._abandon(turn, Cancelled("the turn was cancelled; the agent remembers what it did before"))

    def _guarded(self, turn: Turn, work: Callable[[Turn], None]) -> None:
        """A turn that fails takes nobody with it."""
        try:
            work(turn)
        except KvasirError as error:
            self._abandon(turn, error)
        except Exception:
            logger.exception("turn.failed")
            # Layers may disagree on their length now: this KV must not serve again.
            running = self._running.get(turn)
            if running is not None and running.memory is not None and turn.plan.key is not None:
                self.memories.drop(turn.plan.key)
                running.memory = None
            self._abandon(turn, Internal("the turn failed in the engine"))

    def _abandon(self, turn: Turn, error: KvasirError) -> None:
        if running := self._running.get(turn):
            running.undo()
        turn.fail(error)
        self._remove(turn)

    def _remove(self, turn: Turn) -> None:
        """The turn is over: it leaves the schedule, and what waited for its agent is done."""
        self._running.pop(turn, None)
        self._scheduler.remove(turn)
        self._tell_one(turn, self._listeners.pop(turn))
        self._runner.release_unused()
        if turn.plan.key is not None and self._running_of(turn.plan.key) is None:
            for work in self._when_idle.pop(turn.plan.key, ()):
                work()

    def _tell(self) -> None:
        for turn, on_events in list(self._listeners.items()):
            self._tell_one(turn, on_events)

    def _tell_one(self, turn: Turn, on_events: OnEvents) -> None:
        if events := turn.take_events():
            try:
                on_events(events)
            except Exception:
                logger.exception("turn.listener_failed")
                turn.is_cancelled = True

    def _running_of(self, key: SequenceKey) -> RunningTurn | None:
        return next((running for turn, running in self._running.items() if turn.plan.key == key), None)

    def _busy_keys(self) -> set[SequenceKey]:
        """Keys whose hot memory a running turn extends."""
        return {
            turn.plan.key
            for turn, running in self._running.items()
            if running.memory is not None and turn.plan.key is not None
        }

    def _used_bytes(self) -> int:
        running = sum(running.kv.allocated_bytes for running in self._running.values())
        return running + self.memories.used_bytes(self._busy_keys())
