"""`kvasir bench …`: the services' speed beside the speed of this machine's wire, disk and hash, in one run."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from kvasir.cli.caller import Caller, JsonOption, caller_of
from kvasir.cli.failures import PROBLEMS, WrongUsage
from kvasir.cli.rows import size
from kvasir.cli.running.checks import check_installed
from kvasir.cli.running.program import run_program
from kvasir.clients import AioInferenceClient
from kvasir.credentials import read_token
from kvasir.errors import FailedPrecondition, InvalidArgument

from kvasir_bench.attention import report as attention_bench
from kvasir_bench.engine import keys as engine_keys
from kvasir_bench.engine import plots as engine_plots
from kvasir_bench.engine import report as engine_bench
from kvasir_bench.load import run as load_bench
from kvasir_bench.memory_path import findings as memory_findings
from kvasir_bench.memory_path.campaign import PathScope, measure
from kvasir_bench.memory_path.services import measured_services, memory_gib_for
from kvasir_bench.pictures import Plots
from kvasir_bench.quality import plots as quality_plots
from kvasir_bench.quality import report as quality_report
from kvasir_bench.store import measuring as store_bench

app = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)

EngineCase = Enum("EngineCase", [(name, name) for name in engine_keys.CASES], type=str)  # type: ignore[misc]


class Peer(StrEnum):
    """Another program that can do the engine's work."""

    MLX_LM = "mlx-lm"


class MixedPolicy(StrEnum):
    """A policy some of whose layers may stay exact; under fp all are."""

    Q4 = "q4"
    Q4_ROTATED = "q4-rotated"
    K8V4 = "k8v4"
    Q8 = "q8"


@app.callback()
def everywhere() -> None:
    """The options of every measurement: none so far."""


