"""`python -m kvasir_bench.engine.device_copy`: the rates of copies to MLX's device and on it, as one JSON object."""

import sys
import time
from dataclasses import asdict

from inference_svc.engine.mlx_thread import MlxThread
from kvasir_bench.engine.link_rates import LinkProbe
from kvasir_bench.program import printed

_SIZE_BYTES = 64 << 20


def rates() -> dict[str, int]:
    """Bytes per second by the kind of copy."""
    thread = MlxThread(lambda: LinkProbe(time.perf_counter))
    try:
        found = asdict(thread.post(lambda probe: probe.rates(_SIZE_BYTES)).result())
    finally:
        thread.close()
    return {name: round(rate) for name, rate in found.items() if name != "blake3"}


if __name__ == "__main__":
    sys.exit(printed(rates))
