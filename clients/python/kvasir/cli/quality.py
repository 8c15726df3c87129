"""`kvasir bench quality`: what each KV policy costs a model, as `inference_svc.bench.quality` measures it.

The command line runs the engine as a program and never imports it. The program prints its progress on stderr, and one
JSON object at its end.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvasir.errors import FailedPrecondition

KEYS = """Names in the JSON stay. `reference` is mlx-lm's own KVCache in the type that the model computes in, and is
the baseline. `rungs` are Kvasir's KV policies, cheapest first; `peers` mlx-lm's own quantized caches. Each has
`name`, `bytes_per_token`, `kl` (of the next token, mean over `positions`, nats), `kl_worst`, `top1_agreement`,
`perplexity` (of all text read), `seconds`; and `recall`, `tool_calls` (questions answered right to the last token)
or, for a model that does not know kvasir-tiny's world, `repeat` (random tokens said a second time), each with
`share`, `right`, `n`. A rung also `passes`, and `why`. `refused` are rungs that the model cannot have. `auto` is what
--kv-policy auto would choose from this. `material` is questions or canary. `seconds` is all of it."""

_TASKS = (("recall", "recall"), ("tool_calls", "tool calls"), ("repeat", "repeats"))


def measured(
    model: str, *, is_quick: bool, exact_layers: str, compute_type: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """What `inference_svc.bench.quality` finds. Raises FailedPrecondition, with its last words, when it fails."""
    argv = [
        *(sys.executable, "-m", "inference_svc.bench.quality"),
        *(["--model", model] if model else []),
        *(["--kv-exact-layers", exact_layers] if exact_layers else []),
        *(["--compute-type", compute_type] if compute_type else []),
        *(["--quick"] if is_quick else []),
    ]
    last = ""
    # stdout holds one object, far less than a pipe does: it can wait until stderr has ended.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            if last := line.strip() or last:
                say(last)
        said = process.stdout.read()
    if process.returncode:
        raise FailedPrecondition(f"the model cannot be measured: {last or f'exit code {process.returncode}'}")
    results: dict[str, Any] = json.loads(said)
    return results


def show(out: Console, results: dict[str, Any]) -> None:
    """A table for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(_titles(results)):
        # What does not fit a pipe's 80 columns folds its title, never its values.
        widest = max(len(row[index]) for row in _rows(results))
        table.add_column(title, justify="right" if index else "left", min_width=widest, overflow="fold")
    for row in _rows(results):
        table.add_row(*row)
    out.print(table)
    for line in _remarks(results):
        out.print(line)


def markdown(results: dict[str, Any]) -> str:
    """The same as a Markdown table, for pages."""
    titles = _titles(results)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *_rows(results)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *_remarks(results)])


def _titles(results: dict[str, Any]) -> list[str]:
    tasks = [title for name, title in _TASKS if name in results["reference"]]
    return ["KV", "bytes a token", "KL", "worst KL", "top-1", "perplexity", *tasks, "seconds"]


def _rows(results: dict[str, Any]) -> list[Sequence[str]]:
    return [_row(each, results) for each in (results["reference"], *results["rungs"], *results["peers"])]


def _row(found: dict[str, Any], results: dict[str, Any]) -> Sequence[str]:
    tasks = [found[name] for name, _ in _TASKS if name in results["reference"]]
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


def _remarks(results: dict[str, Any]) -> list[str]:
    exact = results["exact_layers"]
    remarks = [
        f"{results['model']} by {results['material']}, {results['reference']['positions']} next tokens, "
        f"{results['compute_type']} on {results['device']}, {results['seconds']:.0f} s in all"
    ]
    if exact:
        remarks.append(f"layers {', '.join(map(str, exact))} stay exact, except under fp, where all are")
    remarks += [f"{name} cannot be had: {why}" for name, why in results["refused"].items()]
    return [*remarks, f"auto takes {results['auto']['chooses']}: {results['auto']['why']}"]
