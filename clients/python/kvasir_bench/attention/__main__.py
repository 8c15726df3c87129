"""Attention over pages beside MLX's own and a copy, as one JSON object: `python -m kvasir_bench.attention`."""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from inference_svc.model.blas import load_optimized_blas
from kvasir_bench.arithmetic import Target
from kvasir_bench.program import printed, progress

_MIB = 1 << 20
# Contexts of 4 K and 32 K in eight rows, which the targets are about; one row; exact and eight bits beside four.
_FULL = ((8, 4096, 4), (8, 32768, 4), (1, 2048, 4), (16, 2048, 4), (8, 4096, 8), (8, 4096, 16))
_QUICK = ((1, 512, 4),)
_FASTER_THAN_MASKED, _SHARE_OF_COPY = 3.0, 0.4


def measured(*, is_quick: bool, clock: Callable[[], float], say: Callable[[str], None]) -> dict[str, Any]:
    """All rows, the copy's speed, and the targets. A CPU gets little to do, and its times mean nothing."""
    load_optimized_blas()
    # These import MLX, and then it is too late for a BLAS.
    import mlx.core as mx

    from inference_svc.kv.attention.choice import NAMES, KernelChoice
    from inference_svc.model.loading import device
    from kvasir_bench.attention import measuring

    is_gpu = device() != "cpu"
    is_quick = is_quick or not is_gpu
    stopwatch = measuring.Stopwatch(clock, 1 if is_quick else 9)
    say("copy")
    copy = measuring.copied_bytes_per_s(stopwatch, (16 if is_quick else 1024) * _MIB)
    cases = [measuring.AttentionCase(*each) for each in (_QUICK if is_quick else _FULL)]
    rows: list[dict[str, Any]] = []
    dialect = KernelChoice().dialect_of({case.format for case in cases}, mx.bfloat16)
    for case in cases:
        say(f"{case.batch} x {case.tokens} tokens, {case.bits} bits")
        rows += measuring.measured_case(case, stopwatch, dialect)
    for row in rows:
        row["share_of_copy"] = row["read_bytes_per_s"] / copy
    return {
        "machine": {"device": device(), "platform": platform.platform()},
        "implementation": NAMES[dialect],
        "copy_bytes_per_s": copy,
        "times_mean_something": is_gpu and not is_quick,
        "rows": rows,
        "targets": [target.row() for target in _targets(rows)] if is_gpu and not is_quick else [],
    }


def _targets(rows: list[dict[str, Any]]) -> Iterator[Target]:
    found = {(row["who"], row["batch"], row["tokens"], row["bits"]): row for row in rows}
    masked = found["bf16 SDPA, masked", 8, 4096, 4]["call_s"] / found["fused", 8, 4096, 4]["call_s"]
    yield Target("fused q4, times as fast as masked bf16 SDPA, 8 x 4096", masked, _FASTER_THAN_MASKED)
    share = found["fused", 8, 32768, 4]["share_of_copy"]
    yield Target("fused q4, share of the copy, 8 x 32768", share, _SHARE_OF_COPY)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.attention", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and once, for a look")
    given = parser.parse_args()
    return printed(lambda: measured(is_quick=given.quick, clock=time.perf_counter, say=progress))


if __name__ == "__main__":
    sys.exit(main())
