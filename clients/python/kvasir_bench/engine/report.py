"""The results of `kvasir bench engine` for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir_bench.tables import Show, cells, text_table, verdicts


def lines(results: Mapping[str, Any], show: Show = text_table) -> Iterator[str]:
    """The results for people, with tables as `show` makes them."""
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
    device = machine["device"] if machine["device"] == "cpu" else f"{machine['device_name']} ({machine['device']})"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {device}{blas}; {machine['platform']}; "
        f"Python {machine['python']}, mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}; "
        f"load {machine['load_before']} before, {machine['load_after']} after. "
        f"{model['name']}: {model['layers']} layers, {model['compute_type']}, K {model['key_bits']} and "
        f"V {model['value_bits']} bits, {model['kv_bytes_per_token']} bytes a token, cells of {model['cell_tokens']}. "
        f"Medians of {settings['repeats']}{', quick' if settings['is_quick'] else ''}; ± is half the spread."
    )
