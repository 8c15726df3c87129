"""`kvasir bench load`: turns arrive at a running engine at a rate of their own, or so many are always in flight.

The client is one asynchronous process. Each turn is cold, has its own text, and is not remembered. Over gRPC all turns
share one connection; over HTTP (`load_http`) each has one while it runs.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Protocol

from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument, KvasirError

from kvasir_bench.load.arithmetic import Arrived, LoadTurn, TurnFailed, Window, arrivals, findings

_WORDS = 64  # by which the tokens of a word are counted
_GUESSED_TOKENS_PER_WORD = 3.0  # a word is five digits
PATIENCE_S = 600.0  # for the last turns
_PROGRESS_S = 5.0
_COLUMNS = ("mean", "p50", "p95", "p99", "largest")
KEYS = """Names in the JSON stay. `settings` are the options. `phases` are the turns that arrived in the ramp and in the
steady state, and the seconds from the last arrival until all had ended (`tail_s`). `first_token_s` and `end_to_end_s`,
counted from the moment that a turn was due, are those of turns that arrived in the steady state; `gap_s`, between two
messages of a turn, and `tokens_per_s` are those of the steady state, whoever's. Each has `count`, `mean`, `p50`, `p95`,
`p99`, `largest`. `offered_tokens_per_s` is what the arrivals of the steady state asked for; with `settings.at_once`
turns arrive when others end, and nothing is offered. `in_flight_at_start` and
`in_flight_at_end` of the steady state: an engine that falls behind has more at its end. `failures` by reason, of HTTP
by status. `tokens_counted_by` says of how many turns tokens were counted by their ids, by usage, or by events: where a
server gives no usage, each event counts one. Prompts are `settings.prompt_tokens` long as the server counts; where it
does not (`prompt_tokens_are_guessed`), they are guessed."""


@dataclass(frozen=True, slots=True)
class LoadScope:
    """What arrives. `rate_per_s`: turns per second on average, with Poisson arrivals from `seed` for `seconds`. With
    `at_once` instead so many callers ask for `seconds`, each when its last turn has ended.
    """

    rate_per_s: float
    seconds: float
    ramp_s: float
    prompt_tokens: int
    reply_tokens: int
    seed: int = 0
    at_once: int | None = None

    @property
    def window(self) -> Window:
        """The steady state. Raises InvalidArgument when the ramp leaves none."""
        if not 0 <= self.ramp_s < self.seconds:
            raise InvalidArgument("ramp: expected to be shorter than the run", field="ramp")
        return Window(self.ramp_s, self.seconds)


class LoadTarget(Protocol):
    """Whom the turns are sent to."""

    # What a message's tokens are counted by, unless the server says their total at the end.
    counts: str

    async def tokens_per_word(self, text: str) -> float | None:
        """None where the server does not count prompts. Raises KvasirError when it cannot be asked."""

    def turn(self, prompt: str, max_tokens: int) -> AsyncGenerator[Arrived, None]:
        """One turn. Raises TurnFailed."""


class GrpcTarget:
    """An engine."""

    counts = "token_ids"

    def __init__(self, client: AioInferenceClient) -> None:
        self._client = client

    async def tokens_per_word(self, text: str) -> float:
        return await self._client.count_tokens(prompt=text) / len(text.split())

    async def turn(self, prompt: str, max_tokens: int) -> AsyncGenerator[Arrived, None]:
        try:
            async with aclosing(
                self._client.generate(prompt=prompt, max_tokens=max_tokens, timeout_s=PATIENCE_S)
            ) as events:
                async for event in events:
                    yield Arrived(len(event.delta.token_ids))
        except KvasirError as error:
            raise TurnFailed(error.reason or type(error).__name__) from None


async def run(
    target: LoadTarget,
    scope: LoadScope,
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Send the turns and wait for all of them. The results as `KEYS` describes. Raises the engine's errors only for the
    first call; a turn that fails is counted.
    """
    window = scope.window
    tokens_per_word = await target.tokens_per_word(next(_texts(scope.seed, _WORDS)))
    prompts = _texts(scope.seed, max(1, round(scope.prompt_tokens / (tokens_per_word or _GUESSED_TOKENS_PER_WORD))))
    turns = [LoadTurn(due_s) for due_s in arrivals(scope.rate_per_s, scope.seconds, scope.seed)]
    if scope.at_once is not None:
        turns = []
    began_s = clock()

    def now() -> float:
        return clock() - began_s

    async def ask() -> None:
        while now() < scope.seconds:
            turns.append(LoadTurn(now()))
            await _send(target, scope, turns[-1], next(prompts), now)

    reporting = asyncio.create_task(_report(turns, say, now))
    try:
        async with asyncio.TaskGroup() as sending:
            for _ in range(scope.at_once or 0):
                sending.create_task(ask())
            for turn, prompt in zip([*turns], prompts, strict=False):
                await asyncio.sleep(max(0.0, turn.due_s - now()))
                sending.create_task(_send(target, scope, turn, prompt, now))
    finally:
        reporting.cancel()
    steady = sum(turn.due_s in window for turn in turns)
    return {
        "settings": asdict(scope),
        "offered_tokens_per_s": None if scope.at_once else steady * scope.reply_tokens / window.length_s,
        **findings(turns, window),
        "tokens_counted_by": _counted_by(turns, target.counts),
        "prompt_tokens_are_guessed": tokens_per_word is None,
    }


