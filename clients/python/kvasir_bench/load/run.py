"""One run of a load: turns arrive at a server at a rate of their own, or so many are always in flight."""

import asyncio
import math
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from random import Random
from typing import Any, Protocol

from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument, KvasirError
from kvasir.waits import PAUSE_S, PROGRESS_S

from kvasir_bench.load.arithmetic import Arrived, Lengths, Limits, LoadTurn, TurnFailed, Window, arrivals, findings
from kvasir_bench.program import MEASURED_WITHIN_S

_WORDS = 64  # by which the tokens of a word are counted
_GUESSED_TOKENS_PER_WORD = 3.0  # a word is five digits


@dataclass(frozen=True, slots=True)
class LoadScope:
    """Poisson arrivals for `seconds` or until there are `requests`; with `at_once` so many callers in turn instead."""

    prompt_tokens: Lengths
    reply_tokens: Lengths
    rate_per_s: float = 1.0
    at_once: int | None = None
    seconds: float | None = None
    requests: int | None = None
    ramp_s: float = 0.0
    shared_prefix: int = 0  # tokens of a system prompt that all turns begin with
    turns: int = 1  # of each agent, which remembers them if it comes back
    seed: int = 0
    limits: Limits | None = None

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        if (self.seconds is None) == (self.requests is None):
            raise InvalidArgument.of("requests", "expected seconds or requests, got both or none")
        if self.ramp_s and (self.seconds is None or self.ramp_s >= self.seconds):
            raise InvalidArgument.of("ramp", "expected to be shorter than the run, and none of requests")

    @property
    def settings(self) -> dict[str, Any]:
        lengths = {"prompt_tokens": str(self.prompt_tokens), "reply_tokens": str(self.reply_tokens)}
        return {**asdict(self), **lengths}


@dataclass(slots=True)
class LoadAgent:
    """A conversation. One without a name has one turn, and is not remembered."""

    name: str
    turns_left: int
    messages: list[dict[str, str]]


class LoadTarget(Protocol):
    """The server that the turns are sent to."""

    # What a message's tokens are counted by, unless the server reports their total at the end.
    counts: str

    async def tokens_per_word(self, text: str) -> float | None:
        """None where the server does not count prompts. Raises KvasirError when it does not answer."""

    def turn(self, agent: LoadAgent, max_tokens: int) -> AsyncGenerator[Arrived, None]:
        """The agent's next turn, whose message is the last. Raises TurnFailed."""

    async def forget(self, agents: Sequence[str]) -> None:
        """Remove what the server remembers of them, as far as it can."""


class GrpcTarget:
    counts = "token_ids"

    def __init__(self, client: AioInferenceClient) -> None:
        self._client = client

    async def tokens_per_word(self, text: str) -> float:
        return await self._client.count_tokens(prompt=text) / len(text.split())

    async def turn(self, agent: LoadAgent, max_tokens: int) -> AsyncGenerator[Arrived, None]:
        goes_on = any(message["role"] == "assistant" for message in agent.messages)
        messages, added = (None, agent.messages[-1:]) if goes_on else (agent.messages, None)
        turn = self._client.generate(
            messages=messages,
            append_messages=added,
            agent_id=agent.name,
            sampling={"max_tokens": max_tokens, "temperature": 0},  # as over HTTP, whatever the model's own setting is
            timeout_s=MEASURED_WITHIN_S,
        )
        try:
            async with aclosing(turn) as events:
                async for event in events:
                    yield Arrived(len(event.delta.token_ids))
        except KvasirError as error:
            raise TurnFailed(error.reason or type(error).__name__) from None

    async def forget(self, agents: Sequence[str]) -> None:
        for name in agents:
            with suppress(KvasirError):
                await self._client.delete_agent(name)


