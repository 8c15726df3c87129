"""The very text that MLX would give to Metal, which MLX prints on any machine, read by clang with real address spaces.

Clang reads it as OpenCL C++, whose address spaces are Metal's by other names. What this does not see: Metal's own front
end (attributes, overloads of its library), what its compiler makes of the text, speed, and order in memory.
"""

import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from inference_svc.kv.attention.fused import Kernel, metal_compiler
from inference_svc.kv.attention.kernels import KernelSource

cindex: Any = pytest.importorskip("clang.cindex", reason="libclang is not installed")
_DECLARED = (Path(__file__).parent / "metal_text.h").read_text()
_READ_AS = ("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc")
_PRINTED = re.compile(r"Generated source code for `(\w+)`:\n```\n(.*?)\n```\n", re.DOTALL)
_MADE_FOR = re.compile(r'template \[\[host_name\("\w+"\)\]\] \[\[kernel\]\] (decltype\((\w+)<[^;]*?>\) \w+<[^;]*?>;)')
_ATTRIBUTE = re.compile(r"\[\[.*?\]\]")
# Clang wants an array of a block to stand in the kernel itself, which a template is not: only its address space counts.
_SHARED = re.compile(r"(threadgroup float4) (\w+)\[[^]]*\];")
# OpenCL C++ has a space for pointers that name none, Metal has not.
_POINTER = re.compile(r"((?:\w+ )*)\w+[*&] (?=\w)")
_SPACES = {"device", "constant", "threadgroup", "thread", "KV_GLOBAL", "KV_SHARED", "KV_THREAD"}


def printing_compiler(source: KernelSource, shared_bytes: int) -> Kernel:
    """As `metal_compiler`; MLX prints each text that it would compile."""
    kernel: Any = metal_compiler(source, shared_bytes)
    return lambda **how: kernel(**how, verbose=True)


def texts(function: Callable[..., Any], *arrays: mx.array) -> dict[str, str]:
    """By kernel, what MLX prints while it records a function that launches kernels of `printing_compiler`."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(f"{folder}/recorded", function, *arrays)
        finally:
            os.dup2(before, 1)
            os.close(before)
        printed.seek(0)
        return dict(_PRINTED.findall(printed.read().decode()))


def by_kernel(texts: Iterable[str]) -> list[str]:
    """Texts that differ only in a template's values, as one text that has the kernel once and all these values."""
    values = defaultdict[str, set[str]](set)
    for text in texts:
        found = _MADE_FOR.search(text)
        assert found is not None
        kernel = text[: found.start()] + text[found.end() :]
        values[kernel.replace(found[2], "kv_kernel")].add(found[0].replace(found[2], "kv_kernel"))
    return ["\n".join([kernel, *sorted(made_for)]) for kernel, made_for in values.items()]


@cache
def faults(text: str) -> tuple[str, ...]:
    """What is wrong in one kernel's text, with its lines."""
    read = _SHARED.sub(r"\1* \2 = 0;", _ATTRIBUTE.sub("", _MADE_FOR.sub(r"template \1", text)))
    whole = _DECLARED + read
    unit = cindex.Index.create().parse("kernel.cl", args=_READ_AS, unsaved_files=[("kernel.cl", whole)])
    lines = whole.splitlines()
    return *(
        f"{found.spelling}: {lines[found.location.line - 1].strip() if found.location.line <= len(lines) else ''}"
        for found in unit.diagnostics
        if found.severity >= cindex.Diagnostic.Error
    ), *(f"no address space: {found[0]}" for found in _POINTER.finditer(text) if not _SPACES & set(found[1].split()))
