"""The emulation of Metal's text with each access to memory watched (`races.h`). For tests of planted faults too: a
changed text runs as the right one does.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from inference_svc.kv.attention.fused import Kernel, Template
from inference_svc.kv.attention.kernels import Dialect, KernelSource
from tests.emulation.emulator import EmulatedKernel, cxx

_WATCH = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fsanitize=thread")
_HEADER = (Path(__file__).parent / "races.h").read_text()
# The emulation's words, and the watched ones.
_WATCHED = (
    ("fibers::meet_block(); }\ninline void simdgroup", "races::block_met(); }\ninline void simdgroup"),
    ("{ fibers::meet_warp(); }\ninline float simd", "{ races::warp_met(); }\ninline float simd"),
    ("namespace fibers {\n", "void races_begin_block(char*, long);\nvoid races_stuck();\nnamespace fibers {\n"),
    (
        "        run_blocks(memories);\n",
        "        races_begin_block(memories[0], shared_bytes);\n        run_blocks(memories);\n",
    ),
    (
        'not all of them come\\n");\n      std::abort();',
        'not all of them come\\n");\n      races_stuck();\n      return;',
    ),
    ("new char[each * at_once + 16]", "new char[each * at_once + 16 + (1 << 17)]"),
    ("memory.get()) + 15)", "memory.get()) + (1 << 16) + 15)"),
)
_CALLS = """
void races_begin_block(char* begin, long size) { races::begin_block(begin, size); }
void races_stuck() { races::found("a barrier that not all lanes reach", "block", 0); }
extern "C" void kv_counts(long* counts) {
  const long lanes = fibers::lanes.size(), products = fibers::products / 32;
  const long made[] = {products, races::read_bytes[0], races::written_bytes[0], races::read_bytes[1],
                       races::written_bytes[1], fibers::block_meetings / lanes,
                       (fibers::shown_values - fibers::products) / 32};
  for (int i = 0; i < 7; ++i) counts[i] = made[i];
}
"""
COUNTED = ("products", "read", "written", "shared_read", "shared_written", "barriers", "shuffles")
_RUN = """extern "C" const char* kv_run(const void** inputs, const long* sizes, const bool* is_written,
                                  const int** shapes, void** outputs, const long* output_sizes, const int* grid,
                                  int lane_count, int shared_bytes) {
  const char* names[] = {%s};
  races::fault[0] = 0;
  races::regions.clear();
  races::shared_begin = nullptr;  // that of an earlier launch is free: it may lie in what this one takes for itself
  std::vector<races::Guarded> given, made;
  for (int i = 0; i < %d; ++i) given.emplace_back(inputs[i], sizes[i], is_written[i], names[i]);
  for (int i = 0; i < %d; ++i) made.emplace_back(outputs[i], output_sizes[i], true, names[%d + i]);
  fibers::products = fibers::block_meetings = fibers::shown_values = 0;
  for (int i = 0; i < 2; ++i) races::read_bytes[i] = races::written_bytes[i] = 0;
  races::is_running = true;
  if (!_setjmp(races::end)) fibers::run(grid, lane_count, shared_bytes, [&] { kernel::kernel(%s); });
  races::is_running = false;
  for (int i = 0; i < %d; ++i)
    if (is_written[i]) std::memcpy((void*)inputs[i], given[i].begin, sizes[i]);
  for (int i = 0; i < %d; ++i) std::memcpy(outputs[i], made[i].begin, output_sizes[i]);
  return races::fault;
}
"""


Counts = dict[str, dict[str, int]]
"""By kernel, COUNTED of its latest launch: products of 8 x 8 matrices, bytes, barriers of blocks, shuffles of warps."""


def watching_compiler(
    faults: list[str], change: Callable[[str], str] = lambda text: text, counts: Counts | None = None
) -> Callable[[KernelSource, int], Kernel]:
    """Compiles Metal's text for this CPU, after `change`. The first fault of each launch is added to `faults`."""
    return lambda source, shared_bytes: _WatchedKernel(source, shared_bytes, faults, change, counts)


class _WatchedKernel(EmulatedKernel):
    def __init__(
        self,
        source: KernelSource,
        shared_bytes: int,
        faults: list[str],
        change: Callable[[str], str],
        counts: Counts | None,
    ) -> None:
        super().__init__(source, shared_bytes, Dialect.METAL)
        self._faults, self._change = faults, change
        self._counts: Counts = {} if counts is None else counts

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
        library = _library(self._change(self.text(types, tuple(output_dtypes), template)))
        given, written = self.given(inputs), self.written
        outputs = [
            np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        blocks = [-(-size // lanes) for size, lanes in zip(grid, threadgroup, strict=True)]
        fault = library.kv_run(
            (ctypes.c_void_p * len(given))(*[each.bytes.ctypes.data for each in given]),
            (ctypes.c_long * len(given))(*[each.bytes.nbytes for each in given]),
            (ctypes.c_bool * len(given))(*written),
            (ctypes.c_void_p * len(given))(*[each.shape.ctypes.data for each in given]),
            (ctypes.c_void_p * len(outputs))(*[each.ctypes.data for each in outputs]),
            (ctypes.c_long * len(outputs))(*[each.nbytes for each in outputs]),
            (ctypes.c_int * 3)(*blocks),
            threadgroup[0],
            self.shared_bytes,
        )
        self._count(library)
        if fault:
            self._faults.append(f"{self.source.name.split('_')[1]}: {fault.decode()}")
        return [
            mx.array(each).view(dtype).reshape(shape)
            for each, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _count(self, library: ctypes.CDLL) -> None:
        found = (ctypes.c_long * len(COUNTED))()
        library.kv_counts(found)
        self._counts[self.source.name.split("_")[1]] = dict(zip(COUNTED, found, strict=True)) | {
            "shared_bytes": self.shared_bytes
        }

    def run_text(self, types: tuple[mx.Dtype, ...], output_types: tuple[mx.Dtype, ...], arguments: list[str]) -> str:
        count, made = len(types), len(output_types)
        names = ", ".join(f'"{name}"' for name in (*self.source.input_names, *self.source.output_names))
        arguments = [each.replace("copies[", "given[").replace(".bytes.get()", ".begin") for each in arguments]
        arguments = [
            f"{each[: each.index('outputs[')]}made[{each.split('outputs[')[1]}.begin" if "outputs[" in each else each
            for each in arguments
        ]
        return _CALLS + _RUN % (names, count, made, count, ", ".join(arguments), count, made)

    def text(self, types: tuple[mx.Dtype, ...], output_types: tuple[mx.Dtype, ...], template: Template) -> str:
        whole = super().text(types, output_types, template)
        for old, new in _WATCHED:
            assert old in whole, old
            whole = whole.replace(old, new)
        end_of_fibers = "}  // namespace fibers\n"
        return f"// kernel of {self.source.name.split('_')[1]}\n" + whole.replace(
            end_of_fibers, end_of_fibers + _HEADER
        )


@cache
def _library(text: str) -> ctypes.CDLL:
    """The program. It is linked without the sanitizer's runtime, whose hooks it has itself."""
    with tempfile.TemporaryDirectory() as place:
        compiled, linked = f"{place}/kernel.o", f"{place}/kernel.so"
        command = [cxx(), *_WATCH, "-c", "-x", "c++", "-", "-o", compiled]
        subprocess.run(command, input=text.encode(), check=True)
        subprocess.run([cxx(), "-shared", compiled, "-o", linked], check=True)
        made = ctypes.CDLL(linked)
    made.kv_run.restype = ctypes.c_char_p
    return made
