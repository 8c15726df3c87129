"""Runs a scenario: every turn as soon as those that it waits for are done, so the conversation is always the same."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from kvasir.errors import DeadlineExceeded, Internal, KvasirError, Unavailable
from kvasir.on_full import from_label

from kvasir_orchestrator.events import Event, ReplyPiece, RunDone, RunStarted, TurnDone, TurnRetried, TurnStarted
from kvasir_orchestrator.journal import Journal
from kvasir_orchestrator.memory import Answer, Memory, ReplyRequest
from kvasir_orchestrator.outcomes import checked
from kvasir_orchestrator.plan import Turn
from kvasir_orchestrator.scenario import Scenario

# Reasons for which a turn never fits, though the service names a time to try again.
_NEVER = ("CONTEXT_EXCEEDED", "MEMORY_EXCEEDED")
_MOST_DOUBLINGS = 64  # a run may wait for its engine overnight, and 2.0**1024 is no float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """What happens to a turn that breaks. Each wait is twice the last, up to the longest, or what the engine wants."""

    times: int = 6
    wait_s: float = 0.5
    longest_s: float = 10.0

    def wait(self, error: KvasirError, attempt: int) -> float | None:
        """Seconds until a turn is tried again, after so many attempts; None: no more."""
        is_passing = isinstance(error, Unavailable | DeadlineExceeded | Internal) or error.retry_after_s is not None
        if not is_passing or error.reason in _NEVER or attempt > self.times:
            return None
        doublings = min(attempt - 1, _MOST_DOUBLINGS)
        return max(min(self.wait_s * 2.0**doublings, self.longest_s), error.retry_after_s or 0.0)


async def run(
    scenario: Scenario,
    memory: Memory,
    *,
    journal: Journal | None = None,
    retries: Retries = Retries(),
    parallel: int = 16,
    new_id: Callable[[], uuid.UUID] = uuid.uuid4,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[Event, None]:
    """Run a scenario, or the rest that its journal lacks, at most `parallel` turns at once. Closing it stops the turns.
    Raises what broke a turn for good; a run with a journal can be gone on with."""
    run_id = journal.run_id if journal else new_id().hex
    runner = _Runner(scenario, memory, journal, retries, run_id, sleep)
    try:
        async with aclosing(runner.events(parallel)) as events:
            async for event in events:
                yield event
    finally:
        await runner.stop()


async def forget(scenario: Scenario, memory: Memory, run_id: str, *, permanent: bool) -> list[str]:
    """Delete a run's agents, and `permanent` ones; returns their names. Agents with an `id` may be somebody's own."""
    forgotten = []
    for key, agent in scenario.agents.items():
        if agent.id is None and (permanent or agent.lifetime == "ephemeral"):
            forgotten.append(scenario.agent_id(key, run_id))
            await memory.forget(forgotten[-1], agent.namespace)
    return forgotten


class _Runner:
    """A run under way. Turns are tasks that put events into a queue; all else happens where the events are read."""

    def __init__(
        self,
        scenario: Scenario,
        memory: Memory,
        journal: Journal | None,
        retries: Retries,
        run_id: str,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._scenario, self._memory, self._journal, self._retries = scenario, memory, journal, retries
        self._run_id, self._sleep = run_id, sleep
        self._answers: dict[int, Answer] = {}
        self._said: dict[int, str] = {}
        self._queue: asyncio.Queue[Event | KvasirError | tuple[Turn, Answer]] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def events(self, parallel: int) -> AsyncGenerator[Event, None]:
        turns = self._scenario.plan.turns
        done = dict(sorted(self._journal.answers.items())) if self._journal else {}
        yield RunStarted(self._run_id, len(turns), len(done))
        for index, answer in done.items():
            yield self._keep(turns[index], answer, is_from_journal=True)
        self._begin(parallel)
        while len(self._answers) < len(turns):
            event = await self._queue.get()
            if isinstance(event, KvasirError):
                raise event
            if isinstance(event, tuple):
                turn, answer = event
                del self._tasks[turn.index]
                event = self._keep(turn, answer)
                self._begin(parallel)
            yield event
        met = []
        for outcome in checked(self._scenario, self._said):
            met.append(outcome.is_met)
            yield outcome
        forgotten = await forget(self._scenario, self._memory, self._run_id, permanent=False)
        if self._journal and not self._journal.is_finished:
            self._journal.finish()
        later = [self._answers[turn.index] for turn in turns if not self._is_first(turn)]
        extended = sum(answer.match == "extend" or answer.source == "replay" for answer in later)
        prompt_tokens = sum(answer.prompt_tokens for answer in self._answers.values())
        new_tokens = sum(answer.new_tokens for answer in self._answers.values())
        yield RunDone(sum(met), len(met), forgotten, extended, len(later), prompt_tokens, new_tokens)

    async def stop(self) -> None:
        """Cancel the turns that run, and wait until they have ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, parallel: int) -> None:
        """Start the turns that wait for nothing more, the earliest first."""
        for turn in self._scenario.plan.turns:
            if len(self._tasks) >= parallel:
                return
            if turn.index not in self._said and turn.index not in self._tasks and turn.after <= self._said.keys():
                self._tasks[turn.index] = asyncio.create_task(self._run_turn(turn))

    async def _run_turn(self, turn: Turn) -> None:
        """One turn. However it ends, its end comes to the queue, and nobody waits for ever."""
        try:
            asked = self._asked(turn)
            answer = await self._until_whole(asked)
            if self._journal:
                self._journal.record(turn, asked.request_id, answer)
        except KvasirError as error:
            self._queue.put_nowait(error)
        except Exception as error:  # noqa: BLE001  a disk that is full among them
            self._queue.put_nowait(Internal(f"{type(error).__name__}: {error}"))
        else:
            self._queue.put_nowait((turn, answer))

    async def _until_whole(self, asked: ReplyRequest) -> Answer:
        """A turn's answer. Raises what breaks it when its retries are used up."""
        self._queue.put_nowait(TurnStarted(asked.turn, asked.new))
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._ask(asked)
            except KvasirError as error:
                wait_s = self._retries.wait(error, attempt)
                if wait_s is None:
                    raise
                self._queue.put_nowait(TurnRetried(asked.turn, error, attempt, wait_s))
            await self._sleep(wait_s)

    async def _ask(self, asked: ReplyRequest) -> Answer:
        async with aclosing(self._memory.ask(asked)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Answer):
                    return piece
                self._queue.put_nowait(ReplyPiece(asked.turn, piece))
        raise Internal("the turn ended without an answer")

    def _asked(self, turn: Turn) -> ReplyRequest:
        scenario, sampling = self._scenario, self._scenario.file.sampling
        phase, agent = scenario.phases[turn.phase], scenario.agents[turn.agent]
        before = [each for each in scenario.plan.of_agent(turn.agent) if each.index < turn.index]
        return ReplyRequest(
            turn=turn,
            agent_id=scenario.agent_id(turn.agent, self._run_id),
            namespace=agent.namespace,
            request_id=f"scenario-{self._run_id}-{turn.index}",
            new=scenario.new_messages(turn, self._said),
            transcript=scenario.transcript(turn.agent, self._said, until=turn.index),
            version=self._answers[before[-1].index].version if before else None,
            max_tokens=phase.max_tokens or sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed + turn.index,
            regex=phase.reply_regex,
            on_full=None if agent.on_full is None else from_label(agent.on_full),
        )

    def _keep(self, turn: Turn, answer: Answer, *, is_from_journal: bool = False) -> TurnDone:
        self._answers[turn.index], self._said[turn.index] = answer, answer.text
        new = self._scenario.new_messages(turn, self._said)
        return TurnDone(turn, new, answer, self._is_first(turn), is_from_journal)

    def _is_first(self, turn: Turn) -> bool:
        return self._scenario.plan.of_agent(turn.agent)[0].index == turn.index
