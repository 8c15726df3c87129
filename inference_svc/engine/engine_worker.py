"""The work of the MLX thread: it begins, steps and ends turns, and keeps their memories, as the scheduler decides."""

import contextlib
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator

from kvasir.errors import Cancelled, KvasirError, Unavailable

from inference_svc.engine.api import AgentKey, HeldTurn
from inference_svc.engine.beginning import begin, memory_left, prefix_left
from inference_svc.engine.decoding import Decoded, Decoder
from inference_svc.engine.device.device_watch import DeviceWatch
from inference_svc.engine.drafting.drafter import Drafter
from inference_svc.engine.files.held_turns import held_turn, sampler_of_carried
from inference_svc.engine.files.incoming import Incoming
from inference_svc.engine.files.leaving import LeavingFiles, begun_turn
from inference_svc.engine.files.swapping import SwapIn, swap_out
from inference_svc.engine.prefilling import Beside, Prefiller
from inference_svc.engine.room import KvRoom
from inference_svc.engine.scheduling.mask_budget import MaskBudget
from inference_svc.engine.scheduling.schedulable import WITH_KV, Rules, Status
from inference_svc.engine.scheduling.scheduler import Admit, Blocked, Preempt, Scheduler
from inference_svc.engine.sequence import Sequence
from inference_svc.engine.wedlm.mask_decoder import MaskDecoder
from inference_svc.kv.host_copies.landings import drop_room, make_room
from inference_svc.model.device_memory import bound_to_free, forget_frames
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner
from inference_svc.text.token_ids import TokenIds

logger = logging.getLogger(__name__)
_RELEASE_STEPS = 256
_LONG_PROMPT = 8192