@app.command("store")
def store(
    context: typer.Context,
    directory: Annotated[
        Path | None, typer.Option(help="Where the measured stores lie, on the disk that is measured.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Move less, for a first look. No target counts then.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put, get, pull, find and start, beside raw TCP, write + fsync and BLAKE3. Ends with 1 when a target is missed."""
    caller = caller_of(context, as_json)
    check_installed("store")
    said: list[str] = []
    with caller.busy("measuring the store; minutes at full size"):
        results = store_bench.run(as_json, directory=directory, is_quick=quick, say=said.append)
    caller.out.file.write("\n".join(said) + "\n")
    if not quick and not all(target["is_met"] for target in results["targets"]):
        raise typer.Exit(PROBLEMS)


@app.command("engine", epilog=engine_keys.help_text())
def engine(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="A directory or name of an mlx-lm model. Left out: the shipped model.")
    ] = "",
    only: Annotated[list[EngineCase] | None, typer.Option(help="Measure this case alone. May be repeated.")] = None,
    peer: Annotated[Peer | None, typer.Option(help="Give the same work to this program too, in turns.")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="How often to measure; medians are shown. Left out: 5.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Contexts in tokens, with commas between. Left out: each case's own.")
    ] = "",
    batches: Annotated[
        str, typer.Option(help="Rows that decode together, with commas between. Left out: each case's own.")
    ] = "",
    kv_policy: Annotated[str, typer.Option(help="As for `kvasir up`.")] = "",
    memory_gib: Annotated[float | None, typer.Option(min=0.001, help="For KV, in GiB. Left out: 4.")] = None,
    time_limit_s: Annotated[
        float | None, typer.Option(help="Begin nothing new after so many seconds; what is known is shown.")
    ] = None,
    results_file: Annotated[
        Path | None,
        typer.Option("--results", exists=True, dir_okay=False, help="Measure nothing: show this kept JSON."),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write a PNG for each case into this directory.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure less, and once, for a first look. No target counts then.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Decode, first token, pairs, gaps, cancel, memory, reuse. Ends with 1 when a target is missed.

    Needs a quiet machine: results are ratios within one run, but a run that is disturbed in its middle says little. The
    names in the JSON are below, and do not change.
    """
    caller = caller_of(context, as_json)
    scope = engine_bench.EngineScope(
        model=model,
        cases=[case.value for case in only or ()],
        peer=peer.value if peer else "",
        repeats=repeats,
        lengths=lengths,
        batches=batches,
        kv_policy=kv_policy,
        memory_gib=memory_gib,
        time_limit_s=time_limit_s,
        is_quick=quick,
    )
    _make(plots)
    if results_file is not None:
        results = _kept(results_file)
    else:
        with _progress(caller, "measuring the engine; minutes at full size") as say:
            results = engine_bench.run(scope, say)
    if plots is not None:
        _plot(caller, engine_plots.plots(results), plots)
    show = engine_bench.markdown if as_markdown else engine_bench.table
    caller.result(results, lambda out: out.print(show(results)))
    if not results["settings"]["is_quick"] and not all(target["is_met"] for target in results["targets"]):
        raise typer.Exit(PROBLEMS)


def _kept(file: Path) -> dict[str, Any]:
    """A run that was kept. Raises WrongUsage for any other file."""
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        engine_bench.table(results)
    except (ValueError, LookupError, TypeError, AttributeError):
        text = f"--results: {file}: expected what one run of `kvasir bench engine --json` printed"
        raise WrongUsage(text, field="--results") from None
    return results


@app.command("attention", epilog=attention_bench.KEYS)
def attention(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure little, and once, for a first look. No target counts then.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Attention over quantized pages beside MLX's own and a copy. Ends with 1 when a target is missed.

    It needs a GPU: on a CPU it shows that everything works, and its times mean nothing.
    """
    caller = caller_of(context, as_json)
    with _progress(caller, "measuring attention") as say:
        results = attention_bench.run(is_quick=quick, say=say)
    caller.result(results, lambda out: out.print(attention_bench.table(results), soft_wrap=True))
    if not all(target["is_met"] for target in results["targets"]):
        raise typer.Exit(PROBLEMS)


@app.command("quality", epilog=quality_report.KEYS)
def quality(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="A directory or name of an mlx-lm model. Left out: the shipped model.")
    ] = "",
    kv_exact_layers: Annotated[
        str, typer.Option(help='Layers that stay exact under every policy: "last", or indexes with commas between.')
    ] = "",
    compute_type: Annotated[
        str, typer.Option(help="float32, float16 or bfloat16; float32 on a CPU and else the model's own if left out.")
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Read this file (UTF-8, 1,024 tokens at least) in 16 windows instead, and measure each layer too.",
        ),
    ] = None,
    kv_policy: Annotated[
        MixedPolicy | None, typer.Option(help="With --text: the policy whose layers are measured one by one: q4.")
    ] = None,
    kv_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --text: bytes a token for that policy and the layers that stay exact. Left out: those of the "
            "next policy.",
        ),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNGs into this directory.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read and ask less, for a first look.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what each KV policy costs a model, against exact KV: KL, agreement, perplexity, recall, tool calls.

    It also shows which policy --kv-policy auto would choose.

    A model that has kvasir-tiny's tokenizer and answers is asked about conversations of its world; any other repeats
    random tokens and reads text of its own. Seeds are fixed.

    With --text the measure is your own text, with 95 % intervals over its windows: each policy, each layer alone under
    one of them, and the layers to keep exact (--kv-exact-layers of `kvasir up`) within a budget of bytes.
    """
    if text is None and (kv_policy or kv_bytes):
        raise InvalidArgument("--kv-policy and --kv-bytes belong to --text", field="text")
    caller = caller_of(context, as_json)
    _make(plots)
    options = [
        *(("--model", model), ("--kv-exact-layers", kv_exact_layers), ("--compute-type", compute_type)),
        *(("--text", text), ("--kv-policy", kv_policy and kv_policy.value), ("--kv-bytes", kv_bytes)),
    ]
    arguments = [str(part) for option in options if option[1] for part in option] + ["--quick"] * quick
    with _progress(caller, "measuring KV policies; minutes at full size") as say:
        results = run_program("kvasir_bench.quality", arguments, "KV policies were not measured", say)
    if plots is not None:
        _plot(caller, quality_plots.plots(results), plots)
    if as_markdown and not as_json:
        caller.out.print(quality_report.markdown(results), soft_wrap=True, markup=False, highlight=False)
    else:
        caller.result(results, lambda out: quality_report.show(out, results))


HttpOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Instead of gRPC: a server with /v1/chat/completions, Kvasir's or another."),
]
ApiKeyOption = Annotated[
    str, typer.Option(envvar="KVASIR_API_KEY", help="With --http: the key. The variable shows it to fewer.")
]


@app.command("load", epilog=load_bench.KEYS)
def load(
    context: typer.Context,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Turns a second on average. Left out: from --tokens-per-s, else 1.")
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Instead: as many turns as ask for so many tokens a second.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long turns arrive.")] = 60.0,
    ramp: Annotated[
        float | None, typer.Option(min=0, help="Seconds at the start that do not count. Left out: a fifth.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each turn, about.")] = 512,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Of each turn at most: a model may end earlier.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and texts.")] = 0,
    http: HttpOption = None,
    model: Annotated[str | None, typer.Option(help="With --http: the model's name at that server.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="With --http: the file of the key.")] = None,
    api_key: ApiKeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Let turns arrive at a running engine at a rate of their own, and show what they saw: p50, p95, p99.

    Turns arrive whether or not earlier ones have ended, as people do. The engine is that of the home, or --engine; with
    --http, any server of OpenAI's chat completions. There the wait for a first token has HTTP's share in it.
    """
    if rate is not None and tokens_per_s is not None:
        raise InvalidArgument("rate: expected --rate or --tokens-per-s, got both", field="rate")
    if (http is None) != (model is None) or (http is None and api_key_file is not None):
        raise InvalidArgument("--http and --model belong together, and --api-key-file to them", field="http")
    caller = caller_of(context, as_json)
    scope = load_bench.LoadScope(
        rate_per_s=rate or (tokens_per_s / reply_tokens if tokens_per_s else 1.0),
        seconds=seconds,
        ramp_s=seconds / 5 if ramp is None else ramp,
        prompt_tokens=prompt_tokens,
        reply_tokens=reply_tokens,
        seed=seed,
    )
    with _progress(caller, f"turns arrive for {seconds:.0f} s") as say:
        if http is not None and model is not None:
            key = read_token(api_key_file) if api_key_file is not None else api_key
            results = asyncio.run(_loaded_http(scope, http, model, key, say))
        else:
            results = asyncio.run(_loaded(caller, scope, say))
    caller.result(results, lambda out: out.print("\n".join(load_bench.lines(results))))
    if not results["first_token_s"]["count"]:
        raise typer.Exit(PROBLEMS)


