"""The optional extension over MLX's C++ headers: compiled by this machine's compiler, kept, called by ctypes."""

import copy
import ctypes
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from inference_svc.kv.kept_files import is_this_users, remove_left

_SOURCE = Path(__file__).parent / "mapping.cpp"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")
_COMPILERS = ("c++", "g++", "clang++")
_APPLES, _SELECT = "/usr/bin", ("/usr/bin/xcode-select", "-p")
_WAIT_S = 15.0  # it takes two or three
# nanobind's objects: Python's head, then the offset of the C++ object and bits for how it is kept.
_HEAD_BYTES = object.__basicsize__
_SHARED_POINTER_BYTES = 2 * ctypes.sizeof(ctypes.c_void_p)


class NoExtension(Exception):
    """There is no extension here; the text has the reason."""


class Mapped:
    """A file's pages. Arrays that were placed over them keep them."""

    def __init__(self, library: ctypes.PyDLL, address: int) -> None:
        self._library, self._address = library, address

    def place(self, array: mx.array, offset: int) -> None:
        """Make an array, not evaluated, one over the bytes from this offset on. It keeps its shape and type."""
        self._library.kvasir_place(_descriptor(array), self._address, offset)

    def close(self) -> None:
        self._library.kvasir_free(self._address)


class Extension:
    """The functions of mapping.cpp. They hold Python's lock: each is short, and arrays must not be used meanwhile."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = library = ctypes.PyDLL(str(path))
        except OSError as error:
            raise NoExtension(f"the system does not load it: {error}") from None
        library.kvasir_map.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_bool]
        library.kvasir_map.restype = ctypes.c_void_p
        library.kvasir_place.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.kvasir_free.argtypes = library.kvasir_let_go.argtypes = [ctypes.c_void_p]

    def mapped(self, file: int, size_bytes: int, *, is_read_ahead: bool) -> Mapped | None:
        """The pages of an open file; None if the system or MLX's device takes no such mapping."""
        address = self._library.kvasir_map(file, size_bytes, is_read_ahead)
        return Mapped(self._library, address) if address else None

    def let_go(self, array: mx.array) -> None:
        """Of an array over mapped pages that is not used again: take these pages out of this process's memory."""
        self._library.kvasir_let_go(_descriptor(array))


def extension(kept: Path | None, compilers: tuple[str, ...] = _COMPILERS) -> Extension:
    """The extension for this MLX, kept or compiled; a slow compiler goes on for the next start. Raises NoExtension."""
    if not _is_layout_known():
        raise NoExtension("MLX keeps its arrays in Python in a way that is not known")
    if kept is None:
        raise NoExtension("this user has no home directory to keep it in")
    if (path := _found(kept)) is None:
        _compile(_compiler(compilers), kept)
        path = _found(kept)
    if path is None:
        raise NoExtension(f"it does not stay in {kept}")
    return Extension(path)


def _mlx_directory() -> Path:
    return Path(mx.__file__).parent


def _key() -> str:
    """What the compiled file depends on. MLX's wheels for other devices have one version, and other libraries."""
    directory = _mlx_directory()
    library = next((directory / "lib").glob("libmlx.*"), directory)
    facts = (_SOURCE.read_text(), *_FLAGS, version("mlx"), str(library), library.stat().st_size, sys.platform)
    return blake2b("\0".join(map(str, facts)).encode(), digest_size=16).hexdigest()


def _found(kept: Path) -> Path | None:
    """A kept file in a folder that this user alone writes: it runs in this process. Its bytes are those of its name:
    one that a crash of the machine cut short would end each process that loads it.
    """
    with suppress(OSError):
        if is_this_users(kept):
            paths = kept.glob(f"{_key()}-*.so")
            return next((path for path in paths if path.name == _name_of(path.read_bytes())), None)
    return None


def _name_of(content: bytes) -> str:
    return f"{_key()}-{blake2b(content, digest_size=16).hexdigest()}.so"


def _compiler(names: tuple[str, ...]) -> str:
    """On a Mac without Apple's tools each of these is there, and opens a window that offers to install them."""
    found = next((found for name in names if (found := shutil.which(name))), None)
    if found is None:
        raise NoExtension(f"there is no C++ compiler ({', '.join(names)})")
    if sys.platform == "darwin" and str(Path(found).parent) == _APPLES and not _has_apples_tools():
        raise NoExtension("there is no C++ compiler: xcode-select --install offers Apple's")
    return found


def _has_apples_tools() -> bool:
    try:
        return subprocess.run(_SELECT, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _compile(compiler: str, kept: Path) -> None:
    """Compile to a file of another name, and rename it: processes may do this at once."""
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_this_users(kept):
            raise NoExtension(f"{kept} may be written by others")
        with tempfile.NamedTemporaryFile(dir=kept, suffix=".part", delete=False) as file:
            part = Path(file.name)
        remove_left(part)
    except OSError as error:
        raise NoExtension(f"it cannot be kept: {error}") from None
    mlx, problems = _mlx_directory(), list[str]()
    linked = (f"-I{mlx}/include", str(_SOURCE), "-o", str(part), f"-L{mlx}/lib", "-lmlx", f"-Wl,-rpath,{mlx}/lib")

    def work() -> None:
        try:
            answer = subprocess.run([compiler, *_FLAGS, *linked], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                part.chmod(0o700)
                part.replace(kept / _name_of(part.read_bytes()))
            else:
                problems.append(next(iter(answer.stderr.splitlines()), f"exit code {answer.returncode}"))
        except OSError as error:
            problems.append(str(error))
        finally:
            part.unlink(missing_ok=True)

    compiling = threading.Thread(target=work, name="mapping-compiler", daemon=True)
    compiling.start()
    compiling.join(_WAIT_S)
    if problems:
        raise NoExtension(f"{Path(compiler).name} does not compile it: {problems[0]}")
    if compiling.is_alive():
        raise NoExtension(f"{Path(compiler).name} still compiles it; the next start may find it")


def _descriptor(array: mx.array) -> int:
    """The address of the C++ array in a Python array: a shared pointer to its description."""
    return id(array) + ctypes.c_int32.from_address(id(array) + _HEAD_BYTES).value


@cache
def _is_layout_known() -> bool:
    """Whether `_descriptor` finds the descriptor, tried on arrays of known relation: a copy shares the description."""
    array, other = mx.zeros((2, 3)), mx.zeros((2, 3))
    size = type(array).__basicsize__

    def pointer(of: mx.array) -> bytes:
        start = _descriptor(of) - id(of)
        if not _HEAD_BYTES < start <= size - _SHARED_POINTER_BYTES:
            return b""
        return ctypes.string_at(id(of) + start, _SHARED_POINTER_BYTES)

    pointers = pointer(array), pointer(copy.copy(array)), pointer(other)
    halves = [int.from_bytes(p[:8], sys.byteorder) for p in pointers if len(p) == _SHARED_POINTER_BYTES]
    are_addresses = len(halves) == len(pointers) and all(half and half % 8 == 0 for half in halves)
    return are_addresses and pointers[0] == pointers[1] != pointers[2]
