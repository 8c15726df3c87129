"""Loading a model's weights over mapped files or as a copy, as JSON, in a process of its own."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from inference_svc.model import kvasir_tiny
from inference_svc.model.blas import load_optimized_blas
from kvasir_bench.program import printed

_FACTS = Path("/proc/self/smaps_rollup")


def probed(model: str | Path, *, copies: bool) -> dict[str, Any]:
    """Seconds to load and to the first logits, and by how much the process has grown; None where it cannot be read."""
    load_optimized_blas()
    # Importing this imports MLX, and then it is too late for a BLAS.
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from inference_svc.model.loading import find_model, load

    directory, before, began = find_model(model), _resident(), time.perf_counter()
    loaded = load(directory, None, copies_weights=copies)
    load_s = time.perf_counter() - began
    compute: Any = loaded.model
    mx.eval(compute(mx.array([list(range(1, 33))])))
    seconds = {"load_s": load_s, "first_logits_s": time.perf_counter() - began}
    own, mapped = (
        None if now is None or old is None else max(0, now - old) for now, old in zip(_resident(), before, strict=True)
    )
    bits = (loaded.config.get("quantization") or {}).get("bits")
    parameters: Any = tree_flatten(compute.parameters())
    kind = f"{bits} bits" if bits else str(max(parameters, key=lambda each: each[1].nbytes)[1].dtype)
    of_weights = {"weights": kind.removeprefix("mlx.core."), "weights_bytes": loaded.weights_bytes}
    return {**seconds, "own_bytes": own, "mapped_bytes": mapped, **of_weights}


def _resident() -> tuple[int | None, int | None]:
    """Bytes of this process in RAM: its own, and those of files."""
    if not _FACTS.exists():
        return None, None
    facts = dict(line.split(":", 1) for line in _FACTS.read_text().splitlines()[1:])
    resident, own = (int(facts[name].split()[0]) * 1024 for name in ("Rss", "Anonymous"))
    return own, resident - own


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.engine.weights_probe", description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--copy", action="store_true")
    arguments = parser.parse_args()
    return printed(lambda: probed(arguments.model or kvasir_tiny.path(), copies=arguments.copy))


if __name__ == "__main__":
    sys.exit(main())
