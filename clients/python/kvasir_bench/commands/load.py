"""`kvasir bench load`."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from kvasir.cli.caller import Caller, JsonOption, caller_of
from kvasir.cli.failures import PROBLEMS
from kvasir.clients import AioInferenceClient
from kvasir.credentials import read_token
from kvasir.errors import FailedPrecondition, InvalidArgument

from kvasir_bench.commands.shown import progress, show
from kvasir_bench.load import run

HttpOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Instead of gRPC: a server with /v1/chat/completions, Kvasir's or another."),
]
ApiKeyOption = Annotated[
    str, typer.Option(envvar="KVASIR_API_KEY", help="With --http: the key. The variable shows it to fewer.")
]


RateOption = Annotated[
    float | None, typer.Option(min=0.001, help="Turns a second on average. Left out: from --tokens-per-s, else 1.")
]
TokensRateOption = Annotated[
    float | None, typer.Option(min=0.001, help="Instead: as many turns as ask for so many tokens a second.")
]
AtOnceOption = Annotated[
    int | None, typer.Option(min=1, help="Instead: so many callers, each of which asks when its last turn has ended.")
]
SecondsOption = Annotated[float, typer.Option(min=1, help="How long turns arrive.")]
RampOption = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds at the start that do not count. Left out: a fifth; none with --at-once."),
]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Of each turn, about.")]
ReplyTokensOption = Annotated[int, typer.Option(min=1, help="Of each turn at most: a model may end earlier.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of arrivals and texts.")]
ModelOption = Annotated[str | None, typer.Option(help="With --http: the model's name at that server.")]
ApiKeyFileOption = Annotated[Path | None, typer.Option(help="With --http: the file of the key.")]


def load(
    context: typer.Context,
    rate: RateOption = None,
    tokens_per_s: TokensRateOption = None,
    at_once: AtOnceOption = None,
    seconds: SecondsOption = 60.0,
    ramp: RampOption = None,
    prompt_tokens: PromptTokensOption = 512,
    reply_tokens: ReplyTokensOption = 128,
    seed: SeedOption = 0,
    http: HttpOption = None,
    model: ModelOption = None,
    api_key_file: ApiKeyFileOption = None,
    api_key: ApiKeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Let turns arrive at a running engine at a rate of their own, and show what they saw: p50, p95, p99.

    Turns arrive whether or not earlier ones have ended, as people do, unless --at-once keeps so many in flight. The
    engine is that of the home, or --engine; with --http, any server of OpenAI's chat completions. There the wait for a
    first token has HTTP's share in it.
    """
    if sum(given is not None for given in (rate, tokens_per_s, at_once)) > 1:
        raise InvalidArgument("rate: expected --rate, --tokens-per-s or --at-once, got more than one", field="rate")
    if (http is None) != (model is None) or (http is None and api_key_file is not None):
        raise InvalidArgument("--http and --model belong together, and --api-key-file to them", field="http")
    caller = caller_of(context, as_json)
    scope = run.LoadScope(
        rate_per_s=rate or (tokens_per_s / reply_tokens if tokens_per_s else 1.0),
        seconds=seconds,
        ramp_s=ramp if ramp is not None else 0.0 if at_once else seconds / 5,
        prompt_tokens=prompt_tokens,
        reply_tokens=reply_tokens,
        seed=seed,
        at_once=at_once,
    )
    with progress(caller, f"turns arrive for {seconds:.0f} s") as say:
        if http is not None and model is not None:
            key = read_token(api_key_file) if api_key_file is not None else api_key
            results = asyncio.run(_loaded_http(scope, http, model, key, say))
        else:
            results = asyncio.run(_loaded(caller, scope, say))
    show(caller, results, run.lines)
    if not results["first_token_s"]["count"]:
        raise typer.Exit(PROBLEMS)


async def _loaded(caller: Caller, scope: run.LoadScope, say: Callable[[str], None]) -> dict[str, Any]:
    endpoint = caller.engine
    async with AioInferenceClient.connect(endpoint.address, token=endpoint.token(), tls=endpoint.tls) as client:
        return await run.run(run.GrpcTarget(client), scope, say)


async def _loaded_http(
    scope: run.LoadScope, url: str, model: str, key: str, say: Callable[[str], None]
) -> dict[str, Any]:
    try:
        from kvasir_bench.load import http as load_http
    except ModuleNotFoundError:
        raise FailedPrecondition("--http needs an HTTP library: install kvasir[bench]") from None
    async with load_http.connected(url, model, key) as target:
        return await run.run(target, scope, say)
