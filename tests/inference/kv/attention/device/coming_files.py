"""CUDA's copies as far as a CPU can play them: threads copy to where an array lies, and from there, when they may."""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.host_copies import failed_copies, from_files, host_copy, landings
from inference_svc.kv.pages import pool


class PlayedDriver(SimpleNamespace):
    """The functions of `libcuda` that copies call. While `gate` is closed, nothing arrives. What leaves the device is
    read as late as CUDA may: when its stream is waited for.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error = 0  # what a copy answers
        self.errors_left = -1  # so often; -1: always
        self.copies = 0
        self._buffers: list[Any] = []
        self._streams = count(1)
        self._begun: dict[int, list[Callable[[], object]]] = defaultdict(list)  # by stream
        super().__init__(
            cuCtxGetCurrent=lambda _context: 0,
            cuCtxSetCurrent=lambda _context: 0,
            cuStreamCreate=self._new_stream,
            cuStreamSynchronize=self._wait,
            cuMemHostAlloc=self._allocate,
            cuMemFreeHost=self._free,
            cuMemcpyHtoDAsync_v2=self._copy,
            cuMemcpyDtoH_v2=_back,
            cuMemcpyDtoHAsync_v2=self._begin_out,
            cuPointerGetAttribute=_tell,
        )

    def _new_stream(self, stream: Any, _flags: int) -> int:
        stream._obj.value = next(self._streams)
        return 0

    def _begin_out(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        self.copies += 1
        self._begun[stream.value].append(lambda: ctypes.memmove(target.value, source.value, size.value))
        if self.error and self.errors_left:
            self.errors_left -= 1
            return self.error
        return 0

    def _wait(self, stream: Any) -> int:
        begun = self._begun.pop(stream.value, [])
        if begun:
            self.gate.wait(5)
        for copy in begun:
            copy()
        return 0

    def _allocate(self, buffer: Any, size: Any, _flags: int) -> int:
        self._buffers.append(ctypes.create_string_buffer(size.value))
        buffer._obj.value = ctypes.addressof(self._buffers[-1])
        return 0

    def _free(self, buffer: Any) -> int:
        """Whoever writes there from now on writes to nobody's memory: it is kept, and full of other bytes."""
        [freed] = [each for each in self._buffers if ctypes.addressof(each) == buffer.value]
        ctypes.memset(freed, 0xA5, len(freed))
        return 0

    def _copy(self, target: Any, source: Any, size: Any, _stream: object) -> int:
        self.gate.wait(5)
        self.copies += 1
        ctypes.memmove(target.value, source.value, size.value)
        return self.error


def _tell(fact: Any, number: int, address: Any) -> int:
    """As of an allocation of managed memory that begins 100 bytes before each address."""
    fact._obj.value = {2: 2, 8: 1, 9: 0, 11: address.value - 100, 12: 1 << 20}[number]
    return 0


def _back(target: int, source: Any, size: int) -> int:
    ctypes.memmove(target, source.value, size)
    return 0


def play(monkeypatch: pytest.MonkeyPatch, landing_bytes: int = 1 << 20) -> PlayedDriver:
    """Take this CPU for a GPU that CUDA copies to."""
    driver, copiers, room = PlayedDriver(), [], landings.Landings()
    monkeypatch.setattr(host_copy, "_driver", lambda: driver)
    monkeypatch.setattr(host_copy, "_has_cuda", lambda: True)
    monkeypatch.setattr(host_copy, "_is_sound", lambda: True)
    monkeypatch.setattr(host_copy, "_comes_back", lambda: True)
    monkeypatch.setattr(failed_copies, "out", failed_copies.FailedCopies())
    for module in (host_copy, landings):
        monkeypatch.setattr(module, "device_address", _address)
    for module in (from_files, host_copy, pool):
        monkeypatch.setattr(module, "device_addresses", lambda arrays: [*map(_address, arrays)])
    monkeypatch.setattr(landings, "LANDING_BYTES", landing_bytes)
    monkeypatch.setattr(landings, "_landings", lambda: room)

    def only() -> Any:
        copiers.extend([] if copiers else [host_copy._Copiers()])
        return copiers[0]

    monkeypatch.setattr(host_copy, "_copiers", only)
    return driver


def _address(array: mx.array) -> int:
    mx.eval(array)
    return int(np.asarray(array).ctypes.data)
