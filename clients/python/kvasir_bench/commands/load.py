"""`kvasir bench load`."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS, naming
from kvasir.cli.running.checks import check_model
from kvasir.cli.showing.arguments import option
from kvasir.clients import AioInferenceClient
from kvasir.credentials import read_token
from kvasir.errors import FailedPrecondition, InvalidArgument

from kvasir_bench.commands.shown import PlotsOption, checking_options, progress, show
from kvasir_bench.load import report, run
from kvasir_bench.load.arithmetic import Lengths, Limits


@dataclass(frozen=True)
class LoadOptions:
    """When turns arrive, how long they are, and which of them are good."""

    rate: Annotated[float | None, option("Turns a second on average. Default: 1.", min=0.001)] = None
    at_once: Annotated[
        int | None, option("Instead, a number of callers; each sends a turn when its last turn has ended.", min=1)
    ] = None
    seconds: Annotated[float | None, option("For how long turns arrive. Default: 60.", min=1)] = None
    requests: Annotated[int | None, option("Instead, a number of turns. `wall` is the time that they took.", min=1)] = (
        None
    )
    ramp: Annotated[
        float | None,
        option("Seconds at the start that do not count. Default: a fifth; with --at-once or --requests none.", min=0),
    ] = None
    prompts: Annotated[
        str,
        option(
            "Approximate tokens of each prompt: 512; 200-4000, each length equally likely; 200~4000, many short, few "
            "long.",
            "--in",
            metavar="TOKENS",
        ),
    ] = "512"
    replies: Annotated[
        str,
        option(
            "The most tokens of each reply, in the forms of --in. A model may end earlier.", "--out", metavar="TOKENS"
        ),
    ] = "128"
    shared_prefix: Annotated[
        int, option("Tokens of a system prompt that all turns share.", min=0, metavar="TOKENS")
    ] = 0
    turns: Annotated[
        int,
        option(
            "Turns of each agent. The agent that is idle longest comes back first; its memory is deleted at the end. A "
            "server of --http gets the whole conversation, and Kvasir's gateway keeps it.",
            min=1,
        ),
    ] = 1
    first_token_ms: Annotated[
        float | None, option("The longest wait for the first token in a good turn.", min=1, metavar="MS")
    ] = None
    gap_ms: Annotated[float | None, option("The longest gap between tokens in a good turn.", min=1, metavar="MS")] = (
        None
    )
    seed: Annotated[int, option("The seed of arrivals, lengths and texts.", min=0)] = 0

    def scope(self) -> run.LoadScope:
        seconds = 60.0 if self.seconds is None and self.requests is None else self.seconds
        usual_ramp_s = 0.0 if self.at_once or seconds is None else seconds / 5
        return run.LoadScope(
            prompt_tokens=Lengths.parse(self.prompts, "--in"),
            reply_tokens=Lengths.parse(self.replies, "--out"),
            rate_per_s=self.rate or 1.0,
            at_once=self.at_once,
            seconds=seconds,
            requests=self.requests,
            ramp_s=self.ramp if self.ramp is not None else usual_ramp_s,
            shared_prefix=self.shared_prefix,
            turns=self.turns,
            seed=self.seed,
            limits=_limits(self.first_token_ms, self.gap_ms),
        )


@dataclass(frozen=True)
class ServerOptions:
    """Other servers than the home's engine."""

    mlx_lm: Annotated[
        str,
        option(
            "Then start mlx_lm.server with this model, kvasir-tiny or a directory, and send it the same turns.",
            metavar="MODEL",
        ),
    ] = ""
    wheels_blas: Annotated[
        bool,
        option(
            "With --mlx-lm: by the BLAS of MLX's wheel, as pip installs it, in place of this machine's.",
            "--wheels-blas",
        ),
    ] = False
    http: Annotated[
        str | None,
        option("A server with /v1/chat/completions, Kvasir's or another, in place of gRPC.", metavar="URL"),
    ] = None
    model: Annotated[str | None, option("With --http: the model's name at that server.")] = None
    api_key_file: Annotated[Path | None, option("With --http: the file of the key.")] = None
    api_key: Annotated[
        str,
        option("With --http: the key. As a variable of the environment it is less visible.", envvar="KVASIR_API_KEY"),
    ] = ""

    def check(self) -> None:
        """Raises InvalidArgument, FailedPrecondition."""
        if (self.http is None) != (self.model is None) or (self.http is None and self.api_key_file is not None):
            raise InvalidArgument("--http and --model belong together, and --api-key-file to them", field="http")
        if self.mlx_lm:  # its turns come after the engine's, minutes later
            check_model(self.mlx_lm, "--mlx-lm")
        if (self.http or self.mlx_lm) and find_spec("httpx2") is None:
            raise FailedPrecondition("--http and --mlx-lm need an HTTP library: install kvasir[bench]")


