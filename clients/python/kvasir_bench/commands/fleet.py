"""`kvasir bench fleet --simulate`."""

import json
from pathlib import Path
from typing import Annotated, Any

from kvasir.cli.caller import Caller
from kvasir.cli.failures import WrongUsage
from kvasir.cli.showing.arguments import option

from kvasir_bench.commands.shown import PlotsOption, progress, show
from kvasir_bench.fleet import report

_ASSUMPTIONS = Path(report.__file__).with_name("assumptions.json")
_NAPS = _ASSUMPTIONS.with_name("naps.json")


def fleet(
    caller: Caller,
    simulate: Annotated[bool, option("Compute on paper, with the code's own placement.", "--simulate")] = False,
    agents: Annotated[int | None, option("The number of agents. Default: a million.", min=1)] = None,
    engines: Annotated[int | None, option("The number of engines. Default: ten thousand.", min=1)] = None,
    naps: Annotated[
        bool,
        option("Simulate one engine whose agents sleep: how many wakes it hides.", "--naps"),
    ] = False,
    assumptions: Annotated[
        Path | None, option("A JSON file with values that replace the known ones.", exists=True, dir_okay=False)
    ] = None,
    plots: PlotsOption = None,
) -> None:
    """Simulate a day of a fleet: placement, hot memories, requests and bytes, dollars a month, and what breaks first;
    or, with --naps, a day of one engine that wakes sleeping agents before their turns, by its own policy.

    It starts nothing, and measures only the time of a gateway's choice; each assumption names its source."""
    if not simulate:
        raise WrongUsage.of("--simulate", "expected; a fleet is only simulated so far")
    if naps and engines is not None:
        raise WrongUsage.of("--engines", "expected none with --naps, which simulates one engine")
    given = _given(_NAPS if naps else _ASSUMPTIONS, assumptions)
    given |= {name: value for name, value in (("agents", agents), ("engines", engines)) if value is not None}
    if naps:
        from kvasir_bench.fleet.naps import simulate as simulated
    else:
        from kvasir_bench.fleet.simulation import simulate as simulated

    with progress(caller, "simulating a day", plots):
        try:
            results = simulated(given)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise WrongUsage.of("--assumptions", error) from None
        except MemoryError as error:
            raise WrongUsage.of("--agents", f"too many for this machine's memory: {error}") from None
    show(caller, results, report, plots)


def _given(known: Path, file: Path | None) -> dict[str, Any]:
    """The known assumptions, and another file's in their place. Raises WrongUsage."""
    given: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))
    if file is None:
        return given
    try:
        own = json.loads(file.read_text(encoding="utf-8"))
        unknown = sorted(set(own) - set(given))
    except (ValueError, TypeError) as error:
        raise WrongUsage.of("--assumptions", f"{file}: expected a JSON object: {error}") from None
    if unknown:
        raise WrongUsage.of("--assumptions", f"{unknown[0]!r}: expected one of {', '.join(given)}")
    return {**given, **own}
