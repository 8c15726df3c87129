"""Kernels of finished code, by NVRTC and kept on disk: MLX 0.32 compiles its own in each process, 1 to 2 s each.

MLX 0.32.4 finds a program that it has loaded by its name and a hash of its code, which it makes anew for each launch: 6
of 10 µs, a quarter of a step with 4-bit weights (an H200's host). So a program is loaded once, and then launched by
eight bytes of the same hash. A first kernel shows whether MLX takes these.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any, TypeAlias

import mlx.core as mx
import structlog

from inference_svc.kv.attention.kernels import KernelSource, text
from inference_svc.kv.attention.nvrtc import CompileError, compiled_program
from inference_svc.kv.kept_files import kept_folder

_LOG = structlog.get_logger(__name__)
_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint16: "unsigned short",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.int64: "long long",
}
_SHAPE = re.compile(r"\b(\w+)_shape\[(\d)\]")
# Shows in one number that code, arguments and launch arrive as they should.
_TRIAL = KernelSource("kv_trial", ("given",), ("found",), "", "found[0] = given[0] + given_shape[0];")
_TRIAL_TYPES = (mx.int32,)
_LOADING = (1, 1, 2)  # a block that is launched so that MLX loads its program: its threads leave at once
_LEAVE = f"if (blockDim.z == {_LOADING[2]}) return;"
_SEED, _FACTOR = 0xC70F6907, 0xC6A4A7935BD1E995  # of `std::hash` in libstdc++, which is MurmurHash64A
_refused: set[str] = set()
Template = Sequence[tuple[str, int | bool | mx.Dtype]]
Conditions: TypeAlias = tuple[
    KernelSource,
    str,
    tuple[tuple[str, int | bool | mx.Dtype], ...],
    tuple[mx.Dtype, ...],
    tuple[mx.Dtype, ...],
    int,
]


class KeptKernel:
    """A source of the CUDA dialect, launched as `mx.fast.cuda_kernel`'s kernels are.

    `target`: NVRTC's name of the architecture. A kernel that the compiler refuses is launched by `otherwise`, or raises
    CompileError.
    """

    def __init__(
        self,
        source: KernelSource,
        shared_bytes: int,
        target: str,
        *,
        otherwise: Callable[..., list[mx.array]] | None = None,
    ) -> None:
        self._source, self._shared_bytes, self._target = source, shared_bytes, target
        self._otherwise = otherwise
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
        launch: dict[str, Any] = {
            "inputs": list(inputs),
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
        }
        program = program_of(*self.conditions(inputs, template, threadgroup, output_dtypes))
        if isinstance(program, CompileError):
            if self._otherwise is None:
                raise program
            return self._otherwise(template=template, **launch)
        name, code = program
        if self._source is not _TRIAL:
            code = _short_code(name, code, (len(inputs), len(output_shapes), len(self._sizes)), self._shared_bytes)
        made: Any = mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=code,
            scalars=[inputs[place].shape[axis] for place, axis in self._sizes],
            shared_memory=self._shared_bytes,
            ensure_row_contiguous=True,
            **launch,
        )
        return list(made)

    def conditions(
        self,
        inputs: Sequence[mx.array],
        template: Template,
        threadgroup: tuple[int, int, int],
        output_dtypes: Sequence[mx.Dtype],
    ) -> "Conditions":
        """All that the program of such a launch depends on."""
        threads = threadgroup[0] if self._source.blocks else 0
        types = tuple(each.dtype for each in inputs)
        return self._source, self._target, tuple(template), types, tuple(output_dtypes), threads


@cache
def device_target() -> str | None:
    """The target of MLX's CUDA device; None where NVRTC or the driver refuses a first kernel, launched here."""
    facts = mx.device_info()
    target = f"sm_{facts.get('compute_capability_major')}{facts.get('compute_capability_minor')}"
    kernel = KeptKernel(_TRIAL, 0, target)
    return target if is_launched(target, lambda: _tried(lambda **how: kernel(template=[], **how))) else None


def _tried(kernel: Callable[..., list[mx.array]]) -> list[mx.array]:
    how: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)]}
    made = kernel(inputs=[mx.array([5, 0, 0], mx.int32)], output_dtypes=list(_TRIAL_TYPES), **how)
    if made[0].item() != 5 + 3:
        raise RuntimeError("a kernel of finished code was not given what it should be")
    return made


@cache
def _finds_by_hash() -> bool:
    """Whether MLX launches the first kernel, which it has loaded, by a string of its code's hash."""
    target = device_target()
    program = None if target is None else program_of(_TRIAL, target, (), _TRIAL_TYPES, _TRIAL_TYPES, 0)
    if not isinstance(program, tuple) or (short := same_hash(program[1])) is None:
        return False
    facts: dict[str, Any] = {"name": program[0], "compiled_source": short, "scalars": [3], "shared_memory": 0}
    try:
        _tried(lambda **how: list(mx.fast.precompiled_cuda_kernel(**facts, ensure_row_contiguous=True, **how)))
    except RuntimeError as error:
        _LOG.info("kernel.code_is_hashed", why=str(error))
        return False
    return True


