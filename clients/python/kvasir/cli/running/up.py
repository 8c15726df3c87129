"""`kvasir up`: store, engine and HTTP gateway as one group under one home, until Ctrl-C or SIGTERM.

It checks what it was asked for, makes the home and its credentials, starts them, and writes
their addresses for other commands. A home has one group: the services inherit a lock, which is held until the last of
them has ended. What a killed `kvasir up` left is ended first.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.address import parse_address
from kvasir.cli.caller import Caller, JsonOption, caller_of
from kvasir.cli.failures import WrongUsage, relayed
from kvasir.cli.hub import fetch
from kvasir.cli.running import checks
from kvasir.cli.running.checks import EmbeddingPooling, KvPolicy, LogFormat, LogLevel
from kvasir.cli.running.home import Home, Running
from kvasir.cli.running.locks import led, locked
from kvasir.cli.running.logs import rotate_log
from kvasir.cli.running.plan import Plan, make_credentials, plan_of
from kvasir.cli.running.supervisor import Supervisor
from kvasir.errors import KvasirError

GIB = 1 << 30
_NAMED = "NAME=…"


def up(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A directory or name of an mlx-lm model. Left out: the shipped model. Several times, as NAME=PATH: "
            "the first is loaded, and `kvasir models load` swaps them.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT for the engine, which then wants a token. Left out: a Unix socket.", metavar="HOST:PORT"
        ),
    ] = "",
    store_listen: Annotated[
        str, typer.Option(help="HOST:PORT for the store, for other Macs to pull from.", metavar="HOST:PORT")
    ] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate, needed beyond this machine.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, mode 0600.")] = None,
    http: Annotated[
        str,
        typer.Option(
            help="127.0.0.1:PORT for the HTTP APIs (OpenAI's, Anthropic's), whose keys are the tokens. Left out: "
            f"{checks.DEFAULT_HTTP}, if it is free.",
            metavar="HOST:PORT",
        ),
    ] = "",
    no_http: Annotated[bool, typer.Option("--no-http", help="Start no HTTP gateway.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="The HTTP gateway refuses what it ignores else: fields it cannot apply.")
    ] = False,
    any_model: Annotated[
        bool | None,
        typer.Option(
            help="Over HTTP the loaded model answers for names that are no model's. Left out: yes, unless --strict."
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that HTTP clients may use for one of the models; the answer names the model. Several times.",
            metavar="NAME=MODEL",
        ),
    ] = None,
    volatile: Annotated[
        str,
        typer.Option(
            help="What the HTTP gateway takes as changing without meaning, so that a conversation's memory is found "
            "all the same: `python -m kvasir_gateway --help` has the rules. Left out: all of them.",
            metavar="RULE,…|none",
        ),
    ] = "",
    side_calls: Annotated[
        str,
        typer.Option(
            help="Which requests over HTTP leave no memory, because a client asks beside its conversation, for a title "
            "or a summary: `python -m kvasir_gateway --help` has the rules. Left out: all of them.",
            metavar="RULE,…|none",
        ),
    ] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Another engine, to which turns may move while they speak (`kvasir agents move`). Several times. HTTP "
            "readers follow, with keys that hold there too and are shown to it as they are: trust it as this engine.",
            metavar="NAME=ADDRESS",
        ),
    ] = None,
    peer_store: Annotated[
        list[str] | None,
        typer.Option(help="That engine's store, as `kvasir peers ls` names it, if it is another one.", metavar=_NAMED),
    ] = None,
    peer_token_file: Annotated[
        list[str] | None, typer.Option(help="This engine's token there. Not at Unix sockets.", metavar=_NAMED)
    ] = None,
    peer_ca_file: Annotated[
        list[str] | None, typer.Option(help="PEM: its certificate, or its authority's.", metavar=_NAMED)
    ] = None,
    neighbour: Annotated[
        bool,
        typer.Option(
            "--neighbour",
            help="The engine also speaks mlx.grpc.engine.MlxEngine at its address, for gateways that speak it. Needs "
            "kvasir\\[neighbour].",
        ),
    ] = False,
    metrics_listen: Annotated[
        str,
        typer.Option(
            help="127.0.0.1:PORT for the engine's Prometheus metrics and /healthz; the store's are at the next port, "
            "the HTTP gateway's at the one after it.",
            metavar="HOST:PORT",
        ),
    ] = "",
    traces_to: Annotated[
        str,
        typer.Option(
            help="http://127.0.0.1:4317, where OpenTelemetry gets spans of turns (OTLP), with counts and never a text.",
            metavar="URL",
        ),
    ] = "",
    kv_policy: Annotated[
        KvPolicy | None,
        typer.Option(
            help="How keys and values are stored: q4 if left out; auto is the cheapest with which the model answers as "
            "with exact KV, measured once. `kvasir bench quality` shows their costs."
        ),
    ] = None,
    kv_exact_layers: Annotated[
        str, typer.Option(help='Layers that stay at 16 bits: "last", or indexes with commas between.')
    ] = "",
    embeddings: Annotated[
        str,
        typer.Option(
            help="A small model that only makes embeddings, in sentence-transformers' or mlx-lm's layout. Left out: "
            "the loaded model makes them.",
            metavar="MODEL",
        ),
    ] = "",
    embedding_pooling: Annotated[
        EmbeddingPooling | None,
        typer.Option(help="A text's embedding is the mean of its last hidden rows (if left out), or the last of them."),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="RAM for the KV of all agents, hot and running, in GiB. Left out: 4. See `kvasir doctor`."
        ),
    ] = None,
    context_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="The most tokens of an agent's context. Left out, or more: the model's own."),
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="On a GPU: a reply's tokens do not depend on the turns beside it. On a CPU they never do.",
        ),
    ] = False,
    store_quota_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="Disk for each namespace's memories, in GiB. Left out: as much as the disk has."),
    ] = None,
    keep_alive: Annotated[
        str,
        typer.Option(
            help="Unload a model that no turn has used for so long, as 10m; the next turn loads it again. Left out: it "
            "stays.",
            metavar="TIME",
        ),
    ] = "",
    keep_versions: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Versions of each agent to go back to. Left out: 8.")
    ] = None,
    write_budget_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="What may be written to disk in a day (UTC), in GiB; `kvasir status` says when it is more.",
        ),
    ] = None,
    expire_agents: Annotated[
        str,
        typer.Option(
            help="Delete agents that nobody used for so long, as 30d; `kvasir agents ls` tells. Left out: none.",
            metavar="TIME",
        ),
    ] = "",
    accept_older: Annotated[
        bool,
        typer.Option(
            "--accept-older", help="Start with a store that is older than what last ran: a backup that was put back."
        ),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="The least of what the services log.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, typer.Option(help="Log lines for people, or for programs.")] = LogFormat.CONSOLE,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when all is ready; `kvasir down` stops it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run store, engine and HTTP gateway as one group, until Ctrl-C; with -d in the background, until `kvasir down`.

    --json: one object on standard output when all is ready, with the addresses and the token's file (also in the home,
    as run/up.json). Remarks go to standard error.
    """
    caller = caller_of(context, as_json)
    home = caller.home
    if http and no_http:
        raise WrongUsage("--http and --no-http: say one of them", field="--no-http")
    reading = (
        *(["--strict"] if strict else []),
        *([] if any_model is None else ["--any-model" if any_model else "--no-any-model"]),
        *_given(("--volatile", volatile), ("--side-calls", side_calls), *(("--alias", each) for each in alias or ())),
    )
    if no_http and reading:
        raise WrongUsage(f"{reading[0]} is the HTTP gateway's, and --no-http starts none", field=reading[0])
    checks.check_installed("store", "engine", gateway=bool(http), neighbour=neighbour)
    models = checks.check_models(model or [])
    checks.check_aliases(alias or [], models)
    keep_alive_s = checks.seconds(keep_alive, "--keep-alive")
    expires_after_s = checks.expiry_seconds(expire_agents, "--expire-agents")
    sizes = {"--memory-gib": memory_gib, "--store-quota-gib": store_quota_gib, "--write-budget-gib": write_budget_gib}
    checks.check_sizes(sizes)
    checks.check_exact_layers(kv_exact_layers, kv_policy, models)
    metrics = checks.metrics_addresses(metrics_listen)
    peers = {"--peer": peer, "--peer-store": peer_store, "--peer-token-file": peer_token_file}
    engine_peers, gateway_peers = checks.peer_arguments({**peers, "--peer-ca-file": peer_ca_file})
    asked = {"--listen": listen, "--store-listen": store_listen, "--http": http, **metrics}
    addresses = {option: address for option, address in asked.items() if address}
    checks.check_addresses(addresses, tls_cert, tls_key)
    checks.check_traces(traces_to)
    beside = checks.check_embeddings(embeddings, models)
    for each in (*models, *beside):
        if each.is_on_hub:  # before anything starts, with its progress
            fetch(caller, each.path)
    home.make()
    with led(home), locked(home, caller.say) as descriptor:
        for option, address in addresses.items():
            checks.check_free(address, option)
        for socket in ("store", "engine", "engines"):
            checks.check_socket_free(home.run / f"{socket}.sock")
        if not detach:
            make_credentials(home)
            tracing = tuple(_given(("--traces-to", traces_to)))
            logging = ("--log-level", log_level.value, "--log-format", log_format.value, *tracing)
            engine_options = (
                *_given(("--kv-policy", kv_policy and kv_policy.value)),
                *_given(("--kv-exact-layers", kv_exact_layers), ("--memory-gib", memory_gib)),
                *_given(("--embeddings", embeddings)),
                *_given(("--embedding-pooling", embedding_pooling and embedding_pooling.value)),
                *_given(("--context-tokens", context_tokens), ("--keep-alive-s", keep_alive_s)),
                *(["--batch-invariant"] if batch_invariant else []),
                *(["--neighbour"] if neighbour else []),
                *engine_peers,
                *logging,
            )
            budget_bytes = int(write_budget_gib * GIB) if write_budget_gib else None
            quota_bytes = int(store_quota_gib * GIB) if store_quota_gib else None
            store_options = (
                *_given(("--quota-bytes", quota_bytes), ("--retained-versions", keep_versions)),
                *_given(("--expires-after-s", expires_after_s), ("--write-budget-bytes", budget_bytes)),
                *(["--accept-older"] if accept_older else []),
                *logging,
            )
            gateway, why_none = (http, "") if http or no_http else _usual_http(home, addresses)
            plan = plan_of(
                home,
                model or [],
                listen,
                store_listen,
                gateway,
                tls_cert,
                tls_key,
                engine_options,
                store_options,
                tuple(metrics.values()),
                (*tracing, *gateway_peers, *reading),
            )
            asyncio.run(_run(caller, plan, descriptor, why_none))
            return
    _detached(caller)


