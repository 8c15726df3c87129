"""NVRTC, CUDA's compiler as a library, for targets that MLX does not name; its results are kept on disk.

MLX's CUDA wheels load the library, so the loader finds it by its name.
"""

import ctypes
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
_DIGEST_BYTES = 16
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CompileError(Exception):
    """A program was not compiled; the text has the reason."""


def kept_programs() -> Path | None:
    """Where this user's compiled programs lie; None for a user without a home."""
    try:
        return Path.home() / ".cache" / "kvasir" / "kernels"
    except RuntimeError:
        return None


def compiled_program(text: str, options: tuple[str, ...], kept: Path | None) -> bytes:
    """The machine code of a program in CUDA C++ that includes nothing. Raises CompileError.

    A file of `kept` is named for all that its content depends on, and written whole, so processes may share it.
    """
    compiler = _library()
    if compiler is None:
        raise CompileError(f"NVRTC was not found: expected one of {', '.join(_LIBRARIES)}")
    if kept is None:
        return _compiled(compiler, text, options)
    version = _version(compiler)
    path = kept / f"{_digest(chr(0).join((text, *options, version)).encode()).hex()}.cubin"
    found = _found(path)
    if found is None:
        found = _compiled(compiler, text, options)
        _keep(path, found)
    return found


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _found(path: Path) -> bytes | None:
    """A kept program that is whole, in a folder that this user alone writes: a GPU runs what it is given."""
    try:
        if not is_this_users(path.parent):
            return None
        content = path.read_bytes()
    except OSError:
        return None
    digest, made = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return made if _digest(made) == digest else None


def is_this_users(folder: Path) -> bool:
    """Whether the folder is this user's, and nobody else writes to it."""
    facts = folder.stat()
    return facts.st_uid == os.getuid() and not facts.st_mode & _WRITABLE_BY_OTHERS


def _keep(path: Path, made: bytes) -> None:
    """Where the disk takes no file, each process compiles for itself."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_this_users(path.parent):
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # mode 0600
            temp = Path(file.name)
            try:
                file.write(_digest(made) + made)
                file.flush()
                os.fsync(file.fileno())
                temp.replace(path)
            except OSError:
                temp.unlink(missing_ok=True)
    except OSError:
        return


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
