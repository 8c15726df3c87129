"""The results of `kvasir bench quality --text` for people: each policy and each layer on a text of the user's own."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir_bench.tables import Show

KEYS = """With --text, `material` is text, and `text` has its `file`, `windows`, `window_tokens`. Instead of questions,
each way has 95 % intervals over the windows: `kl_low`, `kl_high`, `top1_low`, `top1_high`, and `perplexity_rise` over
`reference`, window by window, with `perplexity_rise_low` and `perplexity_rise_high`. `layers` has the `policy` under
which each of `rows` was stored alone, all other layers exact, in `windows` (every second one): `layer`, `kl`, `kl_low`,
`kl_high`, `top1_agreement`, `exact_adds_bytes` (a token). `mixed` is that policy with the layers exact that
`suggestion.budget_bytes` a token pays for, or null. `suggestion` has `kv_policy` and `kv_exact_layers` for `kvasir up`,
and `why`: the cheapest within the budget that is not worse, by the windows that chose no layer."""

_WAYS = ["KV", "bytes a token", "KL", "top-1", "perplexity", "its rise"]
_LAYERS = ["layer", "KL alone", "top-1", "exact adds"]


def lines(results: Mapping[str, Any], show: Show) -> Iterator[str]:
    mixed, layers = [results["mixed"]] if results["mixed"] else [], results["layers"]
    ways = (results["reference"], *results["rungs"], *mixed, *results["peers"])
    yield from show([_WAYS, *map(_way_row, ways)])
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


def left_out(results: Mapping[str, Any]) -> Iterator[str]:
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
    yield from left_out(results)
    if not results["mixed"]:
        yield f"{suggestion['budget_bytes']} bytes a token keep no layer of {results['layers']['policy']} exact"
    layers = f" --kv-exact-layers {suggestion['kv_exact_layers']}" if suggestion["kv_exact_layers"] else ""
    yield f"within {suggestion['budget_bytes']} bytes a token: kvasir up --kv-policy {suggestion['kv_policy']}{layers}"
    yield suggestion["why"]