def _usual_http(home: Home, addresses: Mapping[str, str]) -> tuple[str, str]:
    """The gateway's usual address, or none and the reason: nobody has asked for it."""
    if not checks.has_gateway():
        return "", "its packages are not installed (kvasir[gateway])"
    usual = parse_address(checks.DEFAULT_HTTP)
    try:
        if usual.port not in {parse_address(address).port for address in addresses.values()}:
            checks.check_free(checks.DEFAULT_HTTP, "--http")
            return checks.DEFAULT_HTTP, ""
    except KvasirError:
        pass
    again = f"`{home.command('down')}`, then `{home.command('up --http 127.0.0.1:PORT')}`"
    return "", f"{checks.DEFAULT_HTTP} is in use; for another port: {again}"


def _given(*options: tuple[str, object]) -> Iterator[str]:
    """The options that have a value, as arguments."""
    yield from (str(part) for option in options if option[1] for part in option)


def _detached(caller: Caller) -> None:
    """Run the same command in the background, wait until all is ready, and say what it says."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("-d", "--detach", "--json")]
    log = caller.home.logs / "up.log"
    rotate_log(log)
    with log.open("ab") as err:
        log.chmod(0o600)
        child = subprocess.Popen(
            [sys.executable, "-m", "kvasir.cli", "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            start_new_session=True,
        )
    assert child.stdout is not None
    with caller.busy("starting"), child.stdout as out:
        try:
            answer = json.loads(out.readline() or b"{}")
        except BaseException:  # Ctrl-C or SIGTERM: it ends with us
            child.terminate()
            raise
    if "pid" not in answer:
        raise relayed(child.wait(), answer)
    home = caller.home
    caller.result(answer, lambda out: _greet(out.print, home, answer, f"`{home.command('down')}` stops it"))


async def _run(caller: Caller, plan: Plan, descriptor: int, no_http: str) -> None:
    home = caller.home
    supervisor = Supervisor(
        [each.service() for each in (plan.store, plan.engine, plan.gateway) if each is not None],
        say=caller.note,
        clock=time.monotonic,
        keep_descriptor=descriptor,
    )
    loop = asyncio.get_running_loop()
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        loop.add_signal_handler(number, supervisor.stop)

    def facts(is_ready: bool) -> Running:
        return Running(
            pid=os.getpid(),
            store=plan.store.endpoint.address,
            engine=plan.engine.endpoint.address,
            token_file=str(home.tokens / "client.token") if plan.engine.credentials_file else "",
            ca_file=str(plan.store.tls_cert_file or plan.engine.tls_cert_file or ""),
            store_pid=supervisor.pid("store"),
            engine_pid=supervisor.pid("engine"),
            is_ready=is_ready,
            http=plan.gateway.listen if plan.gateway else "",
            http_pid=supervisor.pid("http") if plan.gateway else 0,
            no_http=no_http,
            store_metrics=plan.store.metrics_listen,
            engine_metrics=plan.engine.metrics_listen,
            http_metrics=plan.gateway.metrics_listen if plan.gateway else "",
        )

    was_ready = False

    def tell_others() -> None:
        home.write_running(facts(was_ready))

    def greet() -> None:
        nonlocal was_ready
        was_ready = True
        tell_others()
        answer = asdict(facts(was_ready)) | {"home": str(home.root), "logs": str(home.logs)}
        if caller.as_json:
            caller.line(answer)
        _greet(caller.note, home, answer, "Ctrl-C stops all")

    caller.note(f"Starting in {home.root}; logs are in {home.logs}")
    tell_others()
    try:
        await supervisor.run(greet, tell_others)
    finally:
        home.running_file.unlink(missing_ok=True)
    caller.note("All have stopped.")


def _greet(say: Callable[[str], object], home: Home, answer: dict[str, Any], how_to_stop: str) -> None:
    say(f"engine: {answer['engine']}")
    say(f"store:  {answer['store']}")
    if answer["http"]:
        say(f"http:   http://{answer['http']}/v1 (the key is the token)")
    elif answer["no_http"]:
        say(f"http:   none: {answer['no_http']}")
    if answer["token_file"]:
        say(f"token:  {answer['token_file']} (commands with this home find it; others say --token-file)")
    say(f"Talk to an agent with `{home.command('chat ada')}`; {how_to_stop}.")
