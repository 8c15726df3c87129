"""The turns under way on one engine: begun, listed, ended from outside, drained. `turn_flow` serves each of them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from dataclasses import replace

from kvasir import errors
from kvasir.server.shared_room import SharedRoom
from kvasir.waits import LOOK_S

from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.progress import Outbox, Progress, TakenTurn, TurnTiming
from inference_svc.turns.prompts.texts import check_length, prompt_text
from inference_svc.turns.turn_data import MessagesInput, TokensInput, TurnEvent, TurnFinished, TurnRequest
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_flow import TurnFlow

_SEEDS = 1 << 64


class Choices:
    def __init__(
        self,
        request: TurnRequest,
        outbox: Outbox,
        begin: Callable[[TurnRequest], Progress],
        left: Iterable[int] | None = None,
    ) -> None:
        """Begin every choice, or those `left`, choice i with the seed + i. If `begin` raises, none of them runs."""
        self._outbox = outbox
        self._turns: list[Progress] = []
        sampling = request.sampling
        try:
            for choice in range(request.choices) if left is None else left:
                seeded = replace(sampling, seed=(sampling.seed + choice) % _SEEDS)
                self._turns.append(begin(replace(request, choice=choice, sampling=seeded)))
        except BaseException:
            self.cancel()
            raise

    def events(self) -> AsyncGenerator[tuple[int, TurnEvent], None]:
        """Each event with the index of its choice; those of one choice are in order: Started first, the end last. The
        choice that begins first reports the beginning and the progress. The first failure ends the stream, as a
        KvasirError.
        """
        return self._outbox.events()

    def cancel(self) -> None:
        for turn in self._turns:
            turn.cancel()


class TurnService:
    def __init__(self, parts: EngineParts, ending: TurnEnding) -> None:
        self._parts = parts
        self._ending = ending
        self._flow = TurnFlow(parts, ending)
        self._running: dict[asyncio.Task[None], Progress] = {}
        self._counting = SharedRoom(1)

    def begin(self, request: TurnRequest, *, is_own: bool = False) -> Choices:
        """Start a turn for each choice. Raises ResourceExhausted when too many wait or run. `is_own`: the engine's own,
        which a caller's turn ends: that one is not refused for it.
        """
        outbox = self._parts.outbox(request.choices)
        return Choices(request, outbox, lambda choice: self._begin(choice, outbox, is_own=is_own))

    def take_over(self, request: TurnRequest, taken: Mapping[int, TakenTurn]) -> Choices:
        """Go on with choices that another engine began: each waits for `own` once it is ready. Raises as `begin`."""
        outbox = self._parts.outbox(len(taken))
        return Choices(request, outbox, lambda choice: self._begin(choice, outbox, taken[choice.choice]), sorted(taken))

    async def own(self, taken: Collection[TakenTurn]) -> None:
        """The other engine has given these turns away. Raises Unavailable (AGENT_HELD_ELSEWHERE)."""
        await asyncio.gather(*(self._flow.taken.own(turn) for turn in self._running.values() if turn.taken in taken))

    def under_way(self, namespace: str | None = None) -> list[list[Progress]]:
        """By request, the turns that have not ended: of a namespace, or of all."""
        requests: dict[Outbox, list[Progress]] = {}
        for turn in self._running.values():
            if turn.request.namespace == namespace or namespace is None:
                requests.setdefault(turn.outbox, []).append(turn)
        return [turns for turns in requests.values() if not all(turn.phase.has_ended for turn in turns)]

    def _begin(
        self, request: TurnRequest, outbox: Outbox, taken: TakenTurn | None = None, *, is_own: bool = False
    ) -> Progress:
        place = contextlib.ExitStack()
        if not is_own:
            origin = request.origin
            place.enter_context(self._parts.admission.turn(request.namespace, origin.caller, origin.size_bytes))
        times = TurnTiming(self._parts.clock())
        if taken is not None:
            times.arrived -= taken.begun.age_s
            first_token_s = taken.begun.first_token_s
            times.first_token_at = None if first_token_s is None else times.arrived + first_token_s
        turn = Progress(request, outbox, times, self._parts.stats.of(request.namespace), taken)
        task = asyncio.create_task(self._flow.run(turn))
        self._running[task] = turn
        task.add_done_callback(self._running.pop)
        task.add_done_callback(lambda _: place.close())
        return turn

    @property
    def is_idle(self) -> bool:
        return not self._running

    async def drain(self, patience_s: float) -> None:
        """Wait for the running turns, end those that take longer, then wait for publications."""
        self._end_work_behind()
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)
        self._end_work_behind()
        for turn in list(self._running.values()):
            turn.cancel(errors.Unavailable("the model is going away", reason="SHUTTING_DOWN", retry_after_s=1.0))
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)
        await asyncio.gather(*(lines.drain(patience_s) for lines in self._parts.recall.lines.values()))

    def _end_work_behind(self) -> None:
        """End what tasks still do for turns whose readers have the end."""
        for task, turn in self._running.items():
            if turn.phase.has_ended:
                task.cancel()

    def open_turns(self, namespace: str) -> dict[Progress, float]:
        """The namespace's turns that wait or run, the oldest first; and for how many seconds."""
        open_ = (
            turn for turn in self._running.values() if turn.request.namespace == namespace and not turn.phase.has_ended
        )
        now_s = self._parts.clock()
        return {turn: now_s - turn.times.arrived for turn in open_ if not turn.request.is_warming}

    async def stop(self, namespace: str, request_id: str) -> dict[int, TurnFinished]:
        """End a request's turns; by choice, how they ended. Raises NotFound if none is under way."""
        named = [
            turn
            for turn in self._running.values()
            if (turn.request.namespace, turn.request.request_id) == (namespace, request_id) and not turn.phase.has_ended
        ]
        if not named:
            raise errors.NotFound.of(
                "request_id", f"no turn of {request_id!r} is under way", reason="TURN_NOT_FOUND", request_id=request_id
            )
        for turn in named:
            turn.stop()
        while not all(turn.phase.has_ended for turn in named):  # noqa: ASYNC110  a task may go on behind its turn's end
            await asyncio.sleep(LOOK_S)
        ends = {turn.request.choice: turn.finished for turn in named}
        return {choice: end for choice, end in ends.items() if end is not None}

    async def count_tokens(self, request: TurnRequest) -> int:
        """Tokens of the prompt of a turn that finds no memory. Takes a turn's place: raises ResourceExhausted. Counts
        run one after the other, namespaces in turn. They use a copy of the tokenizer, so that no turn waits for them
        except while the first count makes that copy.
        """
        given = request.input
        if isinstance(given, TokensInput):
            return len(given.token_ids)
        messages = given.messages if isinstance(given, MessagesInput) else ()
        with self._parts.admission.turn(request.namespace, request.origin.caller, request.origin.size_bytes):
            async with self._counting.held_for(request.namespace, 1):
                counter = await self._parts.prompting.twin(request.namespace)
                text, _ = await prompt_text(counter, request, messages, counter.clock())
                check_length(self._parts.engine, counter, text, given.name)
                return len((await counter.run(request.namespace, lambda: counter.tokenize(text))).ids)
