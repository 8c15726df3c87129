"""`kvasir bench quality`."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from kvasir.cli.caller import Caller
from kvasir.cli.showing.arguments import option
from kvasir.errors import InvalidArgument

from kvasir_bench.commands.shown import (
    MarkdownOption,
    ModelOption,
    PlotsOption,
    checking_options,
    given,
    progress,
    show,
)
from kvasir_bench.program import measured_by
from kvasir_bench.quality import report

# Some of whose layers may stay exact; under fp all are.
MixedPolicy = Enum("MixedPolicy", [(name, name) for name in ("q4", "q4-rotated", "k8v4", "q8")], type=str)  # type: ignore[misc]


@dataclass(frozen=True)
class QualityOptions:
    """The options that `python -m kvasir_bench.quality` has, too."""

    model: ModelOption = ""
    kv_exact_layers: Annotated[
        str, option('Layers that stay exact under every policy: "last", or indexes separated by commas.')
    ] = ""
    compute_type: Annotated[
        str, option("float32, float16 or bfloat16; float32 on a CPU and else the model's own if left out.")
    ] = ""
    weights: Annotated[
        bool,
        option(
            "Instead, measure the cost of fewer bits of weights, with exact KV. It rounds the matrices of a model of "
            "16 or 32 bits through MLX's 4-bit codes: all; all but embeddings and head; all in 8 bits; each kind "
            "alone; and, without --quick, each layer alone. It measures no speed.",
            "--weights",
        ),
    ] = False
    text: Annotated[
        Path | None,
        option(
            "Read this file (UTF-8, 1,024 tokens at least) in 16 windows instead, and measure each layer too.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    tasks: Annotated[
        Path | None,
        option(
            "Give the tasks of this file instead: JSON lines, each with task (a name), answer, and prompt or messages "
            "(and tools).",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    kv_policy: Annotated[
        MixedPolicy | None, option("With --text: the policy whose layers it measures one by one: q4.")
    ] = None
    kv_bytes: Annotated[
        int | None,
        option(
            "With --text: bytes a token for that policy and the layers that stay exact. Default: those of the next "
            "policy.",
            min=1,
        ),
    ] = None
    quick: Annotated[bool, option("Read fewer texts and ask fewer questions, for a first look.", "--quick")] = False

    def check(self) -> None:
        """Raises InvalidArgument."""
        if self.weights and (self.text or self.kv_exact_layers):
            text = "--weights: expected neither --text nor --kv-exact-layers, KV is exact"
            raise InvalidArgument(text, field="weights")
        if self.text is None and (self.kv_policy or self.kv_bytes):
            raise InvalidArgument("--kv-policy and --kv-bytes belong to --text", field="text")
        if self.text and self.tasks:
            raise InvalidArgument("--text and --tasks: expected one of them", field="tasks")
        if self.tasks and self.quick:
            raise InvalidArgument("--quick does not shorten --tasks: all of them are given", field="quick")


def quality(
    caller: Caller, options: QualityOptions, plots: PlotsOption = None, as_markdown: MarkdownOption = False
) -> None:
    """Show what each KV policy costs a model, against exact KV: KL, agreement, perplexity, recall, tool calls.

    It also shows which policy --kv-policy auto would choose.

    A model that has kvasir-tiny's tokenizer and answers gets questions and tasks about conversations of its world; any
    other repeats random tokens, reads text of its own, and gets chained arithmetic, edits of code and arguments of
    tools. A task counts if exact KV does half of its kind, and is right if every token of its answer is the likeliest.
    Seeds are fixed.

    With --tasks the tasks are your own: {"task": "dates", "prompt": "Q: When? A:", "answer": " On 4 May."}, one in a
    line. In place of prompt, messages (and tools) go through the model's chat template, and answer is the whole reply.

    With --text the measure is your own text, with 95 % intervals over its windows: each policy, each layer alone under
    one of them, and the layers to keep exact (--kv-exact-layers of `kvasir up`) within a budget of bytes."""
    with checking_options():
        options.check()
    what = "weights" if options.weights else "KV policies"
    with progress(caller, f"measuring {what}; minutes at full size", plots) as say:
        results = measured_by("quality", f"{what} were not measured", given(options), say)
    show(caller, results, report, plots, as_markdown=as_markdown)
