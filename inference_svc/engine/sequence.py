"""One turn in the engine: its tokens, its text, its events, and what it holds while it lives. Touches no tensor."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from kvasir.errors import KvasirError
from kvasir.formats.block_file import FileBytes
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes

from inference_svc.engine import api
from inference_svc.engine.grid import Cells
from inference_svc.engine.reply_text import ReplyText
from inference_svc.engine.scheduling.hot_memories import ResidentMemory
from inference_svc.engine.scheduling.memory_ledger import Reservation
from inference_svc.engine.scheduling.schedulable import ScheduleRecord, Status
from inference_svc.formats.grammars import GrammarMatcher
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.replies.reasoning_limit import ReasoningWatch
from inference_svc.text.replies.replayed_reply import ReplayedReply
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from inference_svc.text.token_text import TokenText

if TYPE_CHECKING:  # so that the schedule of sequences is tested where there is no MLX
    from inference_svc.engine.sampling import Sampler
    from inference_svc.kv.kv_load import KvLoad
    from inference_svc.kv.sequence_kv import SequenceKV
    from inference_svc.model.embedding.hidden_rows import HiddenRows


class Arrival(Protocol):
    load: "KvLoad"  # the KV that is made of them

    @property
    def lacks_files(self) -> bool:
        """Whether `advance` has nothing to do before another file comes."""

    def advance(self, most_files: int, meanwhile: Callable[[], None]) -> None:
        """Load the next files, at most so many: the last lets the turn go on. `meanwhile` is called before a wait."""


@dataclass
class SwappedOut:
    tokens: int  # tokens whose KV is in the files
    rewind_points: tuple[int, ...]  # token counts of the state files, which come last; the last count is `tokens`
    first_blocks: Mapping[int, int]  # by group of layers in the order of their files: the first block that is there
    unstored_bytes: int  # bytes of files that are still in memory


class Sequence:
    """A submitted turn. `token_ids` are its tokens; steps compute all but the last of them, as `cells` counts."""

    def __init__(
        self,
        plan: api.TurnPlan,
        model: ModelInfo,
        token_text: TokenText,
        clock: Callable[[], float],
        matcher: GrammarMatcher | None = None,
        listener: api.Listener = lambda _events: None,
    ) -> None:
        self.plan, self.namespace, pace = plan, plan.namespace, plan.pace
        self.priority, self.longest_gap_s = pace.priority, pace.longest_gap_s
        self.cells = Cells(len(plan.token_ids), model.cell_tokens, _rewind_point(plan, model))
        # A pass that fills masks computes the prompt's last token too, if that is all of the prompt that has no KV.
        takes_last = model.mask_window is not None and plan.generates and self.cells.prompt_tokens > 1
        self._decodes_from = self.cells.prompt_tokens - takes_last
        self.most_tokens = self.cells.prompt_tokens + plan.sampling.max_tokens  # if it generates all that it may
        self.listener = listener
        self.matcher = matcher  # of the plan's constraint; advanced by the sampler
        self.watch = _watch(plan, token_text)  # advanced by the sampler
        self.schedule = ScheduleRecord()
        self.token_ids = plan.token_ids.growing()
        self.rewind_points: tuple[int, ...] = ()  # token counts to which a memory of a model with states can go back
        self.decoded_to = 0  # known once the turn has left its memory
        self.wants_cancel = False  # set from any thread
        self.leaves_prefix = True  # to a retry, if it is cancelled
        # What it holds on the MLX thread.
        self.kv: SequenceKV | None = None
        self.arrival: Arrival | None = None  # of its KV, while it is loaded
        self.sampler: Sampler | None = None
        self.drafts_from = 0  # tokens; no drafts are sought while it has fewer
        self.hidden: HiddenRows | None = None  # of a turn that makes an embedding
        self.known_chain: tuple[str, ...] = ()  # chain hashes of the first full blocks of its KV
        self.reservation: Reservation | None = None
        self.extended: ResidentMemory | None = None  # the agent's own, if it began with all of it
        self.swapped: SwappedOut | None = None  # while it is preempted
        self._stage = Status.WAITING  # PREFILLING also while it decodes
        self._was_preempted = False
        self._lost_to = 0  # tokens; up to there a preemption lost KV
        self._model = model
        self._full_reported = self._prefilled_reported = 0
        self._drafts_tried = self._drafts_right = self._drafts_coming = 0
        self._mask_passes = api.MaskPasses()
        self._clock = clock
        self._events: list[api.Event] = []
        self._reply = ReplyText(token_text, plan.sampling, model.stop_token_ids)
        self._submitted_s = clock()
        self._begun_s = self._restored_s = self._first_token_s = self._submitted_s
        self._spent = api.Timings()  # by another engine, which began the turn
        if plan.carried is not None:
            self._take_up(plan.carried)

    @property
    def status(self) -> Status:
        if self.arrival is not None and self.arrival.lacks_files:
            return Status.RESTORING
        cells, stage = self.cells, self._stage  # read several times a step
        return Status.DECODING if stage is Status.PREFILLING and cells.computed >= self._decodes_from else stage

    @property
    def finish_reason(self) -> api.FinishReason | None:
        return self._reply.finish_reason

    @property
    def is_cancelled(self) -> bool:
        """A cancel waits while KV that was lost is computed again, in its cells, if the part is kept that needs it."""
        return self.wants_cancel and not (self.cells.computed < self._lost_to and self.keeps_its_part)

    @property
    def keeps_its_part(self) -> bool:
        """Whether a cancel now leaves what the turn has so far, and not the memory as it was before."""
        has_generated = len(self.token_ids) > self.cells.prompt_tokens
        is_own = self.plan.carried is None  # what another engine began is its own until it gives it away
        return self.finish_reason is not None or (self.plan.keep_partial and has_generated and is_own)

    # --- as the scheduler sees it (`Schedulable`) ---

    @property
    def agent_key(self) -> api.AgentKey | None:
        """None before another engine gives the turn away: it may never do so, and the agent's turns do not wait."""
        return self.plan.key if self.plan.carried is None else None

    @property
    def is_masked(self) -> bool:
        if self.matcher is None or self.finish_reason is not None:
            return False
        return self.cells.computed >= len(self.token_ids) - 1  # not while a resumed turn computes what it had

    @property
    def masks_s(self) -> float:
        return self.matcher.worked_s if self.matcher is not None else 0.0

    @property
    def memory_key(self) -> Hashable | None:
        """The hot memory that the plan extends. None after a preemption, which took that memory's rows too."""
        return self.plan.key if isinstance(self.plan.reuse, api.Hot) and not self._was_preempted else None

    @property
    def can_be_preempted(self) -> bool:
        """False also if a cancel must leave the reply so far."""
        is_allowed = self.plan.can_be_preempted and not self.plan.keep_partial
        return is_allowed and not self.is_ending

    @property
    def can_be_held(self) -> bool:
        """Whether another engine could go on with it: not with a window of masks, which `api.CarriedTurn` lacks."""
        return self._model.mask_window is None

    @property
    def is_ending(self) -> bool:
        return self.finish_reason is not None

    @property
    def reusable_tokens(self) -> int:
        keep = 0 if isinstance(self.plan.reuse, api.Cold) else self.plan.reuse.keep_tokens
        return min(keep, self.cells.prompt_tokens - self.plan.generates)  # the reply begins at the prompt's last token

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """Chain hashes of the prompt's full blocks. Empty for a turn that shares them with no other."""
        shares = self.plan.replay is None or self.plan.replay.borrows
        if self.namespace is None or self.plan.pooling is not None or not shares:
            return ()
        known = self.known_chain[: self.cells.prompt_tokens // BLOCK_TOKENS]
        return chain_hashes(self._model.kv_identity_hash, self.token_ids[: self.cells.prompt_tokens], known)

    @property
    def shares_passes(self) -> bool:
        """An embedding needs the hidden rows of a pass of its own."""
        return self.plan.pooling is None

    @property
    def next_files(self) -> int:
        return 0 if self.arrival is None else self.arrival.load.next_files

    @property
    def awaits_bytes(self) -> bool:
        return self.arrival is not None and self.arrival.load.awaits_bytes

    def draws_after(self, count: int) -> bool:
        """Whether the next `count` tokens end the prompt and the reply's first token is sampled behind them."""
        window = self._model.mask_window
        if window is not None and not window.draws_next:  # it is one of the first window's
            return False
        ends_prompt = self.cells.computed + count == self.cells.prompt_tokens
        return ends_prompt and len(self.token_ids) == self.cells.prompt_tokens and self.plan.generates

    def leave_queue(self) -> None:
        self._begun_s = self._clock()

    def arrives(self, arrival: Arrival) -> None:
        """The turn's KV is loaded from files now. It ends with `began` or `resumed`."""
        self._stage, self.arrival = Status.LOADING, arrival

    def began(self, cached: int, shareable: int, *, is_shared: bool = False) -> None:
        """KV of the first `cached` tokens is there. `is_shared`: another turn or memory of the namespace gave it."""
        self.cells.begin(cached, shareable)
        if isinstance(self.plan.reuse, api.Restored):  # the files are KV now: do not hold them to the turn's end
            emptied = replace(self.plan.reuse, blobs=(), state=None, windows=(), incoming=None)
            self.plan = replace(self.plan, reuse=emptied)
        self._full_reported = self.cells.full_blocks
        self._restored_s = self._clock()
        self._stage, self.arrival = Status.PREFILLING, None
        waited_s, restore_s = self._begun_s - self._submitted_s, self._restored_s - self._begun_s
        self._events.append(api.Started(cached, is_shared, waited_s, restore_s))
        self._end_if_only_prompt()

    def preempted(self, files: tuple[FileBytes, ...]) -> None:
        self._stage, self._was_preempted = Status.PREEMPTED, True
        self._events.append(api.Preempted(files, self.cells.computed))

    def ask_for_files(self) -> None:
        self._stage = Status.RESTORING
        self._events.append(api.Wanted())

    def resumed(self, computed: int) -> None:
        """The turn goes on after a preemption. KV of the first `computed` tokens is there again; 0 if it was lost. The
        rest is computed as before, the prompt in its cells and the reply token by token, so that its KV has the same
        bits. No token is sampled or reported again. One that another engine began is held first.
        """
        self._stage = Status.PREFILLING if self.plan.carried is None else Status.HELD
        self.arrival = None
        self._events.append(api.Resumed(computed, self.cells.computed - computed))
        self._lost_to = self.cells.computed
        self.cells.resume(computed)

    def held(self) -> None:
        self._stage = Status.HELD
        self._events.append(api.Held())

    def released(self) -> None:
        """A held turn goes on, and is preempted like any other from now on."""
        if self._stage is Status.HELD:
            self._stage, self.plan = Status.PREFILLING, replace(self.plan, carried=None)

    def carried(self, sampler_key: tuple[int, ...], files: SwappedOut) -> api.CarriedTurn:
        return api.CarriedTurn(
            TokenIds(self.token_ids),
            files.tokens,
            self.cells.cached,
            self.cells.on_grid,
            sampler_key,
            files.rewind_points,
            files.first_blocks,
            self._timings(),
        )

    def _take_up(self, carried: api.CarriedTurn) -> None:
        """Be where another engine left the turn. What it told is not told again."""
        for token_id in carried.token_ids[self.cells.prompt_tokens :]:
            self.token_ids.append(token_id)
            self._reply.push(token_id)
        cells = self.cells
        cells.computed, cells.cached, cells.on_grid = carried.computed, carried.cached, carried.shareable
        self._prefilled_reported = min(carried.computed, cells.prompt_tokens)
        self.swapped = SwappedOut(carried.computed, carried.rewind_points, carried.first_blocks, 0)
        self._stage, self._was_preempted, self._spent = Status.PREEMPTED, True, carried.spent

    def next_tokens(self, count: int) -> list[int]:
        return self.token_ids[self.cells.computed : self.cells.computed + count].tolist()

    def prefilled(self, count: int) -> None:
        self.cells.prefilled(count)
        self._report_full_blocks()
        if self.cells.computed > self._prefilled_reported:
            self._prefilled_reported = self.cells.computed
            self._events.append(api.Prefilled(self.cells.computed, self.cells.prompt_tokens))
        self._end_if_only_prompt()

    def decoded(self, tokens: int = 1) -> None:
        cells = self.cells
        of_prompt = min(tokens, cells.rest_tokens) if cells.computed < cells.prompt_tokens else 0
        if of_prompt:
            self.prefilled(of_prompt)
        cells.computed += tokens - of_prompt
        self._report_full_blocks()

    def passed(self, rows: int) -> None:
        """A pass that fills masks computed so many rows of the turn; not yet `decoded`. The prompt's row is none of the
        reply, and behind the reply's end memory alone needs them.
        """
        rows -= self.cells.rest_tokens
        if rows and self.finish_reason is None:
            self._mask_passes = api.MaskPasses(self._mask_passes.passes + 1, self._mask_passes.rows + rows)

    def tried(self, drafts: int, right: int) -> None:
        """The next `right` tokens that are accepted were drafts. Those behind the reply's end never are."""
        self._drafts_tried += drafts
        self._drafts_coming = right

    def accept(self, token_id: int, logprobs: api.TokenLogprobs | None = None) -> None:
        """A token was sampled. Sets `finish_reason` if it is the last."""
        if len(self.token_ids) == self.cells.prompt_tokens:
            self._first_token_s = self._clock()
        if self._drafts_coming:
            self._drafts_coming -= 1
            self._drafts_right += 1
        self.token_ids.append(token_id)
        visible = self._reply.push(token_id)
        self._events.append(api.Tokens((token_id,), visible, () if logprobs is None else (logprobs,)))

    @property
    def remembered(self) -> int:
        if self.plan.replayed:  # it was remembered, wherever in a character a later turn has cut it
            return len(self.token_ids)
        return self.cells.prompt_tokens + len(self._reply.remembered)

    @property
    def computes_last(self) -> bool:
        """Whether a memory needs the KV of its last token, too: windows and states could not go back to before it where
        a step ahead has computed it, and a pass that fills masks computes all tokens that it commits.
        """
        return self._model.has_rewind_points or self._model.mask_window is not None

    @property
    def left_tokens(self) -> int:
        """The tokens whose KV the turn leaves: not that of a reply's last one, even where a step ahead has computed it.
        The agent's next turn computes it with its prompt.
        """
        ends_with_reply = self.remembered > self.cells.prompt_tokens
        return self.remembered - (ends_with_reply and not self.computes_last)

    def finish(self, error: KvasirError | None = None) -> None:
        """The turn is over: `remembered` tokens are remembered, or none after an error."""
        self._stage = Status.FINISHED
        self._events.append(self._ended() if error is None else api.Failed(error))

    def state(self) -> SequenceState:
        spelled = self._reply.remembered
        said = self.token_ids[self.cells.prompt_tokens : self.remembered]
        token_ids = self.plan.token_ids + TokenIds(said)
        token_chars = self.plan.token_chars + TokenChars(map(len, spelled))
        token_chars += TokenChars((0,) * (len(token_ids) - len(token_chars)))  # inside a character
        # States that were computed on shared rows would have to be shared too, so such a memory serves its own agent.
        shareable = 0 if self._model.has_states else self.cells.shareable
        pending = len(token_ids) - self.left_tokens
        return SequenceState(token_ids, token_chars, shareable, self.rewind_points, self.decoded_to, pending)

    def take_events(self) -> list[api.Event]:
        events, self._events = self._events, []
        return events

    def _report_full_blocks(self) -> None:
        if self.cells.full_blocks > self._full_reported:
            self._full_reported = self.cells.full_blocks
            self._events.append(api.BlocksFull(self.cells.full_blocks))

    def _end_if_only_prompt(self) -> None:
        if not self.plan.generates and not self.cells.rest_tokens:
            self._first_token_s = self._clock()
            self._reply.finish_reason = api.FinishReason.LENGTH

    def _ended(self) -> api.Ended:
        """The event at the end. After a cancel the text that was held back is reported first."""
        if self.finish_reason is None and (rest := self._reply.cut()):
            self._events.append(api.Tokens((), rest))
        assert self.finish_reason is not None
        return api.Ended(
            finish_reason=self.finish_reason,
            matched_stop=self._reply.matched_stop,
            prompt_tokens=self.cells.prompt_tokens,
            cached_tokens=self.cells.cached,
            completion_tokens=len(self.token_ids) - self.cells.prompt_tokens,
            drafted_tokens=self._drafts_tried,
            accepted_draft_tokens=self._drafts_right,
            mask_passes=self._mask_passes,
            timings=self._timings(),
            text=self._reply.visible,
            generated_text="".join(self._reply.remembered),
            state=self.state(),
            embedding=self.hidden.vector if self.hidden is not None else (),
        )

    def _timings(self) -> api.Timings:
        """Seconds up to now. While the prompt is computed, all of them are prefill."""
        has_generated = len(self.token_ids) > self.cells.prompt_tokens or self.finish_reason is not None
        spent, first_token_s = self._spent, self._first_token_s if has_generated else self._clock()
        return api.Timings(
            queue_s=spent.queue_s + self._begun_s - self._submitted_s,
            restore_s=spent.restore_s + self._restored_s - self._begun_s,
            prefill_s=spent.prefill_s + first_token_s - self._restored_s,
            first_token_s=spent.first_token_s + first_token_s - self._submitted_s,
            decode_s=spent.decode_s + self._clock() - first_token_s,
        )


def _watch(plan: api.TurnPlan, token_text: TokenText) -> ReasoningWatch | ReplayedReply | None:
    if (limit := plan.sampling.reasoning_limit) is not None:
        return ReasoningWatch(limit, token_text)
    return ReplayedReply(plan.replayed) if plan.replayed else None


def _rewind_point(plan: api.TurnPlan, model: ModelInfo) -> int:
    """Prompt tokens after which the memory must have a rewind point; 0 for none. Windows can go on from wherever their
    blocks are, so theirs is the prompt's last border of a block: up to there others may share it, and a pass over it
    would write only what a window sees at the pass's end.
    """
    if not model.has_rewind_points or plan.pooling is not None:
        return 0
    last = len(plan.token_ids) - 1
    point = last if plan.rewind_point_tokens is None else min(plan.rewind_point_tokens, last)
    return point if model.has_states else point // BLOCK_TOKENS * BLOCK_TOKENS
