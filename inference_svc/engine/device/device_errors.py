"""Errors of MLX that mean that its device had no memory, or that the process has lost the device."""

import re

from kvasir.errors import KvasirError, ResourceExhausted, Unavailable
from kvasir.waits import RETRY_S

from inference_svc.model import device_memory

# Words of MLX and of CUDA about memory; a Mac reports a command buffer's.
_NO_MEMORY = re.compile(r"out of memory|unable to allocate|maximum allowed buffer size|insufficient memory", re.I)
# CUDA's words for errors with which it answers every later call of the process, too.
_LOST = re.compile(
    "illegal memory access|illegal instruction|misaligned address|invalid program counter|hardware stack error|"
    "unspecified launch failure|launch timed out|device-side assert|context is destroyed|uncorrectable|"
    "global/shared address space|MPS client has been terminated|MPS server|nvlink or a hardware error|"
    "tensor memory not completely freed|external entity outside of CUDA|failed: unknown error"
)


class DeviceLost(Unavailable):
    """The device computes nothing for this process any more: only a new one can go on."""


def device_error(error: BaseException) -> KvasirError | None:
    """The meaning of an error, or of one that it came from, for the device; None: none."""
    causes, found = [error], None
    for each in causes:
        causes += [cause for cause in (each.__cause__, each.__context__) if cause is not None and cause not in causes]
        if not isinstance(each, RuntimeError):
            continue
        if _LOST.search(words := str(each)):
            text = f"the engine has lost its device, and restarts: {words}"
            return DeviceLost(text, retry_after_s=RETRY_S)
        if found is None and _NO_MEMORY.search(words):
            found = _no_memory(words)
    return found


def is_lost(error: BaseException) -> bool:
    return isinstance(error, DeviceLost) or isinstance(device_error(error), DeviceLost)


def _no_memory(words: str) -> ResourceExhausted:
    sizes = {"total_bytes": device_memory.device_bytes(), "own_bytes": device_memory.active_bytes()}
    if (free := device_memory.free_bytes()) is not None:
        sizes["free_bytes"] = free
    in_words = ", ".join(f"{name.removesuffix('_bytes')} {size / (1 << 30):.2f} GiB" for name, size in sizes.items())
    return ResourceExhausted(
        f"device memory: no room to compute ({in_words}): {words}; a smaller --memory-gib leaves more",
        reason="MEMORY_BUSY",
        retry_after_s=RETRY_S,
        metadata={name: str(size) for name, size in sizes.items()},
    )
