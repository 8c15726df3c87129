"""The results of `kvasir bench quality` for people, as tables and pictures."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.tables import Show, text_table

KEYS = """Names in the JSON stay. `reference` is mlx-lm's own KVCache in the type that the model computes in, and is
the baseline. `rungs` are Kvasir's KV policies, cheapest first; `peers` mlx-lm's own quantized caches. Each has
`name`, `bytes_per_token`, `kl` (of the next token, mean over `positions`, nats), `kl_worst`, `top1_agreement`,
`perplexity` (of all text read), `seconds`; and `recall`, `tool_calls` (questions answered right to the last token)
or, for a model that does not know kvasir-tiny's world, `repeat` (random tokens repeated once), each with
`share`, `right`, `n`; and `tasks`, by name, as these. A rung also `passes`, and `why`. `refused` are rungs and peers
that the model cannot have. `auto` is what --kv-policy auto would choose from this. `material` is questions, canary or
tasks. `seconds` is all of it.

With --text, `material` is text, and `text` has its `file`, `windows`, `window_tokens`. Instead of questions,
each way has 95 % intervals over the windows: `kl_low`, `kl_high`, `top1_low`, `top1_high`, and `perplexity_rise` over
`reference`, window by window, with `perplexity_rise_low` and `perplexity_rise_high`. `layers` has the `policy` under
which each of `rows` was stored alone, all other layers exact, in `windows` (every second one): `layer`, `kl`, `kl_low`,
`kl_high`, `top1_agreement`, `exact_adds_bytes` (a token). `mixed` is that policy with the layers exact that
`suggestion.budget_bytes` a token pays for, or null. `suggestion` has `kv_policy` and `kv_exact_layers` for `kvasir up`,
and `why`: the cheapest within the budget that is not worse, by the windows that chose no layer.

With --weights, `weights` stand in place of `rungs`, `peers` and `auto`; `reference` is the model with its own
weights. Each has `name`, `bits` of a coded weight, `matrices` (how many are coded), `effective_bits` (of a weight of
the whole model, with scales and biases; what stays counts 16), `weights_bytes`, and the measures above. `refused` are
matrices that MLX cannot code."""

_TEXT_WAYS = ["KV", "bytes a token", "KL", "top-1", "perplexity", "its rise"]
_LAYERS = ["layer", "KL alone", "top-1", "exact adds"]
_TASKS = {"recall": "recall", "tool_calls": "tool calls", "repeat": "repeats"}


def lines(results: dict[str, Any], show: Show = text_table) -> Iterator[str]:
    if "weights" in results:
        yield from _weights_lines(results, show)
        return
    if results["material"] == "text":
        yield from _text_lines(results, show)
        return
    ways = (results["reference"], *results["rungs"], *results["peers"])
    counted, shares = _tasks(results["reference"], ways)
    titles = ["KV", "bytes a token", "KL", "worst KL", "top-1", "perplexity", *counted, "seconds"]
    yield from show([titles, *map(_row, ways, shares)])
    yield ""
    yield (
        f"{results['model']} by {results['material']}, {results['reference']['positions']} next tokens, "
        f"{results['compute_type']} on {results['device']}, {results['seconds']:.0f} s in all"
    )
    yield from _left_out(results)
    yield f"auto takes {results['auto']['chooses']}: {results['auto']['why']}"


def _tasks(reference: Mapping[str, Any], ways: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The titles of the tasks; and for each way, how many answers to each were right."""
    asked = {name: title for name, title in _TASKS.items() if name in reference}
    given = list(reference.get("tasks", ()))
    found = ([*(way[name] for name in asked), *(way["tasks"][name] for name in given)] for way in ways)
    shares = [[f"{task['right']}/{task['n']}" for task in tasks] for tasks in found]
    return [*asked.values(), *(name.replace("_", " ") for name in given)], shares


def _row(found: dict[str, Any], shares: Sequence[str]) -> Sequence[str]:
    return [
        found["name"],
        str(found["bytes_per_token"]),
        _small(found["kl"]),
        _small(found["kl_worst"]),
        f"{found['top1_agreement']:.4f}",
        f"{found['perplexity']:.4f}",
        *shares,
        f"{found['seconds']:.0f}",
    ]


def _weights_lines(results: Mapping[str, Any], show: Show) -> Iterator[str]:
    """The cost of each choice of matrices in fewer bits."""
    reference = results["reference"]
    ways = ({**reference, "name": "the model's own"}, *results["weights"])
    counted, shares = _tasks(reference, ways)
    rows = map(_weights_row, ways, shares)
    yield from show([["weights", "bits a weight", "bytes", "KL", "top-1", "perplexity", *counted], *rows])
    yield ""
    yield (
        f"{results['model']} by {results['material']}, {reference['positions']} next tokens, exact KV, "
        f"{results['compute_type']} on {results['device']}, {results['seconds']:.0f} s in all"
    )
    if not any(way["name"] == "4 bits, lm_head alone" for way in results["weights"]):
        yield "this model has no lm_head of its own: embed_tokens is its head, too"
    for name, why in results["refused"].items():
        yield f"{name} stays as it is: {why}"


