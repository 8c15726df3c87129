"""Bytes between the host and a GPU's memory, in one copy each way.

MLX keeps an array that it makes of host bytes in managed memory, and a kernel that reads it there faults page by page:
a restore of 302 MB took 158 ms so, and 70 ms by CUDA's own copy (H200). CUDA's copy of ordinary memory is one thread's;
several that fill pinned buffers are faster. On other devices host and device share their memory, and MLX's way is the
only one.

A copy by threads needs neither the processor nor the GPU. So rows may be sent ahead (`landings.py`), and pages may
leave (`begin_out`), while steps are enqueued and computed. The pinned buffers do not count as KV: they belong to the
eighth of the device that `kvasir doctor` leaves free.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import structlog

from inference_svc.kv.attention.fused import compiled, cuda_compiler
from inference_svc.kv.attention.kernels import KernelSource
from inference_svc.kv.host_copies import failed_copies

_LOG = structlog.get_logger(__name__)
T = TypeVar("T")
Units = npt.NDArray[np.generic]
Run: TypeAlias = tuple[int, int]  # an address on the device, and bytes
# An address on the device, one on the host or a function that fills a buffer, and how many bytes.
Piece: TypeAlias = tuple[int, int | Callable[[memoryview], None], int]
_PIECE_BYTES = 4 << 20
_THREADS = 6
_POINTER_FACTS = {"bytes": 12, "first": 11, "kind": 2, "device": 9, "managed": 8}  # names of ours, CUDA's numbers

_ADDRESS = KernelSource(
    "kv_address", ("given",), ("address",), "", "if (threadIdx.x == 0) { address[0] = (long long)given; }"
)


def to_device(rows: Sequence[Units]) -> mx.array:
    """Equal rows of uint16 units as one array [rows, units]. Evaluates."""
    if not rows or not copies_itself():
        return mx.stack([mx.array(row) for row in rows])
    return _copied_to_device(rows)


def copies_itself() -> bool:
    """Whether `to_device` copies by threads, and not as MLX does."""
    return _has_cuda() and _is_sound()


def _copied_to_device(rows: Sequence[Units]) -> mx.array:
    made = mx.zeros((len(rows), rows[0].size), dtype=mx.uint16)
    first = device_address(made)
    # Other work may still read memory that was free when this array was made.
    mx.synchronize()
    wait_for(begin_copies(rows, made, first))
    return made


def begin_copies(rows: Sequence[Units], target: mx.array, address: int) -> "list[Future[None]]":
    """Begin to copy equal rows to an array that lies at this address."""
    kept = [np.ascontiguousarray(row) for row in rows]
    pieces = [piece for number, row in enumerate(kept) for piece in _pieces(address + number * row.nbytes, row)]
    return begin_pieces(pieces, (kept, target))


def begin_pieces(pieces: Sequence[Piece], kept: object, most_bytes: int = 0) -> "list[Future[None]]":
    """See `_Copiers.begin`."""
    return _copiers().begin(pieces, kept, most_bytes)


def _pieces(address: int, row: Units) -> Iterator[Piece]:
    for begin in range(0, row.nbytes, _PIECE_BYTES):
        yield address + begin, row.ctypes.data + begin, min(_PIECE_BYTES, row.nbytes - begin)


def to_host(array: mx.array) -> Units:
    """A uint16 array's numbers. Evaluates."""
    mx.eval(array)
    if not array.size or not copies_itself():
        return np.asarray(array)
    return _copied_to_host(array)


def _copied_to_host(array: mx.array) -> Units:
    contiguous = mx.contiguous(array)
    found = np.empty(array.shape, dtype=np.uint16)
    address = device_address(contiguous)
    mx.synchronize()
    _check(_driver().cuMemcpyDtoH_v2(found.ctypes.data, ctypes.c_uint64(address), found.nbytes))
    return found


# --- from the device ---


def takes_out() -> bool:
    """Whether threads copy from the device too. On the MLX thread; from any thread see `failed_copies`."""
    return copies_itself() and not failed_copies.out.is_refused and _comes_back()


def begin_out(work: Callable[[], T]) -> "Future[T]":
    """Do `work` on a thread that may call `copy_out`."""
    try:
        return _copiers().begin_out(work)
    except RuntimeError as error:  # a thread could not begin: then no later one does
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed


