"""Kernels for Hopper's own instructions, whose target MLX 0.32 does not name."""

import ctypes
from dataclasses import replace
from functools import cache

import mlx.core as mx

from inference_svc.kv.attention.kept_kernel import KeptKernel, program_text
from inference_svc.kv.attention.kernels import BLOCKS_OF_A_CLUSTER, CUDA_SHARED, KernelSource
from inference_svc.kv.attention.nvrtc import CompileError, compiled_program, kept_programs

TARGET = "sm_90a"
_DRIVER = "libcuda.so.1"
_SHARED_SIZE, _CLUSTER_SIZE = 8, 4  # the driver's names for a function's most shared memory, and for a launch's cluster
_ALONE = KernelSource("kv_alone", ("given",), ("found",), "", "found[0] = given[0];", cluster=BLOCKS_OF_A_CLUSTER)
_ALIGNED_SHARED = CUDA_SHARED.replace("float4", "__align__(1024) float4", 1)


@cache
def is_hopper() -> bool:
    if mx.default_device().type != mx.DeviceType.gpu:
        return False
    facts = mx.device_info()
    return (facts.get("compute_capability_major"), facts.get("compute_capability_minor")) == (9, 0)


def hopper_compiler(source: KernelSource, shared_bytes: int) -> KeptKernel:
    """A kernel whose blocks have a multiprocessor each. Raises CompileError when it is launched and has no code."""
    # The kernel aligns its memory itself; the compiler makes fewer instructions where it knows that, too.
    aligned = replace(source, source=source.source.replace(CUDA_SHARED, _ALIGNED_SHARED))
    return KeptKernel(aligned, shared_bytes, TARGET, is_alone=True)


class _Attribute(ctypes.Structure):
    """CUDA's CUlaunchAttribute."""

    _fields_ = (("name", ctypes.c_uint * 2), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """CUDA's CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def most_clusters(shared_bytes: int) -> int:
    """Of blocks that have a multiprocessor each: as many as this thread's device has room for at once, fewer than a
    quarter of its multiprocessors where their groups are no multiples of four. 0 where that is unknown.
    """
    name, text = program_text(_ALONE, [], [mx.int32], [mx.int32])
    module, function, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    cluster = _Attribute((_CLUSTER_SIZE, 0), (BLOCKS_OF_A_CLUSTER, 1, 1))
    launch = _Launch((BLOCKS_OF_A_CLUSTER, 1, 1, 32, 1, 1), shared_bytes, None, ctypes.pointer(cluster), 1)
    try:
        code = compiled_program(text, (f"--gpu-architecture={TARGET}", "--std=c++17"), kept_programs())
        driver = ctypes.CDLL(_DRIVER)
        if driver.cuModuleLoadData(ctypes.byref(module), code):
            return 0
        failed = (
            driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
            or driver.cuFuncSetAttribute(function, _SHARED_SIZE, shared_bytes)
            or driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(launch))
        )
        driver.cuModuleUnload(module)
    except (CompileError, OSError, AttributeError):
        return 0
    return 0 if failed else count.value