def _weights_row(way: Mapping[str, Any], shares: Sequence[str]) -> list[str]:
    return [
        way["name"],
        f"{way['effective_bits']:.2f}",
        f"{way['weights_bytes']:,}",
        f"{way['kl']:.1e}" if way["kl"] else "0",
        f"{way['top1_agreement']:.4f}",
        f"{way['perplexity']:.4f}",
        *shares,
    ]


def _text_lines(results: Mapping[str, Any], show: Show) -> Iterator[str]:
    mixed, layers = [results["mixed"]] if results["mixed"] else [], results["layers"]
    ways = (results["reference"], *results["rungs"], *mixed, *results["peers"])
    yield from show([_TEXT_WAYS, *map(_way_row, ways)])
    yield f"\nOne layer under {layers['policy']}, all others exact; {layers['windows']} windows:\n"
    yield from show([_LAYERS, *map(_layer_row, layers["rows"])])
    yield ""
    yield from _remarks(results)


def _way_row(found: Mapping[str, Any]) -> list[str]:
    return [
        found["name"],
        str(found["bytes_per_token"]),
        _kl(found),
        f"{found['top1_agreement']:.4f} ({found['top1_low']:.4f} to {found['top1_high']:.4f})",
        f"{found['perplexity']:.4f}",
        "{:+.2%} ({:+.2%} to {:+.2%})".format(*(found[f"perplexity_rise{end}"] for end in ("", "_low", "_high"))),
    ]


def _layer_row(row: Mapping[str, Any]) -> list[str]:
    return [str(row["layer"]), _kl(row), f"{row['top1_agreement']:.4f}", f"{row['exact_adds_bytes']} bytes"]


def _kl(found: Mapping[str, Any]) -> str:
    if found["kl_high"] == 0:
        return "0"
    return f"{found['kl']:.1e} ({found['kl_low']:.1e} to {found['kl_high']:.1e})"


def _left_out(results: Mapping[str, Any]) -> Iterator[str]:
    """Lines on layers and policies that were not measured as the others."""
    if exact := results["exact_layers"]:
        yield f"layers {', '.join(map(str, exact))} stay exact, except under fp, where all are"
    for name, why in results["refused"].items():
        yield f"{name} cannot be had: {why}"


def _remarks(results: Mapping[str, Any]) -> Iterator[str]:
    text, suggestion = results["text"], results["suggestion"]
    yield (
        f"{results['model']} on {text['file']}: {text['windows']} windows of {text['window_tokens']} tokens, "
        f"95 % intervals over windows; {results['compute_type']} on {results['device']}, {results['seconds']:.0f} s"
    )
    yield from _left_out(results)
    if not results["mixed"]:
        yield f"{suggestion['budget_bytes']} bytes a token keep no layer of {results['layers']['policy']} exact"
    layers = f" --kv-exact-layers {suggestion['kv_exact_layers']}" if suggestion["kv_exact_layers"] else ""
    yield f"within {suggestion['budget_bytes']} bytes a token: kvasir up --kv-policy {suggestion['kv_policy']}{layers}"
    yield suggestion["why"]


def _small(value: float) -> str:
    return "0" if value == 0 or math.isnan(value) else f"{value:.1e}"


def plots(results: Mapping[str, Any]) -> Plots:
    """A picture of the policies, and of the layers where they were measured."""
    note = f"{results['model']}, {results['compute_type']} on {results['device']}, by {results['material']}"
    if "weights" in results:
        shown = Picture("KL of the next token against the model's own weights, nats", "weights", ("KL",), is_log=True)
        rows = [{"weights": way["name"], "KL": way["kl"]} for way in results["weights"]]
        return Plots(note, {"quality_weights": (shown, rows)})
    ways = [*results["rungs"], *([results["mixed"]] if results.get("mixed") else []), *results["peers"]]
    policies = [{"KV": f"{way['name']}\n{way['bytes_per_token']} B", "KL": way["kl"]} for way in ways]
    by_policy = Picture("KL of the next token against exact KV, nats", "KV", ("KL",), is_log=True)
    drawn = {"quality_policies": (by_policy, policies)}
    if layers := results.get("layers"):
        by_layer = Picture(f"KL of one layer under {layers['policy']}, all others exact, nats", "layer", ("KL",))
        drawn["quality_layers"] = (by_layer, [{"layer": str(row["layer"]), "KL": row["kl"]} for row in layers["rows"]])
    return Plots(note, drawn)
