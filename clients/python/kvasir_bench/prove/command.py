"""`kvasir prove`."""

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS, WrongUsage
from kvasir.cli.running.checks import check_installed
from kvasir.cli.showing.arguments import option
from kvasir.errors import FailedPrecondition

from kvasir_bench.program import measured_by
from kvasir_bench.prove.figures import figures, read_shown
from kvasir_bench.prove.machine import versions
from kvasir_bench.prove.page import page
from kvasir_bench.prove.power import Power, kept_awake, wait_until_well
from kvasir_bench.prove.proving import KeptSteps, Prover, in_words, only_proof
from kvasir_bench.prove.result import broken_claims, claims, personal_words, result_of, signed
from kvasir_bench.prove.step import ProofScope, Step, Value
from kvasir_bench.prove.steps import steps_of
from kvasir_bench.system import chip
from kvasir_bench.tables import text_table

HELP = """The steps, in order: versions, chip, memory and disk; kernels against the reference on the device; a batch
as alone; kill -9 and restore; clocks, limits and memory of services without work; the suites of KV and engine, where
the source is; then `kvasir bench attention`, `bench engine --peer mlx-lm` and `bench memory-path`.

A finished step is kept in the home with the versions it was made with. After a kill or Ctrl-C the same command goes on
with the first step that lacks; another version or chip begins again. It pauses while the battery is low or the machine
is hot.

The JSON has the model's name, no names of people and machines, and no paths. Its `digest` is BLAKE3 of its content, its
`signature` Ed25519 over the digest by a key in the home: nothing was changed after it was signed, and results of one
`public_key` come from one home. Anybody can sign with a key of their own: it does not show that a machine measured
truthfully. In a checkout `python -m tools.measured FILE` adds it to the kept measurements."""


def prove(
    caller: Caller,
    model: Annotated[str, option("A directory or name of an mlx-lm model. Default: the shipped one.")] = "",
    out: Annotated[Path, option("The directory of kvasir-prove.json and kvasir-prove.html.", file_okay=False)] = Path(),
    fresh: Annotated[bool, option("Forget the finished steps of an interrupted proof.", "--fresh")] = False,
    no_pause: Annotated[bool, option("Continue with a low battery or a hot machine.", "--no-pause")] = False,
    results_file: Annotated[
        Path | None,
        option("Prove nothing: check and show this JSON.", "--results", exists=True, dir_okay=False),
    ] = None,
    quick: Annotated[bool, option("Take two minutes: small cases, once, without test suites.", "--quick")] = False,
) -> None:
    """Check and measure Kvasir on this machine, about fifteen minutes, as one signed JSON and a page.

    Ends with 1 if a claim about exactness fails, or a step; it only shows targets of speed."""
    if results_file is not None:
        given = {"--model": model, "--out": out != Path(), "--fresh": fresh, "--no-pause": no_pause, "--quick": quick}
        if useless := [name for name, value in given.items() if value]:
            raise WrongUsage(f"{', '.join(useless)}: --results shows a proof and makes none", field=useless[0])
        result = read_shown(results_file)
    else:
        check_installed("store", "engine")
        out.mkdir(parents=True, exist_ok=True)
        caller.home.make()
        scope = ProofScope(str(Path(model).expanduser().absolute()) if model and Path(model).is_dir() else model, quick)
        with only_proof(caller.home.prove), kept_awake():
            result = _proved(caller, scope, fresh=fresh, power=None if no_pause else Power())
            _write(result, out)
            KeptSteps(caller.home.prove, {}).clear()
    caller.result(
        result, lambda out: out.print("\n".join(_lines(result)), soft_wrap=True, markup=False, highlight=False)
    )
    if results_file is None:
        caller.say(f"wrote {out / 'kvasir-prove.json'} and {out / 'kvasir-prove.html'}")
    if broken_claims(result):
        raise typer.Exit(PROBLEMS)


def _proved(caller: Caller, scope: ProofScope, *, fresh: bool, power: Power | None) -> dict[str, Any]:
    made_with = {"versions": versions(), "is_quick": scope.is_quick, "model": Path(scope.model).name}
    # Homes may lie on a disk that several machines share.
    kept = KeptSteps(caller.home.prove, {**made_with, "model": scope.model, "chip": chip()})
    if fresh:
        kept.clear()
    steps = steps_of(scope)
    caller.say(f"{len(steps)} steps, {in_words(sum(step.expected_s(scope) for step in steps))} on a laptop")
    wait: Callable[[], None] = partial(wait_until_well, power, caller.say) if power else lambda: None

    def measured(step: Step) -> Value:
        options = {"--model": scope.model, "--quick": scope.is_quick}
        value = measured_by("prove", f"{step.title} failed", options, lambda line: caller.say(f"    {line}"), step.name)
        if versions() != made_with["versions"]:
            raise FailedPrecondition(f"{step.title}: Kvasir or one of its packages was changed meanwhile")
        return value

    records = Prover(scope, kept, measured, wait, caller.say).prove(steps)
    result = result_of(records, made_with, datetime.datetime.now(datetime.UTC).date(), personal_words())
    return signed(result, caller.home.prove / "signing.key")


def _write(result: Mapping[str, Any], directory: Path) -> None:
    (directory / "kvasir-prove.json").write_text(json.dumps(result, indent=1), "utf-8")
    (directory / "kvasir-prove.html").write_text(page(result), "utf-8")


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield from text_table([("", "found"), *figures(result).items()])
    yield from (f"{'✓' if is_met else '✗'} {text}" for text, is_met in claims(result))
    yield from (f"✗ {step['failed']}" for step in result["steps"] if "failed" in step)
