"""A simulated fleet for people: tables and pictures, and the assumptions that each number stands on."""

from collections.abc import Iterable
from typing import Any

from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.tables import cells, text_table

KEYS = """Results: `fleet` (turns, bytes, and how many turns find their memory hot), `costs` (dollars a month),
`limits` (what the busiest hour asks of a part over what it gives, the worst first; above 1 it breaks), `assumptions`
(values with their sources; another file's by --assumptions). With --naps: `day` (wakes, how many were hidden, and
the cost), `kinds` (the same by kind of agent), `assumptions`."""


def lines(results: dict[str, Any]) -> Iterable[str]:
    """Of a simulated fleet, or of a day of naps."""
    return lines_of_naps(results) if "day" in results else lines_of_fleet(results)


def lines_of_fleet(results: dict[str, Any]) -> Iterable[str]:
    fleet, limits = results["fleet"], results["limits"]
    rows = [{"fleet": name.replace("_", " "), "value": _shown(name, value)} for name, value in fleet.items()]
    yield from text_table(cells(rows))
    yield ""
    yield from text_table(cells([{**each, "usd_a_month": f"{each['usd_a_month']:,.0f}"} for each in results["costs"]]))
    yield ""
    yield from text_table(cells(limits))
    worst = limits[0]
    verb = "breaks first" if worst["load"] > 1 else "would break first, and holds"
    yield ""
    yield f"{worst['part']}: {verb}, at {worst['load']:.2g} of what it gives."
    yield "On paper: --json has the assumptions with their sources, and --assumptions FILE takes yours."


def lines_of_naps(results: dict[str, Any]) -> Iterable[str]:
    day = results["day"]
    rows = [{"day": name.replace("_", " "), "value": _shown(name, value)} for name, value in day.items()]
    yield from text_table(cells(rows))
    yield ""
    yield from text_table(cells(results["kinds"]))
    yield ""
    yield f"{day['hidden_share']:.1%} of the wakes were over before their turn came."
    yield "On paper: --json has the assumptions with their sources, and --assumptions FILE takes yours."


def plots(results: dict[str, Any]) -> Plots:
    if "day" in results:
        picture = Picture("Wakes of a day, and those that were hidden", "kind", ("wakes", "hidden"))
        return Plots(f"{results['day']['agents']:,} agents, simulated", {"wakes": (picture, results["kinds"])})
    note = f"{results['fleet']['agents']:,} agents, {results['fleet']['engines']:,} engines, simulated"
    pictures = {
        "limits": (Picture("Load of each part in the busiest hour", "part", ("load",), is_log=True), results["limits"]),
        "costs": (Picture("Dollars a month", "cost", ("usd_a_month",), is_log=True), results["costs"]),
    }
    return Plots(note, pictures)


def _shown(name: str, value: float) -> str:
    if value >= 1e6 and "bytes" in name:
        return f"{value / 1e9:,.2f} GB"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