async def _loaded(caller: Caller, scope: load_bench.LoadScope, say: Callable[[str], None]) -> dict[str, Any]:
    endpoint = caller.engine
    async with AioInferenceClient.connect(endpoint.address, token=endpoint.token(), tls=endpoint.tls) as client:
        return await load_bench.run(load_bench.GrpcTarget(client), scope, say)


async def _loaded_http(
    scope: load_bench.LoadScope, url: str, model: str, key: str, say: Callable[[str], None]
) -> dict[str, Any]:
    try:
        from kvasir_bench.load import http as load_http
    except ModuleNotFoundError:
        raise FailedPrecondition("--http needs an HTTP library: install kvasir[bench]") from None
    async with load_http.connected(url, model, key) as target:
        return await load_bench.run(target, scope, say)


@app.command("memory-path", epilog=memory_findings.KEYS)
def memory_path(
    context: typer.Context,
    lengths: Annotated[str, typer.Option(help="Of agents' memories in tokens, with commas between.")] = (
        "2048,8192,32768"
    ),
    model: Annotated[
        str, typer.Option(help="A directory or name of an mlx-lm model. Left out: the shipped model, or --shape.")
    ] = "",
    shape: Annotated[
        str,
        typer.Option(help="Instead: pages of this model's shape that are filled, not computed; llama-3.1-8b."),
    ] = "",
    prefill_tokens_per_s: Annotated[
        float,
        typer.Option(min=1, help="With --shape: how fast prompts are computed, which a restore is weighed against."),
    ] = 2000,
    repeats: Annotated[int, typer.Option(min=1, help="Agents of each length.")] = 3,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.01, help="Of the engine. Left out: half more than --shape's longest memory.")
    ] = None,
    home: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="A directory on the disk that is measured.")
    ] = Path("/tmp"),  # noqa: S108 - short: a socket's path must fit into a hundred bytes
    engine_option: Annotated[
        list[str] | None, typer.Option(help="Of `python -m inference_svc`, as --store-budget-ms=250. May be repeated.")
    ] = None,
    time_limit_s: Annotated[
        float | None, typer.Option(min=1, help="Begin no more repeats after so many seconds.")
    ] = None,
    kept: Annotated[
        Path | None,
        typer.Option("--keep", dir_okay=False, help="Write the results into FILE after each step, and logs beside it."),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNGs into this directory.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure the machine with less. No target counts then.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure agents' memories on their way to the store and back: cold, hot, restored from RAM and after kill -9.

    It starts a store and an engine of its own, and asks each agent the same question from the same memory, hot and
    after each loss: the replies must be the same. Beside it: this disk, hash, socket and device. Ends with 1 when a
    target is missed.
    """
    caller = caller_of(context, as_json)
    check_installed("store", "engine")
    if model and shape:
        raise WrongUsage("--shape: expected --model or --shape, got both", field="--shape")
    tokens = _token_counts(lengths)
    scope = PathScope(tokens, repeats, time_limit_s or 0.0, is_quick=quick)
    _make(plots)
    results: dict[str, Any] = {}

    def keep(found: dict[str, Any]) -> None:
        if kept is not None:
            kept.write_text(json.dumps(memory_findings.complete(found), indent=1), encoding="utf-8")

    room = memory_gib or memory_gib_for(max(tokens))
    played = ("--shape", shape, "--prefill-tokens-per-s", str(prefill_tokens_per_s)) if shape else ()
    with (
        _progress(caller, "measuring the memory path; minutes") as say,
        measured_services(
            home, model=model, played=played, memory_gib=room, options=engine_option or (), logs_to=kept
        ) as services,
    ):
        results = memory_findings.complete(measure(scope, services, say, keep))
    if plots is not None:
        _plot(caller, memory_findings.plots(results), plots)
    caller.result(results, lambda out: out.print(memory_findings.table(results), soft_wrap=True, highlight=False))
    if not quick and not all(target["is_met"] for target in results["targets"]):
        raise typer.Exit(PROBLEMS)


def _token_counts(text: str) -> list[int]:
    """Raises WrongUsage."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(counts):
        raise WrongUsage(f"--lengths: expected tokens with commas between, got {text!r}", field="--lengths")
    return counts


@app.command("memory")
def memory(
    context: typer.Context,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Of `kvasir scenario ls`; may be repeated. Left out: all of them.")
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="Of kv, prefill, bm25-K, killed, moved; may be repeated. Left out: all. Parts add up, as with --first."
        ),
    ] = None,
    variants: Annotated[
        int | None, typer.Option(min=1, help="Of each scenario: other words are told. Left out: 200; quick: 2.")
    ] = None,
    together: Annotated[int, typer.Option(min=1, max=100, help="Conversations beside each other.")] = 4,
    time_limit_s: Annotated[
        float | None, typer.Option(help="Begin no more variants after so many seconds; those that are played count.")
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="The first variant's number: for parts played side by side.")] = 1,
    played: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Add each batch to this file as soon as it has ended.")
    ] = None,
    played_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            exists=True,
            dir_okay=False,
            help="Play nothing: count what this --played file has; may be repeated.",
        ),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNGs into this directory.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="2 variants, one kill each. No claim about accuracy counts then.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Play scenarios with KV memory, without, with BM25's best messages, killed and moved. Hours at full size.

    kv remembers; prefill computes the whole transcript each turn; bm25-K sees its persona, the K past messages that fit
    best, and what is new; killed is kv with kill -9 of both services before each phase; moved goes on in another store
    and engine from the middle phase on. Services and home are its own; KVASIR_ENGINE_… in the environment are options
    of its engines, such as KVASIR_ENGINE_BATCH_INVARIANT=true on a GPU, where killed and moved need it to be the same.

    Ends with 1 when a claim is not met: kv is as accurate as prefill and more than each bm25-K, prefills less, killed
    and moved say the same, no agent says a drawn word that it was never shown.
    """
    caller = caller_of(context, as_json)
    try:
        from kvasir_bench.scenarios import report as measured
    except ModuleNotFoundError as error:
        if error.name not in ("kvasir_orchestrator", "yaml", "pydantic", "bm25s"):
            raise
        text = "bench memory needs the extra `bench`: pip install 'kvasir[bench]'"
        raise FailedPrecondition(text, reason="EXTRA_MISSING") from None
    _make(plots)
    if played_files:
        results = measured.of_files(played_files, is_quick=quick)
    else:
        options = {"variants": variants or (2 if quick else 200), "together": together, "first": first}
        scope = measured.scope_of(scenario or (), way or (), is_quick=quick, time_limit_s=time_limit_s, **options)
        with _progress(caller, "playing scenarios") as say:
            results = measured.run(scope, say, played)
    if plots is not None:
        _plot(caller, measured.plots(results), plots)
    caller.result(results, lambda out: out.print("\n".join(measured.lines(results)), soft_wrap=True))
    if not measured.holds(results):
        raise typer.Exit(PROBLEMS)


@app.command("make-model")
def make_model(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Where to write it: a new or empty directory.")],
    geometry: Annotated[
        str,
        typer.Option(
            help="llama-3.1-8b, llama-3.2-1b, gemma-3-4b, gemma-3-12b, gpt-oss-20b, qwen-2.5-7b, qwen-2.5-14b, "
            "qwen-3-8b or kvasir-tiny. NAME-2l is NAME with its first two layers."
        ),
    ],
    bits: Annotated[int | None, typer.Option(help="Of the weights, 4 or 8. Left out: those of --dtype.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first ones. Left out: all.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write a model of random weights with the configuration of a real one, to be measured where none can be fetched.

    Its tokenizer is kvasir-tiny's with as many tokens as the real one has.
    """
    caller = caller_of(context, as_json)
    options = [("--bits", bits), ("--layers", layers), ("--dtype", dtype), ("--seed", seed)]
    arguments = [str(directory), "--geometry", geometry]
    arguments += [str(part) for option in options if option[1] is not None for part in option]
    with _progress(caller, "writing the model") as say:
        made = run_program("kvasir_bench.synthetic", arguments, "the model was not written", say)
    text = f"{directory}: {made['layers']} layers, {size(made['weights_bytes'])} of weights in {made['seconds']} s"
    caller.result(made, lambda out: out.print(text))


@contextmanager
def _progress(caller: Caller, title: str) -> Iterator[Callable[[str], None]]:
    """Show what is being measured: one line that changes at a terminal, many lines elsewhere, none for scripts."""
    if caller.shows_progress:
        with caller.err.status(title) as status:
            yield status.update
    else:
        caller.say(f"{title} …")
        yield caller.say


def _make(directory: Path | None) -> None:
    """Make the pictures' directory before anything is measured: an error after hours would lose the results."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)


def _plot(caller: Caller, plots: Plots, directory: Path) -> None:
    try:
        written = plots.write(directory)
    except ImportError:
        caller.say("no pictures without matplotlib: install kvasir[bench]")
        return
    caller.say(f"wrote {', '.join(str(path) for path in written)}")
