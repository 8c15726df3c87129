"""How many bytes MLX holds in this process, the most that it has held, and how many the device has."""

import ctypes
import gc
import os
import traceback
from functools import cache

import mlx.core as mx
from kvasir.server.machine import machine_bytes

# MLX's CUDA back end commits a graph after 30 operations or 400 million values of input: an 8B model's step is more
# than twenty graphs, each of which costs the processor 0.1 ms and the GPU a pause. With these it is six; more is no
# faster, and buffers of a long prompt's cell are held until their graph is done. Its check of caches counts the graphs
# and plans that were not in them over a process's whole life, and from a number on fails each pass that is new.
_GRAPH_SETTINGS = {
    "MLX_MAX_OPS_PER_BUFFER": "100",
    "MLX_MAX_MB_PER_BUFFER": "4000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}
_SETTINGS = ("MLX_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "LD_")
_INTEGRATED = 18  # the driver's name for it
# By device: Metal has the part of the RAM that it recommends, CUDA the device's memory.
_TOTALS = ("max_recommended_working_set_size", "total_memory", "memory_size")


def prepare_device() -> None:
    """Before a process first computes."""
    if mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available():
        for name, value in _GRAPH_SETTINGS.items():  # MLX reads them when it first uses the device
            os.environ.setdefault(name, value)


def device_bytes() -> int:
    """Bytes that MLX's device may hold: a GPU's memory, or this machine's RAM."""
    facts = mx.device_info()
    for name in _TOTALS:
        if size := facts.get(name):
            return int(size)
    return machine_bytes()


def device_name() -> str:
    return str(mx.device_info().get("device_name", mx.default_device()))


def card() -> str:
    """The name that no other GPU has, where the device's memory is its own; empty where it is the machine's RAM."""
    return str(mx.device_info().get("uuid", ""))


def free_bytes() -> int | None:
    """Bytes of a card's memory that no process holds now; None of a device whose memory is the machine's."""
    free = mx.device_info().get("free_memory") if card() and not _is_integrated() else None
    return None if free is None else int(free)


@cache
def _is_integrated() -> bool:
    """Whether a CUDA device has the machine's memory, where files that the system keeps in RAM do not count as free."""
    device, value = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuCtxGetDevice(ctypes.byref(device))
        failed = failed and driver.cuDeviceGet(ctypes.byref(device), 0)  # no context yet
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), _INTEGRATED, device)
    except (OSError, AttributeError):
        return False
    return not failed and bool(value.value)


def held_by_others() -> int:
    """Bytes of a card that other programs hold, and the driver for this one; 0 of a device without its own memory."""
    free = free_bytes()  # read first: memory that this process takes meanwhile is not the others'
    return 0 if free is None else max(0, device_bytes() - free - mx.get_active_memory() - mx.get_cache_memory())


def bound_to_free() -> None:
    """Let MLX count on no more of a card than is free now, and this process has. Near its limit it gives free buffers
    back, and waits for work under way before it enqueues more. Its own limit is 0.95 of a card, also of a full one.
    """
    if (free := free_bytes()) is not None:
        spare = min(device_bytes() // 20, free // 4)  # for graphs, plans and kernels, which MLX does not count
        mx.set_memory_limit(mx.get_active_memory() + mx.get_cache_memory() + free - spare)


def device_settings() -> str:
    """The environment's settings of MLX, of CUDA and of the loader of libraries, on which results may depend."""
    return "\n".join(sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS)))


def keep_for_computing(most_bytes: int) -> None:
    """Let MLX keep at most so many bytes of free buffers on a GPU, and no more than an eighth of its memory."""
    if mx.default_device().type == mx.DeviceType.gpu:
        mx.set_cache_limit(min(most_bytes, device_bytes() // 8))


def keep_wired(size_bytes: int) -> None:
    """On a Mac: weights and pages, of so many bytes, are not to be paged out. Other engines' are wired beside them."""
    if mx.metal.is_available():
        mx.set_wired_limit(min(size_bytes, int(mx.device_info()["max_recommended_working_set_size"])))


def give_back(*, is_first: bool) -> None:
    """Free what an unloaded model left: its weights and pages lie in reference rings, and the collector counts objects,
    not bytes. `is_first`: it was loaded while the service exempted its objects from collection, and some may be among
    them. Then it blocks for a tenth of a second or two, else for some milliseconds.
    """
    had_exempted = is_first and gc.get_freeze_count() > 0
    if had_exempted:
        gc.unfreeze()
    gc.collect()
    if had_exempted:
        gc.freeze()
    mx.clear_cache()


def forget_frames(error: BaseException) -> None:
    """Empty the frames of an error, and of those that it came from. For as long as it is reported, and until the
    collector finds it, the weights of a model that failed would stay beside the next one's; and a pass that was
    cancelled would keep the pool's arrays, which the next write copies then.
    """
    found: list[BaseException] = [error]
    for each in found:
        traceback.clear_frames(each.__traceback__)
        found += [cause for cause in (each.__cause__, each.__context__) if cause is not None and cause not in found]


def active_bytes() -> int:
    return int(mx.get_active_memory())


def peak_bytes() -> int:
    return int(mx.get_peak_memory())


def restart_peak() -> int:
    """Give free buffers back and restart the count of the peak; returns the bytes of live arrays."""
    mx.clear_cache()
    mx.reset_peak_memory()
    return active_bytes()
