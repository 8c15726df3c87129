"""The results of `kvasir bench quality --weights` for people: what each choice of matrices costs in fewer bits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvasir_bench.pictures import Picture
from kvasir_bench.tables import Show

KEYS = """With --weights, `weights` stand in place of `rungs`, `peers` and `auto`; `reference` is the model with its own
weights. Each has `name`, `bits` of a coded weight, `matrices` (how many are coded), `effective_bits` (of a weight of
the whole model, with scales and biases; what stays counts 16), `weights_bytes`, and the measures above. `refused` are
matrices that MLX cannot code."""

_GIVEN = (("recall", "recall"), ("tool_calls", "tool calls"), ("repeat", "repeats"))


def lines(results: Mapping[str, Any], show: Show) -> Iterator[str]:
    reference = results["reference"]
    asked = [(name, title) for name, title in _GIVEN if name in reference]
    tasks = list(reference.get("tasks", ()))
    counted = [title for _, title in asked] + [name.replace("_", " ") for name in tasks]
    ways = ({**reference, "name": "the model's own"}, *results["weights"])
    rows = [_row(way, [*(way[name] for name, _ in asked), *(way["tasks"][name] for name in tasks)]) for way in ways]
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


def _row(way: Mapping[str, Any], shares: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        way["name"],
        f"{way['effective_bits']:.2f}",
        f"{way['weights_bytes']:,}",
        f"{way['kl']:.1e}" if way["kl"] else "0",
        f"{way['top1_agreement']:.4f}",
        f"{way['perplexity']:.4f}",
        *(f"{share['right']}/{share['n']}" for share in shares),
    ]


def picture(results: Mapping[str, Any]) -> tuple[Picture, list[dict[str, Any]]]:
    """KL of each choice."""
    shown = Picture("KL of the next token against the model's own weights, nats", "weights", ("KL",), is_log=True)
    return shown, [{"weights": way["name"], "KL": way["kl"]} for way in results["weights"]]
