"""Compiles a kernel's source with the machine's C++ compiler and runs it, with the calls of `mx.fast.cuda_kernel`."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

import mlx.core as mx
import numpy as np

from inference_svc.kv.attention import kernels
from inference_svc.kv.attention.fused import Kernel, Template
from inference_svc.kv.attention.kernels import (
    CUDA_INSTRUCTIONS,
    CUDA_SHARED,
    HOPPER_INSTRUCTIONS,
    METAL_SHARED,
    Dialect,
    KernelSource,
)

_HERE = Path(__file__).parent
# A CPU reads vectors from any address, a GPU does not: there such a read must fail here too.
_ALIGNED = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fno-strict-aliasing",
    "-fPIC",
    "-w",
    "-U_FORTIFY_SOURCE",
    *_ALIGNED,
)
_SANITIZED = ("-g", "-fsanitize=address", "-fno-omit-frame-pointer")
_TYPES = {
    mx.float32: ("float", "float"),
    mx.float16: ("__half", "half"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.uint16: ("uint16_t", "uint16_t"),
    mx.int32: ("int32_t", "int32_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
}
# Sizes are of copies, made for each run: an address sanitizer then sees what lies beside each input. Inputs that the
# kernel writes are copied back.
_RUN = """extern "C" void kv_run(const void** inputs, const long* sizes, const bool* is_written, const int** shapes,
                       void** outputs, const int* grid, int lane_count, int shared_bytes,
                       bool are_copies_early) {
  fibers::are_copies_early = are_copies_early;
  fibers::are_blocks_together = %s;
  fibers::are_warps_apart = %s;
  std::vector<fibers::Copied> copies;
  for (int i = 0; i < %d; ++i) copies.emplace_back(inputs[i], sizes[i]);
  fibers::run(grid, lane_count, shared_bytes, [&] { kernel::kernel(%s); });
  for (int i = 0; i < %d; ++i)
    if (is_written[i]) std::memcpy((void*)inputs[i], copies[i].bytes.get(), sizes[i]);
}
"""


def cxx() -> str:
    """The machine's C++ compiler; empty if there is none."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), "")


def cuda_emulator(source: KernelSource, shared_bytes: int) -> Kernel:
    """Compile a source of the CUDA dialect for this CPU."""
    return EmulatedKernel(source, shared_bytes, Dialect.CUDA)


def early_cuda_emulator(source: KernelSource, shared_bytes: int) -> Kernel:
    """As `cuda_emulator`, but asynchronous copies arrive when they are begun."""
    return EmulatedKernel(source, shared_bytes, Dialect.CUDA, are_copies_early=True)


def metal_emulator(source: KernelSource, shared_bytes: int) -> Kernel:
    """Compile a source of the Metal dialect for this CPU."""
    return EmulatedKernel(source, shared_bytes, Dialect.METAL)


