"""The turns under way on one engine: begun, listed, ended from outside, drained. `turn_flow` serves each of them."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping

from kvasir import errors
from kvasir.server.shared_room import SharedRoom

from inference_svc.model.model_host import MemoriesLeft
from inference_svc.turns.choices import Choices
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.outbox import Outbox
from inference_svc.turns.prompt_text import prompt_text
from inference_svc.turns.turn_data import MessagesInput, OpenTurn, TokensInput, TurnFinished, TurnRequest
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_flow import TurnFlow
from inference_svc.turns.turn_state import TakenTurn, TurnState, TurnTask


class TurnService:
    """Runs turns over one engine."""

    def __init__(self, parts: EngineParts, ending: TurnEnding) -> None:
        """Must be made on the event loop that will run it."""
        self.stats = parts.stats
        self._parts = parts
        self._ending = ending
        self._flow = TurnFlow(parts, ending)
        self._running: dict[asyncio.Task[None], TurnState] = {}
        self._counting = SharedRoom(1)

    def begin(self, request: TurnRequest) -> Choices:
        """Start a turn for each choice. Raises ResourceExhausted when too many turns wait or run, of all callers or of
        this one.
        """
        outbox = self._parts.outbox(request.choices)
        return Choices(request, outbox, lambda choice: self._begin(choice, outbox))

    def take_over(self, request: TurnRequest, taken: Mapping[int, TakenTurn]) -> Choices:
        """Go on with the choices of a request that another engine began: each waits for `own` once it is ready. Raises
        as `begin`.
        """
        outbox = self._parts.outbox(len(taken))
        return Choices(request, outbox, lambda choice: self._begin(choice, outbox, taken[choice.choice]), sorted(taken))

    async def own(self, taken: Collection[TakenTurn]) -> None:
        """The other engine has given these turns away. Raises Unavailable (AGENT_HELD_ELSEWHERE)."""
        await asyncio.gather(*(self._flow.own(turn) for turn in self._running.values() if turn.taken in taken))

    def under_way(self, namespace: str | None = None) -> list[list[TurnState]]:
        """By request, the turns that have not ended: of a namespace, or of all."""
        requests: dict[Outbox, list[TurnState]] = {}
        for turn in self._running.values():
            if turn.request.namespace == namespace or namespace is None:
                requests.setdefault(turn.running.outbox, []).append(turn)
        return [turns for turns in requests.values() if not all(turn.running.has_ended for turn in turns)]

    def _begin(self, request: TurnRequest, outbox: Outbox, taken: TakenTurn | None = None) -> TurnTask:
        place = contextlib.ExitStack()
        place.enter_context(self._parts.admission.turn(request.namespace, request.caller, request.input_bytes))
        running = TurnTask(outbox, request.choice)
        turn = TurnState(request, running, arrived=self._parts.clock(), taken=taken)
        if taken is not None:
            turn.arrived -= taken.begun.age_s
            first_token_s = taken.begun.first_token_s
            turn.first_token_at = None if first_token_s is None else turn.arrived + first_token_s
        task = asyncio.create_task(self._flow.run(turn))
        self._running[task] = turn
        task.add_done_callback(self._running.pop)
        task.add_done_callback(lambda _: place.close())
        return running

    @property
    def is_idle(self) -> bool:
        """Whether no turn waits or runs."""
        return not self._running

    async def drain(self, patience_s: float) -> None:
        """Wait for the running turns, end those that take longer, then wait for publications."""
        for turn in self._running.values():
            turn.running.end_work_behind()
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)
        for turn in list(self._running.values()):
            turn.running.end_work_behind()
            turn.running.cancel(
                errors.Unavailable("the model is going away", reason="SHUTTING_DOWN", retry_after_s=1.0)
            )
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)
        await self._ending.drain(patience_s)

    def open_turns(self, namespace: str) -> list[OpenTurn]:
        """The namespace's turns that wait or run, the oldest first."""
        now_s = self._parts.clock()
        return [
            OpenTurn(
                turn.request.request_id,
                turn.request.agent_id,
                turn.request.choice,
                turn.has_begun,
                now_s - turn.arrived,
                turn.prompt_tokens,
                turn.cached_tokens,
                turn.completion_tokens,
            )
            for turn in self._running.values()
            if turn.request.namespace == namespace and not (turn.request.is_warming or turn.running.has_ended)
        ]

    async def stop(self, namespace: str, request_id: str) -> dict[int, TurnFinished]:
        """End a request's turns; by choice, how they ended. Raises NotFound if none is under way."""
        named = {
            task: turn
            for task, turn in self._running.items()
            if (turn.request.namespace, turn.request.request_id) == (namespace, request_id)
            and not turn.running.has_ended
        }
        if not named:
            raise errors.NotFound(
                f"request_id: no turn of {request_id!r} is under way",
                reason="TURN_NOT_FOUND",
                field="request_id",
                metadata={"request_id": request_id},
            )
        for turn in named.values():
            turn.running.stop()
        await asyncio.wait(named)
        ends = {turn.request.choice: turn.running.finished for turn in named.values()}
        return {choice: end for choice, end in ends.items() if end is not None}

    async def store_hot(self, patience_s: float) -> MemoriesLeft:
        """After `drain`: store the hot memories that are not in the store."""
        return await self._ending.store_hot(patience_s)

    def close(self) -> None:
        """Nothing is tried again from now on."""
        self._ending.close()

    async def count_tokens(self, request: TurnRequest) -> int:
        """Tokens of the prompt of a turn that finds no memory. Takes a turn's place: raises ResourceExhausted. Counts
        run one after the other, namespaces in turn. They use a copy of the tokenizer, so that no turn waits for them
        except while the first count makes that copy.
        """
        given = request.input
        if isinstance(given, TokensInput):
            return len(given.token_ids)
        messages = given.messages if isinstance(given, MessagesInput) else ()
        with self._parts.admission.turn(request.namespace, request.caller, request.input_bytes):
            async with self._counting.held_for(request.namespace, 1):
                counter = await self._parts.prompting.twin(request.namespace)
                text, _ = await prompt_text(counter, request, messages, counter.clock())
                return len((await counter.run(request.namespace, lambda: counter.tokenize(text))).ids)