def load(caller: Caller, options: LoadOptions, servers: ServerOptions, plots: PlotsOption = None) -> None:
    """Send turns to a running engine, and show requests a second and the turns' times: p50, p95, p99. Ends with 1 if no
    turn of the steady state ended well.

    Turns arrive even if earlier turns still run, unless --at-once limits the number in flight. The engine is the
    home's, or --engine; with --http any server of OpenAI's chat completions, and all times include HTTP. A crowd beside
    mlx-lm: `--at-once 64 --requests 64 --mlx-lm kvasir-tiny`. Goodput, requests that the engine serves in time: `--rate
    4 --in 200~4000 --first-token-ms 1000 --gap-ms 100`."""
    with checking_options():
        if options.rate is not None and options.at_once is not None:
            raise InvalidArgument.of("--rate", "expected --rate or --at-once, got both")
        servers.check()
        scope = options.scope()
    target = _grpc(caller) if servers.http is None else _http(servers.http, servers)
    with (
        progress(caller, "turns arrive", plots) as say,
        naming("engine", caller) if not servers.http else nullcontext(),
    ):
        results = asyncio.run(_measured(target, scope, servers, say))
    show(caller, results, report, plots)
    if not results["end_to_end_s"]["count"]:
        raise typer.Exit(PROBLEMS)


def _limits(first_token_ms: float | None, gap_ms: float | None) -> Limits | None:
    if not (first_token_ms or gap_ms):
        return None
    return Limits(first_token_ms and first_token_ms / 1000, gap_ms and gap_ms / 1000)


_Named = tuple[str, run.LoadTarget]


async def _measured(
    target: AbstractAsyncContextManager[_Named],
    scope: run.LoadScope,
    servers: ServerOptions,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Results of the target, and then of mlx_lm.server if a model is given for it."""
    async with target as (name, server):
        counted = await run.tokens_per_word(server, scope)
        found = await run.run(server, scope, say, tokens_per_word=counted)
    results = {"settings": scope.settings, "name": name, **found, "prompt_tokens_are_guessed": counted is None}
    if not servers.mlx_lm:
        return results
    from kvasir_bench.load import mlx_lm_server

    say("the same turns at mlx_lm.server")
    peer = await mlx_lm_server.measured(servers.mlx_lm, scope, counted, say, wheels_blas=servers.wheels_blas)
    return results | {"peer": peer, "ratios": report.ratios(results, peer)}


@asynccontextmanager
async def _grpc(caller: Caller) -> AsyncGenerator[_Named, None]:
    endpoint = caller.engine
    async with AioInferenceClient.connect(endpoint.address, token=endpoint.token(), tls=endpoint.tls) as client:
        yield "Kvasir, gRPC", run.GrpcTarget(client)


@asynccontextmanager
async def _http(url: str, options: ServerOptions) -> AsyncGenerator[_Named, None]:
    from kvasir_bench.load import http as load_http

    key = read_token(options.api_key_file) if options.api_key_file is not None else options.api_key
    async with load_http.connected(url, options.model or "", key) as target:
        yield url, target