class EmulatedKernel:
    def __init__(
        self, source: KernelSource, shared_bytes: int, dialect: Dialect, *, are_copies_early: bool = False
    ) -> None:
        self.source, self._dialect, self.shared_bytes = source, dialect, shared_bytes
        self._are_copies_early = are_copies_early

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
        library = _library(self.text(types, tuple(output_dtypes), template))
        given, written = self.given(inputs), self.written
        # Nothing may rest on what an output held before.
        outputs = [
            np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        blocks = [-(-size // lanes) for size, lanes in zip(grid, threadgroup, strict=True)]
        library.kv_run(
            (ctypes.c_void_p * len(given))(*[each.bytes.ctypes.data for each in given]),
            (ctypes.c_long * len(given))(*[each.bytes.nbytes for each in given]),
            (ctypes.c_bool * len(given))(*written),
            (ctypes.c_void_p * len(given))(*[each.shape.ctypes.data for each in given]),
            (ctypes.c_void_p * len(outputs))(*[each.ctypes.data for each in outputs]),
            (ctypes.c_int * 3)(*blocks),
            threadgroup[0],
            self.shared_bytes,
            self._are_copies_early,
        )
        return [
            mx.array(each).view(dtype).reshape(shape)
            for each, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    @property
    def written(self) -> list[bool]:
        """Which inputs the kernel writes."""
        return [name in self.source.written_inputs for name in self.source.input_names]

    def given(self, inputs: Sequence[mx.array]) -> list["Given"]:
        return [Given(each, is_written=is_written) for each, is_written in zip(inputs, self.written, strict=True)]

    def text(self, types: tuple[mx.Dtype, ...], output_types: tuple[mx.Dtype, ...], template: Template) -> str:
        """The whole program: this dialect's words, the source, and a function that runs it over a grid."""
        side = 0 if self._dialect is Dialect.CUDA else 1
        parts = [_text("fibers.h"), _text(f"{self._dialect.value}.h"), self._header(), "namespace kernel {\n"]
        names = self.source.input_names
        constants = [_constant(name, given, side) for name, given in template]
        parameters = [f"const {_TYPES[kind][side]}* {name}" for kind, name in zip(types, names, strict=True)]
        parameters += [f"const int* {name}_shape" for name in names]
        parameters += [
            f"{_TYPES[kind][side]}* {name}" for kind, name in zip(output_types, self.source.output_names, strict=True)
        ]
        body = self.source.source
        for line in (CUDA_SHARED, METAL_SHARED):
            body = body.replace(line, "float* kv_shared = (float*)fibers::shared;\n")
        parts.append(f"void kernel({', '.join(parameters)}) {{\n{chr(10).join(constants)}\n{body}\n}}\n}}\n")
        arguments = [f"(const {_TYPES[kind][side]}*)copies[{i}].bytes.get()" for i, kind in enumerate(types)]
        arguments += [f"shapes[{i}]" for i in range(len(types))]
        arguments += [f"({_TYPES[kind][side]}*)outputs[{i}]" for i, kind in enumerate(output_types)]
        return "".join(parts) + self.run_text(types, output_types, arguments)

    def run_text(self, types: tuple[mx.Dtype, ...], output_types: tuple[mx.Dtype, ...], arguments: list[str]) -> str:
        """The function that copies what a kernel is given, and runs it."""
        together = "true" if "kv_grid_barrier(" in self.source.source else "false"
        apart = "false" if "fibers::delay(" in self._header() else "true"  # their lanes meet in every order by delays
        return _RUN % (together, apart, len(types), ", ".join(arguments), len(types))

    def _header(self) -> str:
        header = self.source.header
        for name in (CUDA_INSTRUCTIONS, HOPPER_INSTRUCTIONS):
            header = header.replace(kernels.text(name), _text(name))
        return header


def _constant(name: str, given: int | bool | mx.Dtype, side: int) -> str:
    if isinstance(given, mx.Dtype):
        return f"using {name} = {_TYPES[given][side]};"
    return f"constexpr int {name} = {given:d};"


class Given:
    """An input as the kernel gets it: its bytes and its shape. The bytes of an input that is written are the array's
    own.
    """

    def __init__(self, value: mx.array, *, is_written: bool) -> None:
        stored = value if is_written else mx.contiguous(value)
        self.bytes = np.asarray(stored).view(np.uint8) if is_written else np.array(stored.view(mx.uint8)).reshape(-1)
        assert self.bytes.flags.c_contiguous, "a kernel writes rows that follow each other"
        self.shape = np.array(value.shape, np.int32)


@cache
def _library(text: str) -> ctypes.CDLL:
    """The program, compiled once for its text; a second process finds it where the first one left it."""
    flags = _FLAGS + (_SANITIZED if is_sanitized() else ())
    digest = blake2b((text + " ".join(flags)).encode(), digest_size=12).hexdigest()
    place = Path(tempfile.gettempdir()) / f"kvasir-emulation-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    path = place / f"{digest}.so"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=place, suffix=".so", delete=False) as made:
            pass
        includes = ("-include", f"{_includes(flags).name}/includes.h")
        command = [cxx(), *flags, "-shared", *includes, "-x", "c++", "-", "-o", made.name]
        subprocess.run(command, input=text.encode(), check=True)
        Path(made.name).replace(path)
    return ctypes.CDLL(str(path))


@cache
def _includes(flags: tuple[str, ...]) -> "tempfile.TemporaryDirectory[str]":
    """The library's headers, which take a compiler as long as a kernel does: this process has them read once."""
    place = tempfile.TemporaryDirectory(prefix="kvasir-emulation-")
    header = Path(place.name, "includes.h")
    header.write_text("".join(line for line in _text("fibers.h").splitlines(keepends=True) if line[0] == "#"))
    subprocess.run([cxx(), *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
    return place


def is_sanitized() -> bool:
    """Whether this process was started with an address sanitizer, as `sanitized.py` does."""
    try:
        ctypes.CDLL(None).__asan_init  # noqa: B018 - asks whether the symbol is there
    except AttributeError:
        return False
    return True


def _text(name: str) -> str:
    return (_HERE / name).read_text()