async def run(
    target: LoadTarget,
    scope: LoadScope,
    say: Callable[[str], None] = lambda _: None,
    *,
    tokens_per_word: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Send the turns and wait for all of them. The results as `report.KEYS` describes; a turn that fails is counted."""
    load, load_before = _Load(target, scope, tokens_per_word or _GUESSED_TOKENS_PER_WORD, clock), os.getloadavg()[0]
    reporting = asyncio.create_task(load.report(say))
    try:
        await load.run()
    finally:
        reporting.cancel()
        await target.forget(load.remembered)
    turns = load.turns
    window = Window(scope.ramp_s, scope.seconds or max(turn.ended_s or 0.0 for turn in turns))
    # So many requests have arrived long before a slow server has ended them.
    arriving_s = window.length_s if scope.seconds else max(turn.due_s for turn in turns)
    offered = None if scope.at_once else sum(turn.most_tokens for turn in turns if turn.due_s in window) / arriving_s
    return {
        "offered_tokens_per_s": offered,
        **findings(turns, window, scope.limits),
        "tokens_counted_by": dict(
            Counter(target.counts if turn.total_tokens is None else "usage" for turn in turns if turn.deltas)
        ),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


async def tokens_per_word(target: LoadTarget, scope: LoadScope) -> float | None:
    """Of the load's texts, as the server counts. Raises KvasirError."""
    return await target.tokens_per_word(next(_texts(Random(scope.seed), lambda: _WORDS)))  # noqa: S311 - repeatable


class _Load:
    """Turns that arrive. In the order of their arrival they have the same texts and lengths at every server."""

    def __init__(
        self, target: LoadTarget, scope: LoadScope, tokens_per_word: float, clock: Callable[[], float]
    ) -> None:
        def words(tokens: int) -> int:
            return max(1, round(tokens / tokens_per_word))

        self.turns: list[LoadTurn] = []
        self._target = target
        self._scope = scope
        self._clock, self._began_s = clock, clock()
        self._lengths, texts = Random(f"lengths {scope.seed}"), Random(scope.seed)  # noqa: S311 - repeatable
        self._texts = _texts(texts, lambda: words(scope.prompt_tokens.draw(self._lengths)))
        prefix = next(_texts(Random(f"prefix {scope.seed}"), lambda: words(scope.shared_prefix)))  # noqa: S311
        self._begin = [{"role": "system", "content": prefix}] if scope.shared_prefix else []
        self._name = f"bench-load/{uuid.uuid4().hex[:8]}"
        self.remembered: list[str] = []  # names of agents
        self._idle: deque[LoadAgent] = deque()

    def now(self) -> float:
        return self._clock() - self._began_s

    async def run(self) -> None:
        scope, seconds = self._scope, self._scope.seconds or math.inf
        async with asyncio.TaskGroup() as sending:
            for _ in range(scope.at_once or 0):
                sending.create_task(self._caller(seconds))
            due = arrivals(scope.rate_per_s, 0.0 if scope.at_once else seconds, scope.seed)
            for due_s in islice(due, scope.requests):
                await asyncio.sleep(max(0.0, due_s - self.now()))
                sending.create_task(self._send(due_s))

    async def report(self, say: Callable[[str], None]) -> None:
        """Show every few seconds how far it is; until it is cancelled."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            ended = sum(turn.ended_s is not None for turn in self.turns)
            say(f"[{self.now():.0f} s] {len(self.turns)} turns arrived, {len(self.turns) - ended} in flight")

    async def _caller(self, seconds: float) -> None:
        while self.now() < seconds and len(self.turns) < (self._scope.requests or math.inf):
            if not (await self._send(self.now())).is_whole:
                await asyncio.sleep(PAUSE_S)  # a refusal costs no time: refusals would be the load

    async def _send(self, due_s: float) -> LoadTurn:
        agent, turn = self._next_agent(), LoadTurn(due_s)
        self.turns.append(turn)
        agent.messages.append({"role": "user", "content": next(self._texts)})
        turn.most_tokens = self._scope.reply_tokens.draw(self._lengths)
        reply = ""
        try:
            async with aclosing(self._target.turn(agent, turn.most_tokens)) as arriving:
                async for arrived in arriving:
                    turn.add(arrived, self.now())
                    reply += arrived.text
        except TurnFailed as failure:
            turn.failure = str(failure)
        turn.ended_s = self.now()
        if turn.is_whole:
            agent.messages.append({"role": "assistant", "content": reply})
            if agent.turns_left:
                self._idle.append(agent)
        return turn

    def _next_agent(self) -> LoadAgent:
        if not self._idle:
            turns, name = self._scope.turns, ""
            if turns > 1:
                name = f"{self._name}/{len(self.remembered) + 1}"
                self.remembered.append(name)
            self._idle.append(LoadAgent(name, turns, [*self._begin]))
        agent = self._idle.popleft()
        agent.turns_left -= 1
        return agent


def _texts(random: Random, words: Callable[[], int]) -> Iterator[str]:
    """Texts that differ from their first word on."""
    while True:
        yield " ".join(str(random.randrange(10_000, 100_000)) for _ in range(words()))
