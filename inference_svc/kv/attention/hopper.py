"""Kernels for Hopper's own instructions, whose target MLX 0.32 does not name. None has clusters of blocks: MLX updates
CUDA graphs that it keeps, and an update leaves a node the cluster of the kernel before (ml-explore/mlx 2813).
"""

from dataclasses import replace
from functools import cache

import mlx.core as mx

from inference_svc.kv.attention.kept_kernel import KeptKernel
from inference_svc.kv.attention.kernels import CUDA_SHARED, KernelSource

TARGET = "sm_90a"
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
    aligned = replace(source, source=source.source.replace(CUDA_SHARED, _ALIGNED_SHARED), blocks=1)
    return KeptKernel(aligned, shared_bytes, TARGET)
