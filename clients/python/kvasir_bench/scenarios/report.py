"""`kvasir bench memory`: homes of its own, the campaign in them, and its results as a table and pictures."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvasir.cli.demo.mac import macs
from kvasir.errors import InvalidArgument, NotFound
from kvasir_orchestrator import Scenario, shipped_names

from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.scenarios import claims, kept
from kvasir_bench.scenarios.accounting import Batch, Playthrough
from kvasir_bench.scenarios.campaign import Places, PlayScope, measure
from kvasir_bench.tables import text_table

_PICTURES = {
    "accuracy": Picture("Facts told right, by turns since they were told", "way", ("accuracy",), by="age"),
    "prefilled": Picture("Prompt tokens computed, as a share of a full prefill", "way", ("share_of_prefill",)),
    "first_token": Picture("Seconds to the first token", "way", ("first_token_p50_s", "first_token_p95_s")),
}


def scope_of(scenarios: Sequence[str], ways: Sequence[str], *, is_quick: bool, **options: Any) -> PlayScope:
    """What is to be played. Raises NotFound for a scenario that does not ship, InvalidArgument for another way."""
    names = list(scenarios) or shipped_names()
    for name in names:
        Scenario.shipped(name)
    if unknown := sorted(set(ways) - set(claims.WAYS)):
        raise InvalidArgument(f"--way {unknown[0]}: expected one of {', '.join(claims.WAYS)}", field="way")
    wanted = [way for way in claims.WAYS if way in ways or not ways]
    return PlayScope(names, wanted, kills_once=is_quick, warms_up=not is_quick, **options)


def shapes(names: Sequence[str]) -> dict[str, dict[str, int]]:
    found = {name: Scenario.shipped(name) for name in names}
    return {name: {"phases": len(each.phases), "agents": len(each.agents)} for name, each in found.items()}


def run(scope: PlayScope, say: Callable[[str], None], played_file: Path | None) -> dict[str, Any]:
    began = time.monotonic()

    def keep(batch: Batch, played: Sequence[Playthrough]) -> None:
        if played_file is not None:
            kept.append(played_file, batch, played)

    with macs() as make:
        first, second = (make(name, model=scope.model) for name in ("here", "there"))
        first.start()
        second.start()

        def restart() -> None:
            first.kill()
            first.start()

        places = Places(first.engine.address, second.engine.address, restart)
        played, batches = asyncio.run(measure(scope, places, say, keep=keep))
    return _results({**asdict(scope), "elapsed_s": round(time.monotonic() - began, 1)}, played, batches)


def of_files(paths: Sequence[Path], *, is_quick: bool) -> dict[str, Any]:
    """The results of campaigns that were kept. Raises DataLoss, and NotFound if nothing was played under every way."""
    played, batches = kept.read(paths, claims.WAYS)
    if not played:
        raise NotFound("no conversation was played under every way")
    names = sorted({each.scenario for each in played})
    sizes = {batch.conversations for batch in batches}
    together = {"together_least": min(sizes), "together": max(sizes)}
    settings = {"scenarios": names, **together, "kills_once": is_quick, "files": len(paths)}
    return _results({**settings, "elapsed_s": round(sum(batch.wall_s for batch in batches), 1)}, played, batches)


def _results(settings: dict[str, Any], played: Sequence[Playthrough], batches: Sequence[Batch]) -> dict[str, Any]:
    engines = sorted({batch.engine for batch in batches if batch.engine})
    return {
        "settings": {**settings, "variants": len({each.variant for each in played}), "engines": engines},
        "rows": claims.rows(played, batches),
        "ages": claims.ages(played),
        "claims": claims.claims(played),
        "wanted": claims.wanted(played),
        "leaks": [leak for each in played for leak in each.leaks],
    }


def holds(results: Mapping[str, Any]) -> bool:
    """Whether every claim is met that counts: with few variants, those without chance in them."""
    is_quick = results["settings"]["kills_once"]
    return all(claim["is_met"] for claim in results["claims"] if claim["is_exact"] or not is_quick)


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    settings = results["settings"]
    variants = f"{settings['variants']} variants of {', '.join(settings['scenarios'])}"
    engines = "; ".join(settings["engines"])
    least, most = settings.get("together_least", settings["together"]), settings["together"]
    beside = f"{most}" if least == most else f"{least} to {most}"
    yield f"{variants}, {beside} beside each other on {engines}, {settings['elapsed_s']:.0f} s"
    for scenario in dict.fromkeys(row["scenario"] for row in results["rows"]):
        yield f"\n{scenario}"
        of_scenario = [row for row in results["rows"] if row["scenario"] == scenario]
        yield from text_table([_HEADINGS, *(_cells(row) for row in of_scenario)])
    yield "\nfacts told right by their age, in turns of the conversation"
    yield from text_table([["way", *_ages(results)], *_age_rows(results)])
    yield ""
    for claim in results["claims"]:
        yield f"{'met' if claim['is_met'] else 'NOT MET'}: {claim['what']} ({claim['found']})"
    if wanted := results["wanted"]:
        yield f"{'reached' if wanted['is_met'] else 'not reached'}, no claim: {wanted['what']} ({wanted['found']})"


_HEADINGS = [
    *("way", "distinct", "facts right", "95 %", "unknown right", "leaks", "prefilled", "of prefill"),
    *("first token p50", "p95", "wall", "hot", "stored"),
]


def _cells(row: Mapping[str, Any]) -> list[str]:
    share = row["share_of_prefill"]
    return [
        row["way"],
        f"{row['distinct']} of {row['conversations']}",
        f"{row['right']}/{row['facts']} {row['accuracy']:.1%}",
        _span(row),
        f"{row['unknown_right']}/{row['unknown']}",
        str(row["leaks"]),
        f"{row['prefilled_tokens']:,}",
        "–" if share is None else f"{share:.1%}",
        *(f"{1000 * row[key]:,.0f} ms" for key in ("first_token_p50_s", "first_token_p95_s")),
        f"{row['wall_s']:.1f} s",
        *(f"{row[key] / 1e6:.2f} MB" for key in ("hot_bytes", "stored_bytes")),
    ]


def _span(row: Mapping[str, Any]) -> str:
    return f"{row['low']:.1%} to {row['high']:.1%}"


def _ages(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["age"] for row in results["ages"]))


def _age_rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    found = {(row["way"], row["age"]): row for row in results["ages"]}
    for way in dict.fromkeys(row["way"] for row in results["ages"]):
        of_way = (found.get((way, age)) for age in _ages(results))
        yield [way, *(f"{row['right']}/{row['facts']} ({_span(row)})" if row else "–" for row in of_way)]


def plots(results: Mapping[str, Any]) -> Plots:
    note = f"{results['settings']['variants']} variants of {', '.join(results['settings']['scenarios'])}"
    whole = [row for row in results["rows"] if row["scenario"] == claims.ALL]
    rows = {"accuracy": results["ages"], "prefilled": whole, "first_token": whole}
    return Plots(note, {f"memory_{name}": (each, rows[name]) for name, each in _PICTURES.items()})
