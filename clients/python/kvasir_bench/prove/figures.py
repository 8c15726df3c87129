"""The few figures of a proof by which machines are compared, as text, and several proofs side by side."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument

from kvasir_bench.prove.result import broken_claims, claims, read_result
from kvasir_bench.tables import cells, number


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """By their names; only those of steps that the proof has."""
    values = {record["name"]: record["value"] for record in result["steps"] if "value" in record}
    return dict(_figures(result, values))


def read_shown(file: Path) -> dict[str, Any]:
    """A result that was signed, and whose figures can be shown. Raises InvalidArgument, which names the field."""
    result = read_result(file)
    for place, record in enumerate(result["steps"]):
        try:
            figures({**result, "steps": [record]})
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            name, why = f"steps[{place}].value", f"{type(error).__name__}: {error}"
            raise InvalidArgument(f"{file}: {name} ({record['name']}) has other fields: {why}", field=name) from None
    return result


def side_by_side(results: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """A heading and rows: a column for each proof."""
    columns = [figures(result) for result in results]
    names = dict.fromkeys(name for column in columns for name in column if name != "chip")
    heading = ("", *(column.get("chip", "–") for column in columns))
    return [heading, *((name, *(column.get(name, "–") for column in columns)) for name in names)]


def _figures(result: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine = values.get("machine", {})
    if machine:
        yield "chip", str(machine["chip"])
        yield "cores", str(machine["cores"])
        yield "memory", f"{machine['memory_bytes'] / 1e9:.0f} GB"
        yield "system", str(machine["system"])
        noise = "" if machine["times_mean_something"] else ": too high, times are left out"
        yield "load at the start", number(machine["load"]) + noise
    made_with = result["made_with"]
    yield "day", result["day"] + (", quick" if made_with["is_quick"] else "")
    yield "kvasir", f"{made_with['versions']['kvasir']} ({made_with['versions']['source']})"
    yield "mlx", str(made_with["versions"]["packages"]["mlx"])
    yield "model", made_with.get("model") or "kvasir-tiny"
    every = claims(result)
    yield "claims met", f"{sum(is_met for _, is_met in every)} of {len(every)}"
    yield "steps failed or claims broken", str(len(broken_claims(result)))
    if "attention" in values:
        yield "attention by", values["attention"]["implementation"]
    if machine.get("times_mean_something", True):
        yield from _times(values)


def _times(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if targets := [row for value in values.values() for row in value.get("targets", ())]:
        yield "targets met", f"{sum(row['is_met'] for row in targets)} of {len(targets)}"
    if "first-day" in values:
        yield "a synced write", f"{1000 * values['first-day']['synced_write_s']:.3g} ms"
        yield "engine ready", f"{values['first-day']['engine_ready_s']:.3g} s"
    for name in ("decode", "first-token"):
        yield from _rows(values.get(name, {}).get("cases", {}))
    for row in values.get("memory-path", {}).get("rows", ()):
        restored = row["engine_killed_of_cold"]
        yield f"first token after a kill / cold, {row['length']:,} tokens", number(restored)
        yield f"publishing, {row['length']:,} tokens", f"{(row['publish_per_s'] or 0) / 1e6:,.0f} MB/s"


def _rows(cases: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of decoding the rates, of mlx-lm the ratios, of first tokens the times."""
    for case, name, key in (("decode", "decode, tokens/s", "tokens_per_s"), ("peer", "decode / mlx-lm", "ratio")):
        for context, rows in groupby(cases.get(case, {}).get("rows", ()), itemgetter("context")):
            batches, rates = zip(*((str(row["batch"]), number(row[key])) for row in rows), strict=True)
            yield f"{name}, {' / '.join(batches)} rows, {context} tokens", " / ".join(rates)
    for row in cases.get("first_token", {}).get("rows", ()):
        heading, found = cells([{key: row[key] for key in ("cold_s", "warm_s", "hot_s")}])
        times = ", ".join(f"{name} {value}" for name, value in zip(heading, found, strict=True))
        yield f"first token, {row['context_tokens']:,} tokens", times
