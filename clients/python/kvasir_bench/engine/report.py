"""The results of `kvasir bench engine` for people: tables, pictures, and the meanings of the names in its JSON."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.tables import Show, cells, text_table, verdicts

_MEANINGS = json.loads(Path(__file__).with_name("keys.json").read_text("utf-8"))
TOP: Mapping[str, str] = _MEANINGS["TOP"]
CASES: Mapping[str, Mapping[str, str]] = _MEANINGS["CASES"]
SPREAD = "…_spread: (largest − smallest) / median over the repeats"


def help_text() -> str:
    """All names, a paragraph for each case."""
    paragraphs = [_paragraph("JSON", TOP), *(_paragraph(case, keys) for case, keys in CASES.items()), SPREAD]
    return "\n\n".join(paragraphs)


def _paragraph(name: str, keys: Mapping[str, str]) -> str:
    meanings = "; ".join(f"{key}: {meaning}" for key, meaning in keys.items() if meaning)
    return f"{name}: {meanings}."


PICTURES = {name: Picture(**{**row, "y": tuple(row["y"])}) for name, row in _MEANINGS["PICTURES"].items()}


def plots(results: Mapping[str, Any]) -> Plots:
    machine = results["machine"]
    computer = f"{machine['processor']}, {machine['cores']} cores"
    computer = computer if machine["device"] == "cpu" else machine["device_name"]
    note = f"{computer}, mlx {machine['mlx']}, {results['model']['name']}"
    return Plots(note, {name: (PICTURES[name], case["rows"]) for name, case in results["cases"].items()})


def lines(results: Mapping[str, Any], show: Show = text_table) -> Iterator[str]:
    heading = "{}" if show is text_table else "### {}\n"
    yield f"{_machine(results)}\n"
    for case in results["cases"].values():
        yield heading.format(case["title"])
        yield from show(cells(case["rows"]))
        yield ""
    if results["targets"]:
        yield heading.format("Targets")
        yield from show(verdicts(results["targets"]))


def _machine(results: Mapping[str, Any]) -> str:
    machine, model, settings = results["machine"], results["model"], results["settings"]
    blas = f", {machine['blas']}" if machine["blas"] else ""
    fewest, most = settings.get("fewest_repeats", settings["repeats"]), settings["repeats"]
    repeats = f"{fewest} to {most}" if fewest < most else most
    device = machine["device"] if machine["device"] == "cpu" else f"{machine['device_name']} ({machine['device']})"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {device}{blas}; {machine['platform']}; "
        f"Python {machine['python']}, mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}; "
        f"load {machine['load_before']} before, {machine['load_after']} after. "
        f"{model['name']}: {model['layers']} layers, {model['compute_type']}, K {model['key_bits']} and "
        f"V {model['value_bits']} bits, {model['kv_bytes_per_token']} bytes a token, cells of {model['cell_tokens']}. "
        f"Medians of {repeats}{', quick' if settings['is_quick'] else ''}; ± is half the spread."
    )
