"""Copies blocks between vLLM's tensors and the store, for the worker of vLLM's connector."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue

import torch

from kvasir.store_for_vllm.reading import Load, Read, Reading, warning
from kvasir.store_for_vllm.stored_kv import StoredKv
from kvasir.waits import SILENCE_S

_LOG = logging.getLogger("kvasir.store_for_vllm")


@dataclass(frozen=True, slots=True)
class Save:
    """Tokens of whole blocks, and vLLM's blocks for the new ones by number."""

    tokens: list[int]
    places: dict[int, list[int]]


class Worker:
    """Copies blocks between vLLM's tensors and those that a thread reads from the store, or another one sends to it."""

    def __init__(self, stored: StoredKv, layers: Sequence[str], blocks: int, waiting_mib: int) -> None:
        self._stored = stored
        self._names = layers
        self._blocks = blocks
        self._layers: list[torch.Tensor] = []
        self._left: dict[str, set[int]] = {}  # of requests whose blocks are read: vLLM's that have not come
        self._failed: set[int] = set()
        self._reading = Reading(stored)
        self._waiting: Queue[_Made | None] = Queue()
        self._most_bytes = waiting_mib << 20
        self._waiting_bytes = 0
        self._lock = threading.Lock()  # of `_waiting_bytes`
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Each layer as `[vLLM's blocks, …]` of bytes, the first axis vLLM's."""
        self._layers = [caches[name].unflatten(0, (self._blocks, -1)) for name in self._names]

    def load(self, loads: Mapping[str, Load]) -> None:
        for name, load in loads.items():
            self._left[name] = {place for places in load.places.values() for place in places if place is not None}
            self._reading.ask(name, load)

    def _copy(self, block: Read) -> None:
        for layer, data in zip(self._layers, block.layers, strict=True):
            _write(layer, block.places, data)
        self._left[block.name] -= {place for place in block.places if place is not None}

    def save(self, saves: Mapping[str, Save]) -> None:
        """Copy new blocks. vLLM may write into its blocks again as soon as this returns."""
        for save in saves.values():
            size = sum(len(places) * layer[0].nbytes for places in save.places.values() for layer in self._layers)
            if not self._count(size):
                _LOG.warning("%d tokens are not kept: the store is slower than vLLM (waiting_mib)", len(save.tokens))
                continue  # the request's next blocks lack these, and are left out
            blocks = {
                number: [_bytes(layer[places]) for layer in self._layers] for number, places in save.places.items()
            }
            self._waiting.put(_Made(save.tokens, blocks, size))

    def _count(self, size: int) -> bool:
        """Add to the bytes that wait, unless they would be too many."""
        with self._lock:
            if fits := self._waiting_bytes + size <= self._most_bytes:
                self._waiting_bytes += size
            return fits

    def take_loaded(self) -> set[str]:
        """Copy the blocks that have come. Returns requests of which no more will."""
        loaded = set[str]()
        for _ in range(self._reading.blocks.maxsize):
            try:
                block = self._reading.blocks.get_nowait()
            except Empty:
                break
            if block.layers:
                with warning("a stored block is computed again"):
                    self._copy(block)
            else:
                self._failed |= self._left.pop(block.name)
                loaded.add(block.name)
        return loaded

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Wait until all is stored, at most half a minute."""
        self._waiting.put(None)
        self._sender.join(SILENCE_S)

    def _send_all(self) -> None:
        while (made := self._waiting.get()) is not None:
            with warning("a prompt is not kept"):
                self._stored.save(made.tokens, made.blocks)
            self._count(-made.size_bytes)


@dataclass(frozen=True, slots=True)
class _Made:
    """Tokens of whole blocks, and the layers of the new ones by number."""

    tokens: list[int]
    blocks: dict[int, list[bytes]]
    size_bytes: int


def _write(layer: torch.Tensor, places: Sequence[int | None], data: memoryview) -> None:
    rows = torch.frombuffer(bytearray(data), dtype=layer.dtype).view(len(places), *layer.shape[1:])
    for row, place in zip(rows, places, strict=True):
        if place is not None:
            layer[place].copy_(row)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().cpu().view(torch.uint8).numpy())
