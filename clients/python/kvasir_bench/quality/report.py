"""The results of `kvasir bench quality` for people, as tables and pictures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.quality import text_report, weights_report
from kvasir_bench.tables import Show, text_table

KEYS = """Names in the JSON stay. `reference` is mlx-lm's own KVCache in the type that the model computes in, and is
the baseline. `rungs` are Kvasir's KV policies, cheapest first; `peers` mlx-lm's own quantized caches. Each has
`name`, `bytes_per_token`, `kl` (of the next token, mean over `positions`, nats), `kl_worst`, `top1_agreement`,
`perplexity` (of all text read), `seconds`; and `recall`, `tool_calls` (questions answered right to the last token)
or, for a model that does not know kvasir-tiny's world, `repeat` (random tokens said a second time), each with
`share`, `right`, `n`; and `tasks`, by name, as these. A rung also `passes`, and `why`. `refused` are rungs and peers
that the model cannot have. `auto` is what --kv-policy auto would choose from this. `material` is questions, canary or
tasks. `seconds` is all of it.

"""
KEYS += f"{text_report.KEYS}\n\n{weights_report.KEYS}"

_TASKS = (("recall", "recall"), ("tool_calls", "tool calls"), ("repeat", "repeats"))


def lines(results: dict[str, Any], show: Show = text_table) -> Iterator[str]:
    if "weights" in results:
        yield from weights_report.lines(results, show)
        return
    if results["material"] == "text":
        yield from text_report.lines(results, show)
        return
    tasks = [(name, title) for name, title in _TASKS if name in results["reference"]]
    given = [(name, name.replace("_", " ")) for name in results["reference"].get("tasks", ())]
    counted = [title for _, title in (*tasks, *given)]
    titles = ["KV", "bytes a token", "KL", "worst KL", "top-1", "perplexity", *counted, "seconds"]
    ways = (results["reference"], *results["rungs"], *results["peers"])
    shares = ([*(each[name] for name, _ in tasks), *(each["tasks"][name] for name, _ in given)] for each in ways)
    rows = (_row(each, found) for each, found in zip(ways, shares, strict=True))
    yield from show([titles, *rows])
    yield ""
    yield (
        f"{results['model']} by {results['material']}, {results['reference']['positions']} next tokens, "
        f"{results['compute_type']} on {results['device']}, {results['seconds']:.0f} s in all"
    )
    yield from text_report.left_out(results)
    yield f"auto takes {results['auto']['chooses']}: {results['auto']['why']}"


def _row(found: dict[str, Any], tasks: Sequence[dict[str, Any]]) -> Sequence[str]:
    return [
        found["name"],
        str(found["bytes_per_token"]),
        _small(found["kl"]),
        _small(found["kl_worst"]),
        f"{found['top1_agreement']:.4f}",
        f"{found['perplexity']:.4f}",
        *(f"{task['right']}/{task['n']}" for task in tasks),
        f"{found['seconds']:.0f}",
    ]


def _small(value: float) -> str:
    return "0" if value == 0 or math.isnan(value) else f"{value:.1e}"


def plots(results: Mapping[str, Any]) -> Plots:
    """A picture of the policies, and of the layers where they were measured."""
    note = f"{results['model']}, {results['compute_type']} on {results['device']}, by {results['material']}"
    if "weights" in results:
        return Plots(note, {"quality_weights": weights_report.picture(results)})
    ways = [*results["rungs"], *([results["mixed"]] if results.get("mixed") else []), *results["peers"]]
    policies = [{"KV": f"{way['name']}\n{way['bytes_per_token']} B", "KL": way["kl"]} for way in ways]
    by_policy = Picture("KL of the next token against exact KV, nats", "KV", ("KL",), is_log=True)
    drawn = {"quality_policies": (by_policy, policies)}
    if layers := results.get("layers"):
        by_layer = Picture(f"KL of one layer under {layers['policy']}, all others exact, nats", "layer", ("KL",))
        drawn["quality_layers"] = (by_layer, [{"layer": str(row["layer"]), "KL": row["kl"]} for row in layers["rows"]])
    return Plots(note, drawn)
