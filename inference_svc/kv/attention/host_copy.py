"""Bytes between the host and a GPU's memory, in one copy each way.

MLX keeps an array that it makes of host bytes in managed memory, and a kernel that reads it there faults page by page:
a restore of 302 MB took 158 ms so, and 70 ms by CUDA's own copy (H200). CUDA's copy of ordinary memory is one thread's;
several that fill pinned buffers are faster. On other devices host and device share their memory, and MLX's way is the
only one.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.generic]
_Piece: TypeAlias = tuple[int, int, int]  # an address on the device, one on the host, and bytes
_PIECE_BYTES = 4 << 20
_THREADS = 6

_ADDRESS_SOURCE = "if (threadIdx.x == 0) { address[0] = (long long)given; }"


def to_device(rows: Sequence[Units]) -> mx.array:
    """Equal rows of uint16 units as one array [rows, units]. Evaluates."""
    if not rows or not _has_cuda() or not _is_sound():
        return mx.stack([mx.array(row) for row in rows])
    return _copied_to_device(rows)


def _copied_to_device(rows: Sequence[Units]) -> mx.array:
    made = mx.zeros((len(rows), rows[0].size), dtype=mx.uint16)
    first = _address(made)
    # Other work may still read memory that was free when this array was made.
    mx.synchronize()
    kept = [np.ascontiguousarray(row) for row in rows]
    _copiers().copy([piece for number, row in enumerate(kept) for piece in _pieces(first + number * row.nbytes, row)])
    return made


def _pieces(address: int, row: Units) -> Iterator[_Piece]:
    for begin in range(0, row.nbytes, _PIECE_BYTES):
        yield address + begin, row.ctypes.data + begin, min(_PIECE_BYTES, row.nbytes - begin)


def to_host(array: mx.array) -> Units:
    """A uint16 array's numbers. Evaluates."""
    mx.eval(array)
    if not array.size or not _has_cuda() or not _is_sound():
        return np.asarray(array)
    return _copied_to_host(array)


def _copied_to_host(array: mx.array) -> Units:
    contiguous = mx.contiguous(array)
    found = np.empty(array.shape, dtype=np.uint16)
    address = _address(contiguous)
    mx.synchronize()
    _check(_driver().cuMemcpyDtoH_v2(found.ctypes.data, ctypes.c_uint64(address), found.nbytes))
    return found


def _address(array: mx.array) -> int:
    """Where an array lies on the device. It must be held as long as the address is used."""
    (address,) = _address_kernel()(
        inputs=[array],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int64],
    )
    return int(address.item())  # type: ignore[arg-type]


@cache
def _address_kernel() -> Any:
    made: Any = mx.fast.cuda_kernel(
        name="kv_address", input_names=["given"], output_names=["address"], source=_ADDRESS_SOURCE
    )
    return made


class _Copiers:
    """Threads that copy pieces to the device, each by two pinned buffers in turn: one is filled while the other's bytes
    are on their way. They begin with the context of the thread that makes them, and touch nothing of MLX's.
    """

    def __init__(self) -> None:
        context = ctypes.c_void_p()
        _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
        self._here = threading.local()
        self._threads = ThreadPoolExecutor(_THREADS, "host-copy", self._begin, (context,))

    def copy(self, pieces: Sequence[_Piece]) -> None:
        """Returns when the device has all bytes. Raises RuntimeError if CUDA refuses one."""
        shares = [self._threads.submit(self._copy, pieces[first::_THREADS]) for first in range(_THREADS)]
        errors = [share.exception() for share in shares]  # waits for all: each still reads the host's bytes
        for error in errors:
            if error is not None:
                raise RuntimeError(f"copy to the device: {error}") from error

    def _begin(self, context: ctypes.c_void_p) -> None:
        driver, self._here.ways = _driver(), []
        _check(driver.cuCtxSetCurrent(context))
        for _ in range(2):
            stream, buffer = ctypes.c_void_p(), ctypes.c_void_p()
            _check(driver.cuStreamCreate(ctypes.byref(stream), 1))  # waits for no other stream
            _check(driver.cuMemHostAlloc(ctypes.byref(buffer), ctypes.c_size_t(_PIECE_BYTES), 0))
            self._here.ways.append((stream, buffer))

    def _copy(self, pieces: Sequence[_Piece]) -> None:
        ways, driver = self._here.ways, _driver()
        for number, (target, source, size) in enumerate(pieces):
            stream, buffer = ways[number % 2]
            _check(driver.cuStreamSynchronize(stream))
            ctypes.memmove(buffer, source, size)
            _check(driver.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(target), buffer, ctypes.c_size_t(size), stream))
        for stream, _ in ways:
            _check(driver.cuStreamSynchronize(stream))


@cache
def _copiers() -> _Copiers:
    return _Copiers()


@cache
def _is_sound() -> bool:
    """Whether a copy arrives, tried once: MLX does not promise where an array lies."""
    sent = np.random.default_rng(0).integers(1, 1 << 16, (2, (_PIECE_BYTES + 4096) // 2), dtype=np.uint16)
    try:
        arrived = _copied_to_device([*sent])
        found = _copied_to_host(arrived)
    except (OSError, RuntimeError):  # no such library, or it refuses: then MLX's way, which is slower
        return False
    return bool(mx.array_equal(arrived, mx.array(sent)).item()) and np.array_equal(found, sent)


@cache
def _has_cuda() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
    return driver


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA refused a copy: error {status}")
