"""Pictures of the results of `kvasir bench quality`: KL by policy and, with a text, by layer."""

from collections.abc import Mapping
from typing import Any

from kvasir_bench.pictures import Picture, Plots


def plots(results: Mapping[str, Any]) -> Plots:
    """A picture of the policies, and of the layers where they were measured."""
    note = f"{results['model']}, {results['compute_type']} on {results['device']}, by {results['material']}"
    ways = [*results["rungs"], *([results["mixed"]] if results.get("mixed") else []), *results["peers"]]
    policies = [{"KV": f"{way['name']}\n{way['bytes_per_token']} B", "KL": way["kl"]} for way in ways]
    by_policy = Picture("KL of the next token against exact KV, nats", "KV", ("KL",), is_log=True)
    drawn = {"quality_policies": (by_policy, policies)}
    if layers := results.get("layers"):
        by_layer = Picture(f"KL of one layer under {layers['policy']}, all others exact, nats", "layer", ("KL",))
        drawn["quality_layers"] = (by_layer, [{"layer": str(row["layer"]), "KL": row["kl"]} for row in layers["rows"]])
    return Plots(note, drawn)
