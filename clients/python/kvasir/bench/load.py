"""`kvasir bench load`: turns arrive at a running engine at a rate of their own, however fast it answers.

The client is one asynchronous process with one connection. Each turn is cold, has its own text, and is not remembered.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from kvasir.bench.load_arithmetic import LoadTurn, Window, arrivals, findings
from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument, KvasirError

_WORDS = 64  # by which the tokens of a word are counted
_PATIENCE_S = 600.0  # for the last turns
_PROGRESS_S = 5.0
_COLUMNS = ("mean", "p50", "p95", "p99", "largest")
KEYS = """Names in the JSON stay. `settings` are the options. `phases` are the turns that arrived in the ramp and in the
steady state, and the seconds from the last arrival until all had ended (`tail_s`). `first_token_s` and `end_to_end_s`,
counted from the moment that a turn was due, are those of turns that arrived in the steady state; `gap_s`, between two
messages of a turn, and `tokens_per_s` are those of the steady state, whoever's. Each has `count`, `mean`, `p50`, `p95`,
`p99`, `largest`. `offered_tokens_per_s` is what the arrivals of the steady state asked for. `in_flight_at_start` and
`in_flight_at_end` of the steady state: an engine that falls behind has more at its end. `failures` by reason."""


@dataclass(frozen=True, slots=True)
class LoadScope:
    """What arrives. `rate_per_s`: turns per second on average, with Poisson arrivals from `seed` for `seconds`."""

    rate_per_s: float
    seconds: float
    ramp_s: float
    prompt_tokens: int
    reply_tokens: int
    seed: int = 0

    @property
    def window(self) -> Window:
        """The steady state. Raises InvalidArgument when the ramp leaves none."""
        if not 0 <= self.ramp_s < self.seconds:
            raise InvalidArgument("ramp: expected to be shorter than the run", field="ramp")
        return Window(self.ramp_s, self.seconds)


async def run(
    client: AioInferenceClient,
    scope: LoadScope,
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Send the turns and wait for all of them. The results as `KEYS` describes. Raises the engine's errors only for the
    first call; a turn that fails is counted.
    """
    window = scope.window
    prompts = _prompts(scope, await _tokens_per_word(client, scope.seed))
    turns = [LoadTurn(due_s) for due_s in arrivals(scope.rate_per_s, scope.seconds, scope.seed)]
    began_s = clock()

    def now() -> float:
        return clock() - began_s

    reporting = asyncio.create_task(_report(turns, say, now))
    try:
        async with asyncio.TaskGroup() as sending:
            for turn, prompt in zip(turns, prompts, strict=False):
                await asyncio.sleep(max(0.0, turn.due_s - now()))
                sending.create_task(_send(client, scope, turn, prompt, now))
    finally:
        reporting.cancel()
    steady = sum(turn.due_s in window for turn in turns)
    return {
        "settings": asdict(scope),
        "offered_tokens_per_s": steady * scope.reply_tokens / window.length_s,
        **findings(turns, window),
    }


async def _send(
    client: AioInferenceClient, scope: LoadScope, turn: LoadTurn, prompt: str, now: Callable[[], float]
) -> None:
    try:
        async with aclosing(
            client.generate(prompt=prompt, max_tokens=scope.reply_tokens, timeout_s=_PATIENCE_S)
        ) as events:
            async for event in events:
                if count := len(event.delta.token_ids):
                    turn.deltas.append((now(), count))
    except KvasirError as error:
        turn.failure = error.reason or type(error).__name__
    turn.ended_s = now()


async def _tokens_per_word(client: AioInferenceClient, seed: int) -> float:
    return await client.count_tokens(prompt=next(_texts(seed, _WORDS))) / _WORDS


def _prompts(scope: LoadScope, tokens_per_word: float) -> Iterator[str]:
    return _texts(scope.seed, max(1, round(scope.prompt_tokens / tokens_per_word)))


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
    yield (
        f"{settings['rate_per_s']:.3g} turns a second for {settings['seconds']:.0f} s, prompts of about "
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
    yield (
        f"{results['tokens_per_s']:.1f} tokens a second, of {results['offered_tokens_per_s']:.1f} that were asked for; "
        f"in flight: {results['in_flight_at_start']} at the start of the steady state, "
        f"{results['in_flight_at_end']} at its end"
    )
    for reason, count in results["failures"].items():
        yield f"failed: {count} ({reason})"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