def copy_out(runs: Sequence[Run], target: memoryview) -> None:
    """Copy runs of the device's bytes, one behind the other, to the beginning of `target`. They are written already,
    and stay until it returns. Raises RuntimeError if CUDA refuses.
    """
    _copiers().copy_out(runs, np.frombuffer(target, np.uint8).ctypes.data)


def device_address(array: mx.array) -> int:
    """Where an array lies on the device. It must be held as long as the address is used."""
    [address] = device_addresses([array])
    return address


def device_addresses(arrays: Sequence[mx.array]) -> list[int]:
    """As `device_address`, of many: each wait for the device takes the interpreter twice."""
    find = compiled(cuda_compiler, _ADDRESS)
    shape: dict[str, Any] = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    made = [
        find(inputs=[array], template=[], output_shapes=[(1,)], output_dtypes=[mx.int64], **shape)[0]
        for array in arrays
    ]
    mx.eval(made)
    return [int(address.item()) for address in made]  # type: ignore[arg-type]


class _Copiers:
    """Threads that copy pieces to the device, each by two pinned buffers in turn: one is filled while the other's bytes
    are on their way. They begin with the context of the thread that makes them, and touch nothing of MLX's.
    """

    def __init__(self) -> None:
        context, self._driver = ctypes.c_void_p(), _driver()
        _check(self._driver.cuCtxGetCurrent(ctypes.byref(context)))
        self._here = threading.local()
        self._threads = ThreadPoolExecutor(_THREADS, "host-copy", self._begin, (context,))

    def begin_out(self, work: Callable[[], T]) -> "Future[T]":
        return self._threads.submit(work)

    def copy_out(self, runs: Sequence[Run], target: int) -> None:
        """On one of the threads: see `copy_out`."""
        ways, driver = self._here.ways, self._driver
        coming: deque[tuple[ctypes.c_void_p, ctypes.c_void_p, int]] = deque()
        try:
            for number, load in enumerate(_loads(runs)):
                if len(coming) == len(ways):
                    target += _empty(driver, *coming.popleft(), target)
                stream, buffer = ways[number % len(ways)]
                filled = 0
                for source, size in load:
                    place = ctypes.c_void_p((buffer.value or 0) + filled)
                    state = driver.cuMemcpyDtoHAsync_v2(place, ctypes.c_uint64(source), ctypes.c_size_t(size), stream)
                    _check(state, partial(_memory_at, driver, source, size))
                    filled += size
                coming.append((stream, buffer, filled))
            while coming:
                target += _empty(driver, *coming.popleft(), target)
        finally:  # an error is no end: no byte may arrive when the buffer is another copy's
            states = [driver.cuStreamSynchronize(stream) for stream, _ in ways]
        for state in states:
            _check(state)

    def begin(self, pieces: Sequence[Piece], kept: object, most_bytes: int = 0) -> "list[Future[None]]":
        """Begin to copy. `kept`: holders of the bytes of both sides until all copies are done. `most_bytes`: of a
        piece, if they may have more than usual."""
        return [
            self._threads.submit(self._copy, pieces[first::_THREADS], kept, most_bytes) for first in range(_THREADS)
        ]

    def _begin(self, context: ctypes.c_void_p) -> None:
        driver, self._here.ways = self._driver, []
        _check(driver.cuCtxSetCurrent(context))
        for _ in range(2):
            stream, buffer = ctypes.c_void_p(), ctypes.c_void_p()
            _check(driver.cuStreamCreate(ctypes.byref(stream), 1))  # waits for no other stream
            _check(driver.cuMemHostAlloc(ctypes.byref(buffer), ctypes.c_size_t(_PIECE_BYTES), 0))
            self._here.ways.append((stream, buffer))

    @contextmanager
    def _ways(self, most_bytes: int) -> Iterator[Sequence[tuple[ctypes.c_void_p, ctypes.c_void_p]]]:
        """This thread's streams, each with a buffer for pieces of so many bytes."""
        kept, driver, larger = self._here.ways, self._driver, list[ctypes.c_void_p]()
        try:
            if most_bytes > _PIECE_BYTES:
                for _ in kept:
                    buffer = ctypes.c_void_p()
                    _check(driver.cuMemHostAlloc(ctypes.byref(buffer), ctypes.c_size_t(most_bytes), 0))
                    larger.append(buffer)
            yield [(stream, buffer) for (stream, _), buffer in zip(kept, larger, strict=True)] if larger else kept
        finally:
            for buffer in larger:
                driver.cuMemFreeHost(buffer)

    def _copy(self, pieces: Sequence[Piece], _kept: object, most_bytes: int = 0) -> None:
        driver = self._driver
        with self._ways(most_bytes) as ways:
            try:
                for number, (target, source, size) in enumerate(pieces):
                    stream, buffer = ways[number % 2]
                    _check(driver.cuStreamSynchronize(stream))
                    if isinstance(source, int):
                        ctypes.memmove(buffer, source, size)
                    else:
                        source(memoryview((ctypes.c_char * size).from_address(buffer.value or 0)).cast("B"))
                    _check(driver.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(target), buffer, ctypes.c_size_t(size), stream))
            finally:  # after an error too: no byte may arrive when the memory is another's
                states = [driver.cuStreamSynchronize(stream) for stream, _ in ways]
        for state in states:
            _check(state)