class EngineWorker:
    """The worker of the MLX thread. Other threads may use the counts, and of `memories` all but the KV."""

    def __init__(
        self,
        runner: ModelRunner,
        model: ModelInfo,
        memory_budget_bytes: int,
        decoded_budget_bytes: int,
        rules: Rules,
        clock: Callable[[], float],
    ) -> None:
        policy, is_allocated = model.kv_identity.policy, runner.takes_pool_at_once
        self._pool = runner.new_pool(policy, memory_budget_bytes, is_allocated=is_allocated)
        self._turns: list[Sequence] = []  # all that are not over
        self.room = KvRoom(self._pool, model, memory_budget_bytes, self._turns)
        self.memories = self.room.memories
        self.memory_used_bytes = 0
        self.preemptions = 0
        self._steps = 0  # that decoded
        self._runner = runner
        self._model = model
        self._clock = clock
        self._device = DeviceWatch()
        self._scheduler: Scheduler[Sequence] = Scheduler(self.room, rules, self._turns)
        self.costs = self._scheduler.costs
        self._masks: MaskBudget[Sequence] = MaskBudget()
        batch = runner.new_batch(self._pool, decoded_budget_bytes // runner.compute_item_bytes)
        self._decoder: Decoder | MaskDecoder
        if model.mask_window is not None:
            self._decoder = MaskDecoder(batch, model.mask_window, model.stop_token_ids, rules.most_drafts)
        else:
            texts_of = self._texts_of if rules.drafts_from_others else lambda _namespace: ()
            drafter = Drafter(batch.most_drafted_rows, rules.most_drafts, lambda: self._scheduler.is_alone, texts_of)
            self._decoder = Decoder(batch, drafter, clock, looks_ahead=not model.has_states)
        mask = None if model.mask_window is None else model.mask_window.mask_token_id
        self._prefiller = Prefiller(runner, rules.shared_pass, self._guarding, self._device.makes_room, mask)
        self.leaving = LeavingFiles(model, self._pool, self.memories, self._turns, batch)
        self._may_decode: Collection[Sequence] = ()  # in this step
        self._when_idle: dict[AgentKey, list[Callable[[], Exception | None]]] = {}
        self._is_behind_cell = False  # the device computes a cell: whatever reads it now waits for that
        make_room()
        bound_to_free()

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model; reused tokens do not count."""
        return self._prefiller.computed + self._decoder.computed

    def give_back(self, most_bytes: int, spared: Collection[AgentKey]) -> int:
        """Drop memories that the store has, but for `spared`, until KV needs at most so many bytes; returns the bytes
        that became free."""
        self.memories.begun.make_room()
        idle = () if self._pool.keeps_memory else self.memories.stored_keys()
        stored = [key for key in idle if key not in spared]
        tables = [[*memory.kv.pages] for key in stored if (memory := self.memories.get(key)) is not None]
        # A page of a turn, or of a memory that stays, keeps all pages in front of it.
        reachable = max(most_bytes, self._pool.allocator.end_without(tables) * self._pool.page_bytes)
        for key in stored:
            if self.room.used_bytes <= most_bytes and self._pool.needed_bytes <= reachable:
                break
            self.memories.drop(key)
        self.memory_used_bytes = self.room.used_bytes
        return self._pool.give_back()

    def keep_graph(self, tokens: int, depth: int, rows: int) -> None:
        """See `Engine.keep_graph`."""
        if tokens:
            self._runner.keep_graph(self._pool, tokens, depth, rows)
        elif isinstance(self._decoder, Decoder):
            self._decoder.batch.keep_graph(depth, rows)

    def submit(self, sequence: Sequence) -> None:
        self._scheduler.submit(sequence, self._clock())

    def step(self, take_mail: Callable[[], None]) -> bool:
        """One step of all running turns; False without work. `take_mail` is called between cells."""
        for sequence in (ending := self._scheduler.cancelled()):
            cancelled = Cancelled("the turn was cancelled; the agent remembers what it did before")
            self._finish(sequence, None if sequence.keeps_its_part else cancelled)
        if ending:
            take_mail()  # the snapshot of a part that is kept, before its memory may be dropped for another
        before_s = self._clock()
        self._admit(take_mail)
        spent_s = self._clock() - before_s
        # Where a cell takes as long as many steps, nothing that is decoded waits for one to be read.
        is_before_cell, count = not self._runner.is_on_gpu and self._scheduler.has_prompts, len(self._turns)
        if has_settled := self._decoder.is_ahead and (is_before_cell or self._decoder.must_settle):
            self._report_decoded()
        has_ended = self._finish_generated()  # turns whose memory is whole and that generate nothing
        decoding = self._scheduler.begin_step(self._clock())
        self._may_decode = self._masks.begin_step(decoding, self._turns)
        # A step behind a cell is reported while the device computes the next cell, and one more is enqueued there. A
        # row that the last cell began waits for that one: a step for it alone would keep all prompts waiting.
        has_prefilled = self._decoder.has_behind_cell and self._carry_out_grants(take_mail, self._clock() - before_s)
        if not has_prefilled:
            if self._may_decode or self._decoder.is_ahead:
                self._decode(self._may_decode, is_before_cell=is_before_cell)
                self._emit_all()
            if is_before_cell:
                self._end_generated()
                if len(self._turns) < count:
                    take_mail()  # the requests for what these turns leave
            has_prefilled = self._carry_out_grants(take_mail, spent_s)
        self._finish_generated()
        self._masks.end_step(self._clock() - before_s)
        self.memory_used_bytes = self.room.used_bytes
        if all(sequence.kv is None for sequence in self._turns):
            self._runner.release_unused()
        self._device.end_step()
        # A turn that ended may have left room for another.
        has_worked = bool(decoding) or has_prefilled or has_settled or has_ended
        is_empty, held = not self._turns, self.memories.ledger.used_pages
        if has_worked and is_empty and (leaked := held - len(self.memories.pages)):
            logger.error("kv.pages_leaked pages=%d", leaked)
        return has_worked

    def close(self) -> None:
        self._device.settle()
        for sequence in list(self._turns):
            self._finish(sequence, Unavailable("the engine is shutting down", retry_after_s=1.0))
        if self._device.lost is not None:
            return  # MLX ends a process in which memory cannot be freed, before callers have their answers
        # A publication whose store hangs has the engine for long, and the next model's weights come now.
        self._runner.close()
        self._pool.close()
        self._decoder.batch.close()
        drop_room()

    def when_idle(self, key: AgentKey, work: Callable[[], Exception | None]) -> None:
        """Do `work` now, or as soon as no turn of the key runs or is preempted. As `Letter.deliver`."""
        self._when_idle.setdefault(key, []).append(work)
        self._do_idle_work()

    def resume(self, sequence: Sequence, files: Incoming) -> None:
        if sequence.status is Status.RESTORING and sequence.arrival is None:
            with self._guarding(sequence):
                sequence.arrives(SwapIn(sequence, self._pool, self._model, files))

    # --- turns that go to another engine ---

    def hold(self, sequence: Sequence, sent_blocks: int) -> HeldTurn | None:
        self._settle()
        self._emit(sequence)
        is_leaving = sequence.is_ending or sequence.is_cancelled
        if is_leaving or not sequence.can_be_held or sequence.status not in WITH_KV or sequence.kv is None:
            return None
        self._decoder.batch.leave(sequence.kv)
        held = held_turn(sequence, sequence.kv, self._model, sent_blocks)
        sequence.held()
        self._emit(sequence)
        return held

    def give_away(self, sequence: Sequence) -> None:
        if sequence.status is Status.HELD:
            self._finish(sequence, Unavailable("the turn went on to another engine", reason="TURN_MOVED"))

    # --- beginning ---

    def _admit(self, take_mail: Callable[[], None]) -> None:
        may_preempt = True
        while True:
            # A preempted turn must not lose a token that was drawn and not read.
            may_preempt_now = may_preempt and not self._decoder.is_ahead
            if waiting := self._scheduler.waiting:
                self.memories.outgoing.look_at_owed()
            match self._scheduler.admit(self._clock(), may_preempt=may_preempt_now):
                case Admit(sequence, protected):
                    with self._guarding(sequence):
                        self._begin(sequence, protected)
                case Preempt(sequences):
                    for sequence in sequences:
                        with self._guarding(sequence):
                            self._preempt(sequence)
                    self._runner.release_unused()
                    may_preempt = False
                case Blocked(wants_preemption=True) if may_preempt:
                    self._settle()
                    take_mail()  # the snapshot of a turn that just ended, before its memory may be dropped for another
                case Blocked():
                    if waiting:
                        self.memories.outgoing.want_room()
                    return

    def _begin(self, sequence: Sequence, protected: Collection[Hashable] | None) -> None:
        if len(sequence.token_ids) >= _LONG_PROMPT:
            bound_to_free()  # others may have come to a card
        reuse, forked = self.room.take(sequence, protected)
        if sequence.swapped is None:
            begin(sequence, reuse, forked, self._model)
        else:
            if sequence.sampler is None:
                sequence.sampler = sampler_of_carried(sequence)
            sequence.ask_for_files()
            self._emit(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self._decoder.batch.leave(sequence.kv)
        swap_out(sequence, self._model)
        if sequence.reservation is not None and sequence.reservation.extends is not None and sequence.plan.key:
            self.memories.drop(sequence.plan.key)  # the store has all of it, and its room is wanted
        self.room.give_up(sequence)
        self.preemptions += 1
        self._emit(sequence)

    # --- stepping ---

    def _texts_of(self, namespace: str) -> list[TokenIds]:
        return [memory.state.token_ids for memory in self.memories.of_namespace(namespace)]

    def _decode(self, decoding: Collection[Sequence], *, is_before_cell: bool = False) -> None:
        """Enqueue a token of every decoding turn, also its last, which gets its KV here; take in what is read."""
        with self._losing(decoding):
            self._take_in(self._decoder.step(decoding, reads_all=is_before_cell))
        self._steps += 1
        if self._steps % _RELEASE_STEPS == 0:
            self._runner.release_unused()  # every step reads one row more, in buffers of another size

    def _settle(self) -> list[Decoded]:
        """Take in the step that was not read; returns its rows."""
        decoded: list[Decoded] = []
        with self._losing(()):
            decoded = self._decoder.settle()
            self._take_in(decoded)
        return decoded

    def _report_decoded(self) -> None:
        """Report the tokens of the step that was not read: what was enqueued behind it would keep them waiting."""
        for each in self._settle():  # the cell's own turn reports with the cell
            self._emit(each.sequence)

    def _going_on(self) -> list[Sequence]:
        """Turns of this step that decode and have not ended since."""
        return [each for each in self._may_decode if each.status is Status.DECODING and not each.is_cancelled]

    def _report_beside_cell(self) -> None:
        """While the device computes a cell's first layers, report the step before: to enqueue all of the cell takes the
        processor longer than the device that step. All reports come then, or one would be longer after the last. Not
        where a pool may move as it grows: the cell's last layers, which are not enqueued, would write where it was.
        """
        if not self._pool.keeps_memory:
            return
        self._is_behind_cell = True
        try:
            self._report_decoded()
        finally:
            self._is_behind_cell = False

    def _decode_behind_cell(self) -> None:
        """Enqueue the next step behind a cell. A step that was not reported beside the cell is reported first."""
        self._is_behind_cell = True
        try:
            self._report_decoded()
            going_on = self._going_on()
            if isinstance(self._decoder, Decoder) and self._decoder.looks_ahead:
                with self._losing(going_on):
                    self._decoder.launch(going_on, is_behind_cell=True)
        finally:
            self._is_behind_cell = False

    def _take_in(self, decoded: Iterable[Decoded]) -> None:
        for each in decoded:
            sequence, token = each.sequence, each.drawn
            if sequence.kv is None or sequence.is_cancelled:
                continue
            sequence.decoded(each.computed)
            if token is None:
                continue
            try:
                if sequence.finish_reason is not None:
                    if each.computed:  # else the token was committed together with the reply's last one, behind it
                        self._finish(sequence)
                elif isinstance(token, KvasirError):
                    self._finish(sequence, token)
                else:
                    sequence.accept(token.token_id, token.logprobs)
            except Exception as error:  # noqa: BLE001 - as `_guarding`, which costs a stream's every token more
                self._finish(sequence, error)

    def _carry_out_grants(self, take_mail: Callable[[], None], spent_s: float) -> bool:
        """Compute cells and load files while the scheduler grants them. Returns whether there was a grant."""
        began_s, grants = self._clock() - spent_s, 0
        while grant := self._scheduler.grant(self._clock() - began_s, is_behind_step=self._decoder.is_ahead):
            if not grants and grant.turn.arrival is not None and self._decoder.has_behind_cell:
                self._decode(self._may_decode)  # a load may wait for nothing, and would report no token
                self._emit_all()
            if grant.turn.arrival is None:
                is_awaited = self._may_decode or self._decoder.is_ahead
                beside = Beside(self._report_beside_cell, self._decode_behind_cell) if is_awaited else None
                self._prefiller.compute(grant.cells, beside)
            else:
                with self._guarding(grant.turn):
                    grant.turn.arrival.advance(grant.size, self._report_decoded)
            self._do_idle_work()
            self._finish_generated()
            self._emit_all()
            grants += 1
            take_mail()
        return grants > 0

    # --- ending ---

    def _finish_generated(self) -> bool:
        """Finish turns that have drawn their last token and have all KV that they leave. Returns whether any finished.
        At a step's end, so that a listener's request for the turn's snapshot is served before the next step admits a
        turn that may need the room.
        """
        generated = [each for each in self._turns if each.kv is not None and each.finish_reason is not None]
        ending = [each for each in generated if not each.plan.leaves_memory or each.left_tokens <= each.cells.computed]
        for sequence in ending:
            self._finish(sequence)
        return bool(ending)

    def _end_generated(self) -> None:
        """End the turns of this step that have drawn their last token, with its KV where they need it. All decode for
        that: a row that left the batch for a step would be de-quantized from its first token on, which takes longer.
        """
        self._finish_generated()
        decoding = self._going_on()
        if any(each.is_ending for each in decoding):
            self._decode(decoding, is_before_cell=True)
            self._emit_all()

    def _finish(self, sequence: Sequence, failure: Exception | None = None) -> None:
        """End a turn, wherever it is; after a `failure` its agent's memory is as before. Its listener gets an end."""
        if sequence.status is Status.FINISHED:
            return
        stuck: Exception | None = None
        try:
            self._leave(sequence, remembers=failure is None)
        except Exception as error:  # noqa: BLE001 - the turn failed, as it may anywhere else
            self._device.pass_failed(error)
            stuck = error
        for each in filter(None, (failure, stuck)):
            if not isinstance(each, KvasirError):
                logger.error("turn.failed", exc_info=each)
            forget_frames(each)
        if (failure := failure or stuck) is not None:
            failure = self._device.in_words(failure)
        sequence.finish(failure)
        kv, sequence.swapped = sequence.kv, None
        if sequence.arrival is not None:
            sequence.arrival.load.release()
            sequence.arrival = None
        if kv is not None and failure is not None:
            prefix, key = None, sequence.plan.key
            if isinstance(failure, Cancelled) and kv not in self._decoder.batch:
                prefix = prefix_left(sequence, self.memories.get(key))
            if prefix is None or sequence.namespace is None:
                kv.release()
            else:
                self.memories.begun.keep(sequence.namespace, key, prefix)
        sequence.kv = sequence.extended = None
        self.room.give_up(sequence)
        self._scheduler.remove(sequence)
        self._emit(sequence)
        # A turn that could not leave: the batch of some layers may hold it. How it ended is no affair of the others.
        if kv is not None and stuck is not None and kv in self._decoder.batch:
            self._lose((), stuck)
        self._do_idle_work()

    def _leave(self, sequence: Sequence, *, remembers: bool) -> None:
        """Take the turn's KV out of the batch, and make it the key's memory if the turn is remembered."""
        if sequence.kv is None:
            return
        self._decoder.batch.leave(sequence.kv)
        if not remembers:
            return
        if sequence.plan.key is None or not sequence.plan.is_remembered:
            sequence.kv.release()
        else:
            memory = memory_left(sequence, self._runner, self._model.kv_identity_hash)
            self.memories.put(sequence.plan.key, memory)

    def _do_idle_work(self) -> None:
        """Do what waits for keys that have no turn now, but not before the step behind a cell is enqueued."""
        if not self._is_behind_cell:
            for key in [key for key in self._when_idle if begun_turn(self._turns, key) is None]:
                for work in self._when_idle.pop(key, ()):
                    if (error := work()) is not None:
                        self._device.pass_failed(error)

    @contextlib.contextmanager
    def _losing(self, decoding: Collection[Sequence]) -> Iterator[None]:
        """Around a forward pass of these turns: if it fails, they end."""
        try:
            yield
        except Exception as error:
            logger.exception("decode.failed")
            self._device.pass_failed(error)
            self._lose(decoding, error)

    def _lose(self, decoding: Collection[Sequence], error: Exception) -> None:
        """A forward pass of these turns failed half-way: they end, and so does every other turn in the batch."""
        rows = {id(kv) for kv in self._decoder.discard()}
        lost = [each for each in self._with_kv if each in decoding or id(each.kv) in rows]
        for sequence in lost:
            self._finish(sequence, self._device.in_words(error))

    @contextlib.contextmanager
    def _guarding(self, *sequences: Sequence) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it ends the turn, which reports it
            self._device.pass_failed(error)
            for sequence in sequences:
                self._finish(sequence, error)

    # --- events ---

    def _emit_all(self) -> None:
        for sequence in list(self._turns):
            self._emit(sequence)

    def _emit(self, sequence: Sequence) -> None:
        if events := sequence.take_events():
            try:
                sequence.listener(events)
            except Exception:
                logger.exception("turn.listener_failed")
                sequence.wants_cancel = True

    @property
    def _with_kv(self) -> list[Sequence]:
        return [sequence for sequence in self._turns if sequence.kv is not None]
