"""`kvasir bench memory-path`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from kvasir.cli.caller import JsonOption, caller_of
from kvasir.cli.failures import WrongUsage
from kvasir.cli.running.checks import check_installed

from kvasir_bench.commands.shown import HomeOption, PlotsOption, QuickOption, end, progress, show
from kvasir_bench.memory_path import findings
from kvasir_bench.memory_path.campaign import PathScope, measure
from kvasir_bench.memory_path.services import measured_services, memory_gib_for
from kvasir_bench.program import keep
from kvasir_bench.system import SHORT_HOME

LengthsOption = Annotated[str, typer.Option(help="Of agents' memories in tokens, with commas between.")]
ModelOption = Annotated[
    str, typer.Option(help="A directory or name of an mlx-lm model. Left out: the shipped model, or --shape.")
]
ShapeOption = Annotated[
    str, typer.Option(help="Instead: pages of this model's shape that are filled, not computed; llama-3.1-8b.")
]
PrefillRateOption = Annotated[
    float, typer.Option(min=1, help="With --shape: how fast prompts are computed, which a restore is weighed against.")
]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Agents of each length.")]
MemoryOption = Annotated[
    float | None, typer.Option(min=0.01, help="Of the engine. Left out: half more than --shape's longest memory.")
]
EngineOptions = Annotated[
    list[str] | None, typer.Option(help="Of `python -m inference_svc`, as --store-budget-ms=250. May be repeated.")
]
TimeLimitOption = Annotated[float | None, typer.Option(min=1, help="Begin no more repeats after so many seconds.")]
KeptOption = Annotated[
    Path | None,
    typer.Option("--keep", dir_okay=False, help="Write the results into FILE after each step, and logs beside it."),
]


def memory_path(
    context: typer.Context,
    lengths: LengthsOption = "2048,8192,32768",
    model: ModelOption = "",
    shape: ShapeOption = "",
    prefill_tokens_per_s: PrefillRateOption = 2000,
    repeats: RepeatsOption = 3,
    memory_gib: MemoryOption = None,
    home: HomeOption = SHORT_HOME,
    engine_option: EngineOptions = None,
    time_limit_s: TimeLimitOption = None,
    kept: KeptOption = None,
    plots: PlotsOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure agents' memories on their way to the store and back: cold, hot, restored from RAM and after kill -9.

    It starts a store and an engine of its own, and asks each agent the same question from the same memory, hot and
    after each loss: the replies must be the same. Beside it: this disk, hash, socket and device. Ends with 1 when a
    target is missed."""
    caller = caller_of(context, as_json)
    check_installed("store", "engine")
    if model and shape:
        raise WrongUsage("--shape: expected --model or --shape, got both", field="--shape")
    tokens = _token_counts(lengths)
    scope = PathScope(tokens, repeats, time_limit_s or 0.0, is_quick=quick)
    room = memory_gib or memory_gib_for(max(tokens))
    played = ("--shape", shape, "--prefill-tokens-per-s", str(prefill_tokens_per_s)) if shape else ()
    with (
        progress(caller, "measuring the memory path; minutes", plots) as say,
        measured_services(
            home, model=model, played=played, memory_gib=room, options=engine_option or (), logs_to=kept
        ) as services,
    ):
        results = measure(scope, services, say, partial(keep, kept))
    show(caller, results, findings, plots)
    end(results, is_quick=quick)


def _token_counts(text: str) -> list[int]:
    """Raises WrongUsage."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(counts):
        raise WrongUsage(f"--lengths: expected tokens with commas between, got {text!r}", field="--lengths")
    return counts
