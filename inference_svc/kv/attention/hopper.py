"""Kernels for Hopper's own instructions, which MLX 0.32 does not compile: made by NVRTC, launched as finished code."""

import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import count
from typing import Any

import mlx.core as mx
import structlog

from inference_svc.kv.attention.kernels import CUDA_SHARED, KernelSource, text
from inference_svc.kv.attention.nvrtc import CompileError, compiled_program, kept_programs

_LOG = structlog.get_logger(__name__)
_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint16: "unsigned short",
    mx.int32: "int",
}
_refusals = count()
_SHAPE = re.compile(r"\b(\w+)_shape\[(\d)\]")
Template = Sequence[tuple[str, int | bool | mx.Dtype]]


@cache
def is_hopper() -> bool:
    """Whether MLX's device is of compute capability 9.0."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return False
    facts = mx.device_info()
    return (facts.get("compute_capability_major"), facts.get("compute_capability_minor")) == (9, 0)


class HopperKernel:
    """A source of the CUDA dialect, launched as `mx.fast.cuda_kernel`'s kernels are. Inputs must be row-contiguous, or
    are copied.
    """

    def __init__(self, source: KernelSource, shared_bytes: int) -> None:
        self._source, self._shared_bytes = source, shared_bytes
        self._sizes = [(source.input_names.index(name), axis) for name, axis in _sizes(source)]

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        types = tuple(each.dtype for each in inputs)
        name, code = _program(self._source, tuple(template), types, tuple(output_dtypes), threadgroup[0])
        made: Any = mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=code,
            inputs=list(inputs),
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[inputs[place].shape[axis] for place, axis in self._sizes],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self._shared_bytes,
            ensure_row_contiguous=True,
        )
        return list(made)


def is_launched(launch: Callable[[], list[mx.array]]) -> bool:
    """Whether a kernel's launch is taken by compiler and driver. Logs a process's first refusal: others are like it."""
    try:
        mx.eval(launch())
    except (CompileError, RuntimeError) as error:
        if next(_refusals) == 0:
            _LOG.warning("hopper.not_launched", why=str(error))
        return False
    return True


@lru_cache(maxsize=256)
def _program(
    source: KernelSource,
    template: tuple[tuple[str, int | bool | mx.Dtype], ...],
    types: tuple[mx.Dtype, ...],
    output_types: tuple[mx.Dtype, ...],
    threads: int,
) -> tuple[str, bytes]:
    """A kernel's name and code."""
    named, whole = program_text(source, template, types, output_types, threads)
    return named, compiled_program(whole, _OPTIONS, kept_programs())


def program_text(
    source: KernelSource,
    template: Template,
    types: Sequence[mx.Dtype],
    output_types: Sequence[mx.Dtype],
    threads: int,
) -> tuple[str, str]:
    """A kernel's name, which no other program has, and what NVRTC compiles. Sizes of inputs follow as arguments."""
    parameters = [f"const {_TYPES[kind]}* {name}" for kind, name in zip(types, source.input_names, strict=True)]
    parameters += [f"{_TYPES[kind]}* {name}" for kind, name in zip(output_types, source.output_names, strict=True)]
    parameters += [f"const int {name}_shape_{axis}" for name, axis in _sizes(source)]
    constants = "\n".join(_constant(name, given) for name, given in template)
    # The kernel aligns its memory itself; the compiler makes fewer instructions where it knows that, too.
    shared = CUDA_SHARED.replace("float4", "__align__(1024) float4", 1)
    body = _SHAPE.sub(r"\1_shape_\2", source.source.replace(CUDA_SHARED, shared))
    inner = f"{', '.join(parameters)}) {{\n{constants}\n{body}\n}}\n"
    name = f"{source.name}_{blake2b(inner.encode(), digest_size=6).hexdigest()}"
    head = f'extern "C" __global__ void __launch_bounds__({threads}, 1) {name}('
    return name, text("cuda_types.h") + source.header + head + inner


def _sizes(source: KernelSource) -> list[tuple[str, int]]:
    """The inputs' sizes that a source reads: names and axes."""
    return sorted({(name, int(axis)) for name, axis in _SHAPE.findall(source.source)})


def _constant(name: str, given: int | bool | mx.Dtype) -> str:
    if isinstance(given, mx.Dtype):
        return f"using {name} = {_TYPES[given]};"
    return f"constexpr int {name} = {given:d};"
