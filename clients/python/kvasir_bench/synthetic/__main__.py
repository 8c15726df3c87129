"""`python -m kvasir_bench.synthetic`: writes a model of random weights, and prints its directory, bytes and seconds."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir_bench.program import printed, progress
from kvasir_bench.synthetic.geometries import GEOMETRIES, geometry


def made(arguments: argparse.Namespace, clock: Callable[[], float], say: Callable[[str], None]) -> dict[str, Any]:
    """Write the model; returns its facts. Raises as `write_model` and `geometry` do."""
    from kvasir_bench.synthetic.weights import write_model  # imports MLX: a refusal should not wait for it

    began = clock()
    config = geometry(arguments.geometry, arguments.layers)
    kind = {"bits": arguments.bits, "compute_type": arguments.dtype, "seed": arguments.seed}
    size = write_model(arguments.directory, config, **kind, say=say)
    return {
        "directory": str(arguments.directory),
        "geometry": arguments.geometry,
        "layers": config["num_hidden_layers"],
        "weights_bytes": size,
        "seconds": round(clock() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.synthetic", description=__doc__)
    parser.add_argument("directory", type=Path, help="a new or empty one")
    parser.add_argument("--geometry", required=True, help=f"{', '.join(GEOMETRIES)}; NAME-2l has two layers only")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of the weights; left out: those of --dtype")
    parser.add_argument("--layers", type=int, help="the first ones only")
    parser.add_argument("--dtype", default="bfloat16", help="float32, float16 or bfloat16 (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default %(default)s)")
    arguments = parser.parse_args()
    return printed(lambda: made(arguments, time.monotonic, progress))


if __name__ == "__main__":
    sys.exit(main())
