"""The engine's program, whose device fails while there is a file: what MLX evaluates then raises its words, as CUDA's
errors do. A device without memory can be waited for; one that is lost cannot.
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
        setattr(mx, name, _failing(getattr(mx, name), file, can_lack_memory=name != "synchronize"))
    if card := os.environ.get(CARD):
        total, free = map(int, card.split())
        facts = {**mx.device_info(), "uuid": "GPU-1", "total_memory": total, "free_memory": free}
        mx.device_info = lambda: facts  # type: ignore[assignment]
    return __main__.main()


def _failing(work: Callable[..., Any], file: Path, *, can_lack_memory: bool) -> Callable[..., Any]:
    def done(*given: Any) -> Any:
        if file.exists() and (can_lack_memory or file.read_text() != NO_MEMORY):
            raise RuntimeError(file.read_text())
        return work(*given)

    return done
