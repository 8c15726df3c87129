"""Pictures of the results of `kvasir bench quality`: KL by policy and, with a text, by layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir_bench.engine.plots import Picture, draw


def plot(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write PNGs. Raises ImportError without matplotlib."""
    directory.mkdir(parents=True, exist_ok=True)
    note = f"{results['model']}, {results['compute_type']} on {results['device']}, by {results['material']}"
    ways = [*results["rungs"], *([results["mixed"]] if results.get("mixed") else []), *results["peers"]]
    pictures = {
        "policies": (
            Picture("KL of the next token against exact KV, nats", "KV", ("KL",), is_log=True),
            [{"KV": f"{way['name']}\n{way['bytes_per_token']} B", "KL": way["kl"]} for way in ways],
        )
    }
    if layers := results.get("layers"):
        title = f"KL of one layer under {layers['policy']}, all others exact, nats"
        pictures["layers"] = (
            Picture(title, "layer", ("KL",)),
            [{"layer": str(row["layer"]), "KL": row["kl"]} for row in layers["rows"]],
        )
    written = []
    for name, (picture, rows) in pictures.items():
        path = directory / f"quality_{name}.png"
        draw(picture, rows, path, note)
        written.append(path)
    return written