async def _send(target: LoadTarget, scope: LoadScope, turn: LoadTurn, prompt: str, now: Callable[[], float]) -> None:
    try:
        async with aclosing(target.turn(prompt, scope.reply_tokens)) as arriving:
            async for arrived in arriving:
                turn.add(arrived, now())
    except TurnFailed as failure:
        turn.failure = str(failure)
    turn.ended_s = now()


def _counted_by(turns: list[LoadTurn], unit: str) -> dict[str, int]:
    return dict(Counter(unit if turn.total_tokens is None else "usage" for turn in turns if turn.deltas))


def _texts(seed: int, words: int) -> Iterator[str]:
    """Texts that differ from their first word on, so that no turn shares another's KV."""
    random = Random(seed)  # noqa: S311 - a load that can be repeated
    while True:
        yield " ".join(str(random.randrange(10_000, 100_000)) for _ in range(words))


async def _report(turns: list[LoadTurn], say: Callable[[str], None], now: Callable[[], float]) -> None:
    """Say every few seconds how far it is; until it is cancelled."""
    while True:
        await asyncio.sleep(_PROGRESS_S)
        arrived = sum(turn.due_s <= now() for turn in turns)
        ended = sum(turn.ended_s is not None for turn in turns)
        say(f"[{now():.0f} s] {arrived} of {len(turns)} turns arrived, {arrived - ended} in flight")


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    """The results as plain text."""
    settings, phases = results["settings"], results["phases"]
    arriving = f"{settings['rate_per_s']:.3g} turns a second"
    if settings["at_once"]:
        arriving = f"{settings['at_once']} turns at once"
    yield (
        f"{arriving} for {settings['seconds']:.0f} s, prompts of about "
        f"{settings['prompt_tokens']} tokens, replies of up to {settings['reply_tokens']}, seed {settings['seed']}"
    )
    yield (
        f"{phases['ramp']} turns in the ramp, {phases['steady']} in the steady state; "
        f"all had ended {phases['tail_s']:.1f} s after the last arrival"
    )
    yield f"{'':>12}  {'count':>7}  {'mean':>9}  {'p50':>9}  {'p95':>9}  {'p99':>9}  {'largest':>9}"
    for name, title in (("first_token_s", "first token"), ("gap_s", "gap"), ("end_to_end_s", "end to end")):
        found = results[name]
        values = ("–" if found[key] is None else _seconds(found[key]) for key in _COLUMNS)
        yield f"{title:>12}  {found['count']:>7,}  " + "  ".join(f"{value:>9}" for value in values)
    offered = f", of {results['offered_tokens_per_s']:.1f} that were asked for" if not settings["at_once"] else ""
    yield (
        f"{results['tokens_per_s']:.1f} tokens a second{offered}; "
        f"in flight: {results['in_flight_at_start']} at the start of the steady state, "
        f"{results['in_flight_at_end']} at its end"
    )
    if results["tokens_counted_by"].get("events"):
        yield f"no usage from the server in {results['tokens_counted_by']['events']} turns: an event counts one token"
    if results["prompt_tokens_are_guessed"]:
        yield "the server does not count prompts: their length is a guess"
    for reason, count in results["failures"].items():
        yield f"failed: {count} ({reason})"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
