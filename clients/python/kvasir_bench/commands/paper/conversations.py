"""Turns over gRPC, over HTTP, at two servers, and at a rate of their own. No text shares its first word by chance."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from statistics import median
from typing import Any

from kvasir.clients import AioInferenceClient, InferenceClient
from kvasir.errors import KvasirError, Unavailable

from kvasir_bench.arithmetic import medians
from kvasir_bench.commands.paper.bench import Bench
from kvasir_bench.load import run
from kvasir_bench.load.arithmetic import Arrived, Lengths, LoadTurn, TurnFailed
from kvasir_bench.load.run import LoadAgent
from kvasir_bench.memory_path.turns import Agent, SeenTurn, text_of, words_per_token

Rows = list[dict[str, Any]]
_REPLY_TOKENS = 64  # at most, as in the paper
_TURNS = 3
_QUESTION = "Which of these numbers do you still know? Answer in a few words."


def three_turns(bench: Bench, lengths: Sequence[int]) -> Rows:
    """A cold turn, and two that extend it."""

    def turns(client: InferenceClient, name: str, words: int) -> list[SeenTurn]:
        agent = Agent(client, name, words, _REPLY_TOKENS)
        return [agent.cold(), *(agent.goes_on() for _ in range(_TURNS - 1))]

    return _medians(bench, lengths, "three turns", turns, [{"turn": place + 1} for place in range(_TURNS)])


def prefix(bench: Bench, lengths: Sequence[int]) -> Rows:
    """Two agents whose system prompt is the same."""

    def turns(client: InferenceClient, name: str, words: int) -> list[SeenTurn]:
        system, seen = text_of(name, words), []
        for each in "AB":
            agent = Agent(client, f"{name} {each}", 12, _REPLY_TOKENS, system)
            seen.append(agent.cold())
            agent.stored_s()
        return seen

    return _medians(bench, lengths, "a shared prefix", turns, [{"request": "A (cold)"}, {"request": "B (shared)"}])


def _medians(
    bench: Bench,
    lengths: Sequence[int],
    what: str,
    turns: Callable[[InferenceClient, str, int], list[SeenTurn]],
    keys: Sequence[dict[str, Any]],
) -> Rows:
    """A row for each turn, with medians over the repeats behind one that warms up."""
    rows = []
    bench.services.start()
    with bench.services.client() as client:
        ratio = words_per_token(client)
        turns(client, f"paper, {what}, warming up", 50)
        for length in lengths:
            bench.say(f"{what} at {length:,} tokens")
            names = [f"paper, {what}, {length}, {number}" for number in range(bench.repeats)]
            found = [turns(client, name, round(length * ratio)) for name in names]
            for key, seen in zip(keys, zip(*found, strict=True), strict=True):
                rows.append({"context_tokens": length, **key, **medians(map(_facts, seen))})
    return rows


def _facts(turn: SeenTurn) -> dict[str, float]:
    seconds = {"first_token_s": turn.first_token_s, "end_to_end_s": turn.last_token_s}
    return {**seconds, "tokens": len(turn.token_ids), "cached_tokens": turn.cached_tokens}


def over_http(bench: Bench, lengths: Sequence[int]) -> Rows:
    return asyncio.run(_over_http(bench, lengths, *bench.services.start_gateway()))


async def _over_http(bench: Bench, lengths: Sequence[int], url: str, key: str) -> Rows:
    from kvasir_bench.load.http import connected  # an extra's package

    rows: Rows = []
    async with connected(url, bench.facts["name"], key) as target:
        ratio = await target.tokens_per_word(text_of("counted", 64)) or 1.0
        for length in lengths:
            bench.say(f"over HTTP at {length:,} tokens")
            for mode, send in {"streaming": _streamed, "whole": _whole}.items():
                texts = [text_of(f"{mode} {length} {n}", max(1, round(length / ratio))) for n in range(bench.repeats)]
                turns = [(await send(target, "", [{"role": "user", "content": text}]))[0] for text in texts]
                found = (
                    {
                        "first_token_s": turn.first_token_s or 0.0,
                        "end_to_end_s": turn.ended_s or 0.0,
                        "tokens": turn.tokens,
                    }
                    for turn in turns
                )
                rows.append({"context_tokens": length, "mode": mode, **medians(found)})
    return rows


def servers(bench: Bench, lengths: Sequence[int]) -> Rows:
    """The same three turns over HTTP: at Kvasir's gateway, at mlx_lm.server, and at the server that was given."""
    return asyncio.run(_servers(bench, max(lengths), *bench.services.start_gateway()))


