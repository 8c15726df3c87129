"""`kvasir bench make-model`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvasir.cli.caller import Caller
from kvasir.cli.rows import size
from kvasir.cli.showing.arguments import argument, option

from kvasir_bench.commands.shown import given
from kvasir_bench.program import measured_by


@dataclass(frozen=True)
class ModelOptions:
    """The options that `python -m kvasir_bench.synthetic` has, too."""

    geometry: Annotated[
        str,
        option(
            "llama-3.1-8b, llama-3.2-1b, gemma-3-4b, gemma-3-12b, gpt-oss-20b, qwen-2.5-7b, qwen-2.5-14b, "
            "qwen-3-8b or kvasir-tiny. NAME-2l is NAME with its first two layers."
        ),
    ]
    bits: Annotated[int | None, option("Bits of the weights, 4 or 8. Default: those of --dtype.")] = None
    layers: Annotated[int | None, option("The number of layers, the first ones. Default: all.", min=1)] = None
    dtype: Annotated[str, option("bfloat16, float16 or float32.")] = "bfloat16"
    seed: Annotated[int, option("The seed of the random weights.", min=0)] = 0


def make_model(
    caller: Caller,
    directory: Annotated[Path, argument("The directory to write: new or empty.")],
    options: ModelOptions,
) -> None:
    """Write a model of random weights with the configuration of a real one, for measurements where no model can be
    fetched.

    Its tokenizer is kvasir-tiny's, with the number of tokens of the real one."""
    with caller.busy("writing the model") as say:
        made = measured_by("synthetic", "the model was not written", given(options), say, str(directory))
    text = f"{directory}: {made['layers']} layers, {size(made['weights_bytes'])} of weights in {made['seconds']} s"
    caller.result(made, lambda out: out.print(text))
