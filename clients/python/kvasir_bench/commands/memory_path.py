"""`kvasir bench memory-path`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from kvasir.cli.caller import Caller
from kvasir.cli.failures import WrongUsage
from kvasir.cli.running.checks import check_installed
from kvasir.cli.showing.arguments import option

from kvasir_bench.commands.shown import HomeOption, PlotsOption, QuickOption, end, progress, show
from kvasir_bench.memory_path import findings
from kvasir_bench.memory_path.campaign import PathScope, measure
from kvasir_bench.memory_path.services import measured_services, memory_gib_for
from kvasir_bench.program import keep
from kvasir_bench.system import SHORT_HOME


@dataclass(frozen=True)
class PathOptions:
    """The memories that are measured, and the engine that has them."""

    lengths: Annotated[
        str, option("Tokens of agents' memories, separated by commas; the model's context cuts longer ones.")
    ] = "2048,8192,32768"
    model: Annotated[str, option("A directory or name of an mlx-lm model. Default: the shipped model, or --shape.")] = (
        ""
    )
    shape: Annotated[str, option("Instead, fill pages of this model's shape without computing them; llama-3.1-8b.")] = (
        ""
    )
    prefill_tokens_per_s: Annotated[
        float, option("With --shape: the speed of prefill, to which a restore is compared.", min=1)
    ] = 2000
    repeats: Annotated[int, option("The number of agents of each length.", min=1)] = 3
    memory_gib: Annotated[
        float | None, option("The engine's memory, in GiB. Default: half more than --shape's longest memory.", min=0.01)
    ] = None
    home: HomeOption = SHORT_HOME
    engine_option: Annotated[
        list[str] | None, option("An option of `python -m inference_svc`, as --store-budget-ms=250. Repeatable.")
    ] = None
    time_limit_s: Annotated[float | None, option("Begin no more repeats after this many seconds.", min=1)] = None
    quick: QuickOption = False


def memory_path(
    caller: Caller,
    options: PathOptions,
    kept: Annotated[
        Path | None,
        option("Write the results into FILE after each step, and logs beside it.", "--keep", dir_okay=False),
    ] = None,
    plots: PlotsOption = None,
) -> None:
    """Measure agents' memories on their way to the store and back: cold, hot, restored from RAM and after kill -9.

    It starts a store and an engine of its own, and asks each agent the same question from the same memory, hot and
    after each loss: the replies must be the same. It also measures this disk, hash, socket and device. Ends with 1 if a
    target is missed."""
    check_installed("store", "engine")
    if options.model and options.shape:
        raise WrongUsage.of("--shape", "expected --model or --shape, got both")
    tokens = _token_counts(options.lengths)
    scope = PathScope(tokens, options.repeats, options.time_limit_s or 0.0, is_quick=options.quick)
    rate = str(options.prefill_tokens_per_s)
    with (
        progress(caller, "measuring the memory path; minutes", plots) as say,
        measured_services(
            options.home,
            model=options.model,
            played=("--shape", options.shape, "--prefill-tokens-per-s", rate) if options.shape else (),
            memory_gib=options.memory_gib or memory_gib_for(max(tokens)),
            options=options.engine_option or (),
            logs_to=kept,
        ) as services,
    ):
        results = measure(scope, services, say, partial(keep, kept))
    show(caller, results, findings, plots)
    end(results, is_quick=options.quick)


def _token_counts(text: str) -> list[int]:
    """Raises WrongUsage."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(counts):
        raise WrongUsage.of("--lengths", f"expected tokens with commas between, got {text!r}")
    return counts
