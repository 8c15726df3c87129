"""The kernels of both dialects on this CPU, where it has a C++ compiler."""

import mlx.core as mx
import pytest

from inference_svc.kv.attention.fused import Compiler, KernelTarget, fused_attention
from inference_svc.kv.attention.kernels import Dialect
from tests.emulation.emulator import cuda_emulator, cxx, metal_emulator
from tests.inference.kv.attention.scenes import Scene

EMULATORS: dict[Dialect, Compiler] = {Dialect.CUDA: cuda_emulator, Dialect.METAL: metal_emulator}

needs_compiler = pytest.mark.skipif(not cxx(), reason="the emulation of the kernels needs a C++ compiler")
both_dialects = pytest.mark.parametrize("dialect", EMULATORS, ids=lambda dialect: dialect.value)


def attention(scene: Scene, dialect: Dialect, *, has_warpgroups: bool = False) -> mx.array:
    """The scene's result by a dialect's kernels."""
    return fused_attention(*scene.arguments(), KernelTarget(dialect, EMULATORS[dialect], has_warpgroups))
