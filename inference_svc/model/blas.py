"""Loads MKL or OpenBLAS for MLX on a Linux CPU, before the first `import mlx`: symbols of a library that is loaded
globally and first take precedence over the wheel's reference BLAS, which is 30 to 60 times slower.
"""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

# From mkl_cbwr.h. AUTO takes the machine's best code path; STRICT makes one product's rounding independent of where
# its operands lie in memory and of how many threads compute it.
_MKL_CBWR_AUTO = 2
_MKL_CBWR_STRICT = 0x10000

# For how long, in ms, a thread of MKL that has nothing to do keeps its core. By itself 200: a third of the seconds of
# processor that an engine on two cores took, which its other threads, the gateway and the callers waited for.
_IDLE_MS = "0"


@functools.cache
def load_optimized_blas() -> str | None:
    """Load MKL or OpenBLAS for MLX and return the library's file name; None if none is found or needed. The library
    stays loaded, with global symbols. With MKL, equal operands then give equal results at any alignment, so that a
    restored sequence does not depend on where an allocator put it.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    os.environ.setdefault("KMP_BLOCKTIME", _IDLE_MS)
    for name in _candidates():
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        _make_reproducible(library)
        return Path(name).name
    return None


def begin_loading_mlx() -> None:
    """On a thread that needs no interpreter, with CUDA's libraries and the device's context: `import mlx.core` holds it
    for 0.3 s to do so. Meanwhile an import of another extension module waits.
    """

    def load() -> None:
        with contextlib.suppress(Exception):  # the import reports what is wrong
            found: Any = find_spec("mlx.core")
            library = Path(found.origin).parent / "lib" / "libmlx.so"
            opened = ctypes.CDLL(None).dlopen
            opened.argtypes, opened.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
            opened(os.fsencode(library), os.RTLD_NOW)
            driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # none: MLX is another device's
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if driver.cuInit(0) == driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # the one that MLX computes in

    if sys.platform == "linux":
        Thread(target=load, name="mlx-library", daemon=True).start()


def _candidates() -> Iterator[str]:
    """MKL of this environment (pip's `mkl`), then the system's MKL and OpenBLAS."""
    yield from sorted((str(path) for path in (Path(sys.prefix) / "lib").glob("libmkl_rt.so.*")), reverse=True)
    yield from ("libmkl_rt.so.3", "libmkl_rt.so.2", "libopenblas.so.0")


def _make_reproducible(library: ctypes.CDLL) -> None:
    set_branch = getattr(library, "MKL_CBWR_Set", None)
    if set_branch is None:
        return  # not MKL
    library.MKL_Set_Dynamic(0)
    for setting in (_MKL_CBWR_AUTO | _MKL_CBWR_STRICT, _MKL_CBWR_AUTO):
        if set_branch(ctypes.c_int(setting)) == 0:
            return
