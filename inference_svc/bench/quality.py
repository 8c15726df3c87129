"""What each KV policy costs a model: `python -m inference_svc.bench.quality`, for `kvasir bench quality`.

Loads the model as the engine would, reads and asks the same material with exact KV, every rung of the ladder and
mlx-lm's own quantized caches, and prints one JSON object. Progress goes to stderr.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir.errors import KvasirError

from inference_svc.kv.policy import AUTO, LADDER, PolicyRequest
from inference_svc.model import kvasir_tiny
from inference_svc.model.blas import load_optimized_blas
from inference_svc.model.model_identity import tokenizer_digest
from inference_svc.model.quality.conversations import Conversations
from inference_svc.model.quality.findings import cheapest, judged
from inference_svc.model.quality.material import FULL, QUICK


def measured(
    model: str | Path,
    *,
    is_quick: bool,
    exact_layers: str,
    compute_type: str | None,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All findings. Raises as Engine.open for a model whose KV cannot be kept."""
    blas = load_optimized_blas()
    # These import MLX, and then it is too late for a BLAS.
    from inference_svc.model.loading import device, find_model, load
    from inference_svc.model.model_runner import ModelRunner
    from inference_svc.model.quality import exam

    directory, began = find_model(model), clock()
    loaded = load(directory, compute_type)
    runner = ModelRunner(loaded.model)
    conversations = Conversations.read_for(kvasir_tiny.conversations_path(), tokenizer_digest(directory))
    subject = exam.Subject(runner, loaded.tokenizer, lambda: conversations)
    request = PolicyRequest.parse(AUTO, exact_layers)
    policies = {rung.value: request.policy(rung, runner.compute_type, len(runner.layers)) for rung in LADDER}
    found = exam.examine(subject, policies, QUICK if is_quick else FULL, clock=clock, say=say, with_peers=True)
    winner, why = cheapest(found.rungs, found.exact)
    verdicts = {each.name: judged(each, found.exact) for each in found.rungs}
    return {
        "model": kvasir_tiny.NAME if directory == kvasir_tiny.path() else directory.name,
        "material": found.material,
        "exact_layers": list(policies["q4"].exact_layers),
        "reference": found.exact.as_json(),
        "rungs": [
            each.as_json() | {"passes": verdicts[each.name].passes, "why": verdicts[each.name].why}
            for each in found.rungs
        ],
        "peers": [each.as_json() for each in found.peers],
        "refused": found.refused,
        # As at load: what nothing below is good enough for gets the last rung.
        "auto": {"chooses": winner.name if winner else LADDER[-1].value, "why": why},
        "compute_type": runner.compute_type,
        "device": device(),
        "blas": blas or "",
        "seconds": round(clock() - began, 1),
    }


def main() -> int:
    """Print one model's findings to stdout."""
    parser = argparse.ArgumentParser(prog="python -m inference_svc.bench.quality", description=__doc__)
    parser.add_argument("--model", default="", help="directory or name; the shipped model if left out")
    parser.add_argument("--kv-exact-layers", default="", help='"last" or indexes with commas between')
    parser.add_argument("--compute-type", choices=["float32", "float16", "bfloat16"], help="as the engine's option")
    parser.add_argument("--quick", action="store_true", help="read and ask less, for a look")
    given = parser.parse_args()
    try:
        facts = measured(
            given.model or kvasir_tiny.path(),
            is_quick=given.quick,
            exact_layers=given.kv_exact_layers,
            compute_type=given.compute_type,
            clock=time.monotonic,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except KvasirError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    json.dump(facts, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
