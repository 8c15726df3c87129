"""The engine's program, whose device fails as a file says: what MLX evaluates then raises its words, as CUDA's errors
do. Want of memory passes; any other error stays, as for a process that has lost its device.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from inference_svc import __main__

WORDS, CARD = "KVASIR_TEST_DEVICE_ERROR", "KVASIR_TEST_CARD"
LOST = "cudaStreamSynchronize(stream_) failed: an illegal memory access was encountered"
NO_MEMORY = "cudaMallocAsync(&data, size, stream) failed: out of memory"


def main() -> int:
    file = Path(os.environ[WORDS])
    for name in ("eval", "async_eval", "synchronize"):
        setattr(mx, name, _failing(getattr(mx, name), file))
    if card := os.environ.get(CARD):
        total, free = map(int, card.split())
        facts = {**mx.device_info(), "uuid": "GPU-1", "total_memory": total, "free_memory": free}
        mx.device_info = lambda: facts  # type: ignore[assignment]
    return __main__.main()


def _failing(work: Callable[..., Any], file: Path) -> Callable[..., Any]:
    def done(*given: Any) -> Any:
        if file.exists():
            words = file.read_text()
            if words == NO_MEMORY:
                file.unlink()
            raise RuntimeError(words)
        return work(*given)

    return done
