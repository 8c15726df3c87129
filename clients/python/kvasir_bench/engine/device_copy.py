"""`python -m kvasir_bench.engine.device_copy`: the rates of copies to MLX's device and on it, as one JSON object."""

import json
import sys
import time
from dataclasses import asdict

from inference_svc.engine.mlx_thread import MlxThread
from kvasir_bench.engine.link_rates import LinkProbe

_SIZE_BYTES = 64 << 20


def main() -> int:
    thread = MlxThread(lambda: LinkProbe(time.perf_counter))
    try:
        rates = asdict(thread.post(lambda probe: probe.rates(_SIZE_BYTES)).result())
    finally:
        thread.close()
    print(json.dumps({name: round(rate) for name, rate in rates.items() if name != "blake3"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
