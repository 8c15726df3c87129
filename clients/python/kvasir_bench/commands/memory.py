"""`kvasir bench memory`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS
from kvasir.cli.showing.arguments import option
from kvasir.errors import FailedPrecondition

from kvasir_bench.commands.shown import ModelOption, PlotsOption, progress, show


@dataclass(frozen=True)
class ScopeOptions:
    """What is played, and how much of it."""

    model: ModelOption = ""
    scenario: Annotated[list[str] | None, option("A scenario of `kvasir scenario ls`; repeatable. Default: all.")] = (
        None
    )
    way: Annotated[
        list[str] | None,
        option("One of kv, prefill, bm25-K, killed, moved; repeatable. Default: all. Parts add up, as with --first."),
    ] = None
    variants: Annotated[
        int | None, option("Variants of each scenario, with other words. Default: 200; with --quick 2.", min=1)
    ] = None
    together: Annotated[int, option("The number of conversations at the same time.", min=1, max=100)] = 4
    time_limit_s: Annotated[
        float | None, option("Begin no more variants after this many seconds; finished ones count.")
    ] = None
    first: Annotated[int, option("The first variant's number, for parts that run side by side.", min=1)] = 1
    quick: Annotated[
        bool, option("Play 2 variants with one kill each. Claims about accuracy do not count.", "--quick")
    ] = False


def memory(
    caller: Caller,
    options: ScopeOptions,
    played: Annotated[Path | None, option("Add each batch to this file when it ends.", dir_okay=False)] = None,
    played_files: Annotated[
        list[Path] | None,
        option(
            "Play nothing; count the results of this --played file. Repeatable.",
            "--results",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    plots: PlotsOption = None,
) -> None:
    """Play scenarios with KV memory, without, with BM25's best messages, killed and moved. Hours at full size.

    kv remembers; prefill computes the whole transcript each turn; bm25-K sees its persona, the K past messages that fit
    best, and new messages; killed is kv with kill -9 of both services before each phase; moved continues in another
    store and engine from the middle phase on. It has its own services and home; KVASIR_ENGINE_… in the environment are
    options of its engines, such as KVASIR_ENGINE_BATCH_INVARIANT=true on a GPU, where killed and moved need it to be
    the same.

    Ends with 1 when a claim is not met: kv is as accurate as prefill and more than each bm25-K, prefills less, killed
    and moved say the same, no agent says a drawn word that it was never shown."""
    try:
        from kvasir_bench.scenarios import report
    except ModuleNotFoundError as error:
        if error.name not in ("kvasir_orchestrator", "yaml", "pydantic", "bm25s"):
            raise
        text = "bench memory needs the extra `bench`: pip install 'kvasir[bench]'"
        raise FailedPrecondition(text, reason="EXTRA_MISSING") from None
    if played_files:
        results = report.of_files(played_files, is_quick=options.quick)
    else:
        scope = report.scope_of(
            options.scenario or (),
            options.way or (),
            is_quick=options.quick,
            variants=options.variants or (2 if options.quick else 200),
            together=options.together,
            time_limit_s=options.time_limit_s,
            first=options.first,
            model=options.model,
        )
        with progress(caller, "playing scenarios", plots) as say:
            results = report.run(scope, say, played)
    show(caller, results, report, plots)
    if not report.holds(results):
        raise typer.Exit(PROBLEMS)