async def _servers(bench: Bench, length: int, url: str, key: str) -> Rows:
    from kvasir_bench.load import mlx_lm_server
    from kvasir_bench.load.http import connected

    name = bench.facts["name"]
    places = {"Kvasir": connected(url, name, key)}
    if bench.server is not None:
        places[bench.server[0]] = connected(*bench.server)
    rows = []
    with tempfile.TemporaryDirectory() as logs:
        places[mlx_lm_server.NAME] = mlx_lm_server.serving(bench.model or name, 1, Path(logs))
        for server, place in places.items():
            bench.say(f"three turns at {server}")
            try:
                async with place as target:
                    rows.append({"server": server, "context_tokens": length, **await _three(bench, target, length)})
            except KvasirError as error:  # it may not know the model
                rows.append({"server": server, "left_out": error.message})
    return rows


async def _three(bench: Bench, target: Any, length: int) -> dict[str, Any]:
    ratio = await target.tokens_per_word(text_of("counted", 64)) or 1.0
    found = []
    for number in range(bench.repeats + 1):  # the first one warms up
        agent, turns = f"paper, servers, {number}", []
        messages = [{"role": "user", "content": text_of(agent, max(1, round(length / ratio)))}]
        for _ in range(_TURNS):
            turn, reply = await _streamed(target, agent, messages)
            turns.append(turn.ended_s or 0.0)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": _QUESTION}]
        found.append(turns)
    return {f"turn_{place}_s": median(each) for place, each in enumerate(zip(*found[1:], strict=True), 1)}


async def _streamed(target: Any, agent: str, messages: list[dict[str, str]]) -> tuple[LoadTurn, str]:
    """Raises Unavailable: a turn that failed costs its table a row, and not the run."""
    turn, reply, began = LoadTurn(0.0), "", time.monotonic()
    try:
        async with aclosing(target.turn(LoadAgent(agent, 0, messages), _REPLY_TOKENS)) as arriving:
            async for arrived in arriving:
                turn.add(arrived, time.monotonic() - began)
                reply += arrived.text
    except TurnFailed as failure:
        raise Unavailable(f"a turn failed: {failure}") from None
    turn.ended_s = time.monotonic() - began
    return turn, reply


async def _whole(target: Any, _agent: str, messages: list[dict[str, str]]) -> tuple[LoadTurn, str]:
    """The same in one piece, without an agent."""
    turn, began = LoadTurn(0.0), time.monotonic()
    answer = await target.whole(messages, _REPLY_TOKENS)
    turn.ended_s = time.monotonic() - began
    turn.add(Arrived(1, total_tokens=answer["usage"]["completion_tokens"]), turn.ended_s)
    return turn, ""


def open_loop(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    """Turns that arrive at a rate of their own, as by `kvasir bench load`."""
    bench.services.start()
    return asyncio.run(_open_loop(bench))


async def _open_loop(bench: Bench) -> dict[str, Any]:
    seconds, tokens = (8.0, 64) if bench.is_quick else (30.0, 512)
    lengths = (Lengths.parse(str(tokens), "--in"), Lengths.parse("32", "--out"))
    scope = run.LoadScope(*lengths, seconds=seconds, ramp_s=seconds / 5)
    async with AioInferenceClient.connect(bench.services.address) as client:
        target = run.GrpcTarget(client)
        counted = await run.tokens_per_word(target, scope)
        return {"rate_per_s": scope.rate_per_s, **await run.run(target, scope, bench.say, tokens_per_word=counted)}
