"""An inference service whose model is played, for `kvasir bench memory-path --shape` and the campaign of sizes.

`python -m kvasir_bench.played --shape llama-3.1-8b serve --listen …` takes the service's options behind
its own; --prefill-tokens-per-s makes prompts cost time, which the engine weighs against the store. All of it is the
real service but the model: replies mean nothing, and pages have the shape's size and depend on every token before
them. No option of the service itself serves such a model."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

from inference_svc.engine.engine import Engine
from inference_svc.serving import serve_by_arguments
from kvasir_bench.played.played_model import NAME_PREFIX, open_played


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.played", allow_abbrev=False)
    parser.add_argument("--shape", required=True, help="a geometry of `kvasir bench make-model`: llama-3.1-8b")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=0.0, help="0: as fast as memory is written")
    own, of_service = parser.parse_known_args(arguments)
    opener = partial(open_played, tokens_per_s=own.prefill_tokens_per_s, sleep=time.sleep)
    model = ["--model", f"{NAME_PREFIX}{own.shape}={own.shape}"]
    return serve_by_arguments([*of_service, *model], partial(Engine.open, opener=opener))


if __name__ == "__main__":
    sys.exit(main())