def _loads(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """The same bytes in their order, in lists that fit a pinned buffer."""
    load: list[Run] = []
    room = _PIECE_BYTES
    for first, size in runs:
        address, end = first, first + size
        while address < end:
            part = min(room, end - address)
            load.append((address, part))
            address, room = address + part, room - part
            if not room:
                yield load
                load, room = [], _PIECE_BYTES
    if load:
        yield load


def _empty(driver: ctypes.CDLL, stream: ctypes.c_void_p, buffer: ctypes.c_void_p, size: int, target: int) -> int:
    """Wait until a pinned buffer is filled, and move its bytes to their place. Returns how many."""
    _check(driver.cuStreamSynchronize(stream))
    ctypes.memmove(target, buffer, size)
    return size


def wait_for(copies: "Sequence[Future[None]]") -> None:
    """Returns when the device has all bytes. Raises RuntimeError if CUDA refused one."""
    for error in [copy.exception() for copy in copies]:  # of all: each still reads the host's bytes
        if error is not None:
            raise RuntimeError(f"copy to the device: {error}") from error


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
        if bool(mx.array_equal(arrived, mx.array(sent)).item()) and np.array_equal(found, sent):
            return True
        why = "other bytes arrived"
    except (OSError, RuntimeError) as error:  # no such library, or it refuses
        why = f"{type(error).__name__}: {error}"
    _LOG.warning("host_copy.refused", why=why)  # then MLX's way, which is slower
    return False


@cache
def _comes_back() -> bool:
    """Whether bytes that threads copy from the device are those that lie there. As of later copies, one that fails
    shows nothing. On an H200 only processes had one whose kernels had clusters, which MLX's kept graphs gave to others.
    """
    while not failed_copies.out.is_refused:
        before = failed_copies.out.in_a_row
        try:
            return _came_back()
        except (OSError, RuntimeError, AttributeError) as error:
            failed_copies.out.failed(error, before)
    return False


def _came_back() -> bool:
    sent = np.random.default_rng(1).integers(1, 1 << 16, (_PIECE_BYTES + 4096) // 2, dtype=np.uint16)
    given, found = mx.array(sent), np.zeros_like(sent)
    lying = given + 0  # memory as pages have it: MLX would take the managed one of `given` if nothing held that
    address, half = device_address(lying), sent.nbytes // 2
    mx.synchronize()
    runs = [(address, half), (address + half, sent.nbytes - half)]
    begin_out(lambda: copy_out(runs, found.data.cast("B"))).result()
    failed_copies.out.arrived()
    if not np.array_equal(found, sent):
        failed_copies.out.refuse(RuntimeError("other bytes arrived than lie on the device"))
    return not failed_copies.out.is_refused


@cache
def _has_cuda() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
    driver.cuMemcpyDtoHAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return driver


def _memory_at(driver: ctypes.CDLL, address: int, size: int) -> str:
    """Where these bytes lie, by the numbers of CUDA; nothing of their content."""
    found = dict[str, str | int]()
    for name, number in _POINTER_FACTS.items():
        value = ctypes.c_uint64(0)
        state = driver.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(address))
        found[name] = f"error {state}" if state else value.value
    first = found.pop("first")
    at = address - first if isinstance(first, int) else first
    return f", {size} bytes at {at} of {', '.join(f'{name} {value}' for name, value in found.items())}"


def _check(status: int, about: Callable[[], str] = str) -> None:
    if status:
        raise RuntimeError(f"CUDA refused a copy: error {status}{about()}")