@lru_cache(maxsize=1024)
def _short_code(name: str, code: bytes, counts: tuple[int, int, int], shared_bytes: int) -> bytes:
    """Loads a program; returns the string that it is launched by: its code, where MLX finds no program otherwise.
    `counts`: of inputs, outputs and sizes. MLX allows a program as much shared memory as its first launch takes.
    """
    if not _finds_by_hash() or (short := same_hash(code)) is None:
        return code
    inputs, outputs, sizes = counts
    nothing: dict[str, Any] = {"output_shapes": [(1,)] * outputs, "output_dtypes": [mx.int32] * outputs}
    block: dict[str, Any] = {"grid": _LOADING, "threadgroup": _LOADING, "shared_memory": shared_bytes}
    facts: dict[str, Any] = {"name": name, "compiled_source": code, "scalars": [0] * sizes}
    try:
        given = [mx.zeros(1, mx.int32)] * inputs
        made = mx.fast.precompiled_cuda_kernel(**facts, inputs=given, **nothing, **block, ensure_row_contiguous=True)
        mx.async_eval(made)  # type: ignore[no-untyped-call]  # loads before it returns, and waits for no step
    except RuntimeError:  # its own launch raises it
        return code
    return short


def same_hash(code: bytes) -> bytes | None:
    """Eight bytes whose `std::hash` is that of the code; None where the C++ library's hash is another."""
    hashed = _std_hash()
    if hashed is None:
        return None
    mask, inverse = (1 << 64) - 1, pow(_FACTOR, -1, 1 << 64)
    wanted = hashed(code, len(code), _SEED)
    mixed = wanted ^ wanted >> 47
    mixed = mixed * inverse & mask
    folded = (mixed ^ mixed >> 47) * inverse & mask ^ (_SEED ^ 8 * _FACTOR & mask)
    folded = folded * inverse & mask
    short = ((folded ^ folded >> 47) * inverse & mask).to_bytes(8, "little")
    return short if hashed(short, 8, _SEED) == wanted else None


@cache
def _std_hash() -> Any:
    """libstdc++'s hash of bytes; None where MLX has another C++ library."""
    try:
        hashed = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    except (OSError, AttributeError):
        return None
    hashed.argtypes, hashed.restype = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t), ctypes.c_size_t
    return hashed


def is_launched(target: str, launch: Callable[[], list[mx.array]]) -> bool:
    """Whether a kernel's launch is taken by compiler and driver. A process logs a target's first refusal alone."""
    try:
        mx.eval(launch())
    except (CompileError, RuntimeError) as error:
        _log_refused(target, error)
        return False
    return True


def _log_refused(target: str, error: Exception) -> None:
    """Once for each target: others are like it."""
    if target not in _refused:
        _refused.add(target)
        _LOG.warning("kernel.not_launched", target=target, why=str(error))


@lru_cache(maxsize=1024)
def program_of(
    source: KernelSource,
    target: str,
    template: tuple[tuple[str, int | bool | mx.Dtype], ...],
    types: tuple[mx.Dtype, ...],
    output_types: tuple[mx.Dtype, ...],
    threads: int,
) -> tuple[str, bytes] | CompileError:
    """A kernel's name and code, or why it has none."""
    options = f"--gpu-architecture={target}", "--std=c++17"
    try:
        named, whole = program_text(source, template, types, output_types, threads)
        return named, compiled_program(whole, options, kept_folder("kernels"))
    except CompileError as error:
        _log_refused(target, error)
        return error


def program_text(
    source: KernelSource,
    template: Template,
    types: Sequence[mx.Dtype],
    output_types: Sequence[mx.Dtype],
    threads: int = 0,
) -> tuple[str, str]:
    """A kernel's name, which no other program has, and the source for NVRTC. Sizes of inputs follow as arguments.
    `threads`: of a block, where a multiprocessor has registers for a number of them.
    """
    parameters = [f"const {_type(kind)}* {name}" for kind, name in zip(types, source.input_names, strict=True)]
    parameters += [f"{_type(kind)}* {name}" for kind, name in zip(output_types, source.output_names, strict=True)]
    parameters += [f"const int {name}_shape_{axis}" for name, axis in _sizes(source)]
    constants = "\n".join(_constant(name, given) for name, given in template)
    body = _SHAPE.sub(r"\1_shape_\2", source.source)
    inner = f"{', '.join(parameters)}) {{\n{_LEAVE}\n{constants}\n{body}\n}}\n"
    name = f"{source.name}_{blake2b(inner.encode(), digest_size=6).hexdigest()}"
    bounds = f"__launch_bounds__({threads}, {source.blocks}) " if threads else ""
    return name, text("cuda_types.h") + source.header + f'extern "C" __global__ void {bounds}{name}(' + inner


def _sizes(source: KernelSource) -> list[tuple[str, int]]:
    """The inputs' sizes that a source reads: names and axes."""
    return sorted({(name, int(axis)) for name, axis in _SHAPE.findall(source.source)})


def _constant(name: str, given: int | bool | mx.Dtype) -> str:
    if isinstance(given, mx.Dtype):
        return f"using {name} = {_type(given)};"
    return f"constexpr int {name} = {given:d};"


def _type(kind: mx.Dtype) -> str:
    if kind not in _TYPES:
        raise CompileError(f"cuda_types.h has no word for {kind}")
    return _TYPES[kind]
