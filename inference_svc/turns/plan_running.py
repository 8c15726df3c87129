"""Plans a turn and lets the plan run; plans again where the memory that it reuses went away in between."""

import asyncio
import contextlib
from bisect import bisect_right
from dataclasses import replace

import structlog
from kvasir import errors
from kvasir.formats.manifest import tokens_within_chars

from inference_svc.engine.api import DamagedFile, HotMemoryGone, Keeps, TurnPlan
from inference_svc.engine.engine import Engine, check_fits
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_plan import Prepared
from inference_svc.memory.reuse_planning import NOTHING_REFUSED, Avoid, ComparedPrompt
from inference_svc.memory.store.patience import Budget
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import Planned, Prompted, Ran
from inference_svc.turns.progress import Progress
from inference_svc.turns.prompts.texts import check_length, rewind_point_chars
from inference_svc.turns.turn_data import TurnRequest
from inference_svc.turns.turn_reporter import HandOff, TurnReporter

_LOG = structlog.get_logger(__name__)
# Of the tokens that fit behind a prompt, a reply that wants more may take one of so many parts, or so many tokens.
_CLAMPED_PART, _LEAST_CLAMPED = 4, 512
# Between planning and running, hot memory may be dropped and a file may be refused: plan again this often.
_MAX_PLANS = 4


class MemoryMovedError(Exception):
    """The agent's newest version is no longer the one that the turn was planned on."""


class PlanRunner:
    """Runs the plans of one engine's turns. Made on the event loop that will run it."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._handoff = HandOff(asyncio.get_running_loop())

    async def plan_and_run(self, prompted: Prompted, turn: Progress, budget: Budget) -> Ran:
        """Plan and run the turn; plan again when the memory that the plan reuses went away in between."""
        request, recollection, avoid = prompted.request, prompted.recalled.recollection, NOTHING_REFUSED
        if prompted.tokens is None:
            check_length(self._parts.engine, self._parts.prompting, prompted.text, request.input.name)
        lasting_chars: int | None = None
        if self._parts.engine.model.has_rewind_points:
            lasting_chars = await rewind_point_chars(self._parts.prompting, prompted)
        for _ in range(_MAX_PLANS):
            with contextlib.ExitStack() as restoring:
                try:
                    planned = await self._planned(prompted, recollection, avoid, lasting_chars, restoring, budget)
                    turn.times.restore_s = budget.spent_s
                    return await self.run(planned, turn)
                except HotMemoryGone:
                    if request.key is None:
                        raise
                    found = await self._parts.recall.newest(request.key, budget)
                    recollection = _same_version(recollection, found)
                except DamagedFile as refused:
                    # The bytes have their digest and are still no valid file. The stored tokens are known, so the turn
                    # computes them again from there on.
                    avoid, what = avoid.also(refused)
                    _LOG.warning("restore.refused", request_id=request.request_id, what=what)
        raise moved_away()

    async def _planned(
        self,
        prompted: Prompted,
        recollection: Recollection,
        avoid: Avoid,
        lasting_chars: int | None,
        restoring: contextlib.ExitStack,
        budget: Budget,
    ) -> Planned:
        """The prompt with the KV that it reuses. `restoring` gets what ends the reading of it."""
        request, room = prompted.request, self._parts.admission.restoring

        async def hold(size_bytes: int) -> None:
            await room.wait_for(request.namespace, size_bytes)
            restoring.callback(room.give_back, request.namespace, size_bytes)

        prompt = ComparedPrompt(request.namespace, prompted.text, prompted.tokens, generates=not request.is_warming)
        prepared = await self._parts.planner.plan(recollection, prompt, budget, hold, avoid)
        restoring.callback(prepared.stop_reading)
        await self._check_line(request, budget)
        if prompted.reply is not None:
            prepared = replace(prepared, tokens=prepared.tokens + prompted.reply)
        lasting = None if lasting_chars is None else tokens_within_chars(prepared.tokens.chars, lasting_chars)
        return Planned(prompted, recollection, prepared, self.plan(prompted, prepared, lasting), restoring)

    async def _check_line(self, request: TurnRequest, budget: Budget) -> None:
        """Wait for the store's answer about the line. Raises MemoryMovedError when another engine or store has it."""
        if (line := self._parts.recall.line(request.extended)) is not None:
            await line.lease.answered(budget)
            if line.lease.is_elsewhere and line.store.connection.is_reachable:
                raise MemoryMovedError

    def plan(self, prompted: Prompted, prepared: Prepared, rewind_point_tokens: int | None) -> TurnPlan:
        """The engine's plan, without the KV that is reused."""
        request, count = prompted.request, len(prepared.tokens.ids)
        engine, is_kept = self._parts.engine, prompted.recalled.is_kept
        if not count:
            name = request.input.name
            raise errors.InvalidArgument.of(name, "expected at least one token")
        sampling = request.sampling
        if request.clamps_max_tokens:
            sampling = replace(sampling, max_tokens=_clamped(sampling.max_tokens, engine, count))
        check_fits(count, sampling.max_tokens, engine.model.context_tokens, field=request.input.name)
        if (most := request.prompt.most_reasoning_tokens) is not None:
            sampling = replace(sampling, reasoning_limit=self._parts.prompting.reasoning_limit(most, prepared.text))
        keeps = Keeps.PARTIAL if request.memory.keep_partial else Keeps.WHOLE
        if not is_kept:
            keeps = Keeps.WHOLE if request.is_warming else Keeps.NOTHING
        return TurnPlan(
            token_ids=prepared.tokens.ids,
            token_chars=prepared.tokens.chars,
            sampling=sampling,
            key=request.key,
            keeps=keeps,
            pace=request.pace,
            namespace=request.namespace,
            rewind_point_tokens=rewind_point_tokens,
            # Rows that it has of a memory which stays hot are that memory's.
            can_be_preempted=prepared.can_be_preempted and (is_kept or not request.agent_id),
        )

    async def run(self, planned: Planned, turn: Progress) -> Ran:
        if turn.is_cancelled:
            raise errors.Cancelled("the turn was cancelled")
        return await TurnReporter(planned, turn, self._parts, self._handoff).run()


