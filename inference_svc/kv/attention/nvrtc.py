"""NVRTC, CUDA's compiler as a library, for targets that MLX does not name; its results are kept on disk.

MLX's CUDA wheels load the library, so the loader finds it by its name.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from inference_svc.kv.kept_files import keep_bytes, kept_bytes, named_for

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class CompileError(Exception):
    """A program was not compiled; the text has the reason."""


def compiled_program(text: str, options: tuple[str, ...], kept: Path | None) -> bytes:
    """The machine code of a program in CUDA C++ that includes nothing. `kept`: a folder for it. Raises CompileError."""
    compiler = _library()
    if compiler is None:
        raise CompileError(f"NVRTC was not found: expected one of {', '.join(_LIBRARIES)}")
    if kept is None:
        return _compiled(compiler, text, options)
    path = kept / f"{named_for(text, *options, _version(compiler))}.cubin"
    found = kept_bytes(path)
    if found is None:
        found = _compiled(compiler, text, options)
        keep_bytes(path, found)
    return found


@cache
def _library() -> Any:
    """The library that MLX has loaded, before any other one; None if there is none."""
    loaded = getattr(os, "RTLD_NOLOAD", None)
    modes = [ctypes.DEFAULT_MODE] if loaded is None else [loaded, ctypes.DEFAULT_MODE]
    for mode in modes:
        for name in _LIBRARIES:
            try:
                return ctypes.CDLL(name, mode=mode)
            except OSError:
                pass
    return None


def _version(compiler: Any) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _compiled(compiler: Any, text: str, options: tuple[str, ...]) -> bytes:
    program = ctypes.c_void_p()
    if compiler.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None):
        raise CompileError("NVRTC made no program")
    try:
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = compiler.nvrtcCompileProgram(program, len(options), given)
        if failed:
            said = _content(program, compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog)
            raise CompileError(f"NVRTC {_version(compiler)} refused: {said.decode(errors='replace')[:2000]}")
        return _content(program, compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _content(program: ctypes.c_void_p, size_of: Callable[..., int], get: Callable[..., int]) -> bytes:
    size = ctypes.c_size_t()
    if size_of(program, ctypes.byref(size)):
        raise CompileError("NVRTC gave no result")
    content = ctypes.create_string_buffer(size.value)
    if get(program, content):
        raise CompileError("NVRTC gave no result")
    return content.raw