def _same_version(planned: Recollection, found: Recollection) -> Recollection:
    """`found`, if it has the version that the turn's prompt was made from. Raises MemoryMovedError otherwise."""
    if found.head is None:
        # The store cannot be reached now. The turn extends the planned version, or what the planned memory has become
        # since: while that is on its way, it is requested when the turn is stored. Compare-and-swap decides at the end.
        head, publication = planned.head, planned.memory.publication if planned.memory is not None else None
        if publication is not None and (publication.is_running or publication.standing.is_stored):
            head = None if publication.is_running else publication.standing.head
        return replace(found, head=head, base=planned.base)
    if planned.head is None or (found.head.version, found.head.manifest) != (
        planned.head.version,
        planned.head.manifest,
    ):
        raise MemoryMovedError
    return replace(found, base=planned.base)


def moved_away() -> errors.Unavailable:
    return errors.Unavailable("the agent's memory went away while the turn was planned", retry_after_s=1.0)


def _clamped(max_tokens: int, engine: Engine, prompt_tokens: int) -> int:
    """The length of a reply that may be shorter: all of it is reserved, and clients want more than there is."""
    left, budget_bytes = engine.model.context_tokens - prompt_tokens, engine.memory_budget_bytes
    counts = range(max(left, 0) + 1)
    in_memory = bisect_right(counts, budget_bytes, key=lambda new: engine.needed_bytes(prompt_tokens + new)) - 1
    fitting = min(left, in_memory)  # below 0: there is not even room for the prompt
    if max_tokens <= fitting:
        return max_tokens
    return max(fitting // _CLAMPED_PART, min(fitting, _LEAST_CLAMPED), 1)
