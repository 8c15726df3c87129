"""The batch of all sequences that are decoding, one token each per forward pass."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from inference_svc.kv.batch.batch_kv import BatchLayerKV
from inference_svc.kv.batch.batch_state import BatchStateKV
from inference_svc.kv.batch.batch_window import BatchWindowKV
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.layers import AnyLayerKV
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.state_kv import StateKV
from inference_svc.kv.window_kv import WindowKV

BatchedLayer: TypeAlias = BatchLayerKV | BatchWindowKV | BatchStateKV


class DecodeBatch:
    """Sequences by slot. Each keeps its own buffers while it is in the batch, but they lag behind until it is flushed.

    `forward` maps tokens [slots, 1] and the layers' batched caches to logits [slots, 1, vocabulary].
    `decoded_budget` bounds the values in the decoded copies of all layers together; above it, rows are decoded on read.
    """

    def __init__(self, forward: Callable[[mx.array, list[Any]], mx.array], decoded_budget: int) -> None:
        self._forward = forward
        self._decoded_budget = decoded_budget
        self._sequences: list[SequenceKV] = []
        self._layers: list[Any] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, kv: SequenceKV) -> bool:
        return any(kv is other for other in self._sequences)

    @property
    def sequences(self) -> Sequence[SequenceKV]:
        """In the order of slots."""
        return self._sequences

    @property
    def scratch_bytes(self) -> int:
        """Bytes that the batch holds besides its sequences' own buffers."""
        return sum(layer.scratch_bytes for layer in self._layers)

    def join(self, kv: SequenceKV) -> None:
        """Add a sequence. It must not be used elsewhere until it leaves."""
        if not self._layers:
            self._layers = [batched_form(layer) for layer in kv.layers]
        for batch, layer in zip(self._layers, kv.layers, strict=True):
            batch.join(layer)
        self._sequences.append(kv)

    def leave(self, kv: SequenceKV) -> None:
        """Take a sequence out, with all its rows in its own buffers. Without effect if it is not in the batch."""
        if kv not in self:
            return
        slot = self._slot(kv)
        for batch in self._layers:
            batch.leave(slot)
        last = self._sequences.pop()
        if last is not kv:
            self._sequences[slot] = last
        mx.eval(kv.state)

    def flush(self, kv: SequenceKV) -> None:
        """Bring a sequence's own buffers up to date, so that they can be read. It stays in the batch."""
        if kv in self:
            for batch in self._layers:
                batch.flush(self._slot(kv))
            mx.eval(kv.state)

    def step(self, token_ids: Sequence[int]) -> mx.array:
        """Compute one more token of each sequence; returns logits [slots, vocabulary], not evaluated."""
        self._stay_within_budget()
        logits = self._forward(mx.array([[token] for token in token_ids], dtype=mx.uint32), self._layers)
        return logits[:, -1]

    def discard(self) -> list[SequenceKV]:
        """Drop all scratch after a failed step. The layers of the returned sequences may disagree on their length."""
        sequences, self._sequences, self._layers = self._sequences, [], []
        return sequences

    def _slot(self, kv: SequenceKV) -> int:
        return next(slot for slot, other in enumerate(self._sequences) if other is kv)

    def _stay_within_budget(self) -> None:
        is_kept = sum(layer.decoded_values for layer in self._layers) <= self._decoded_budget
        for layer in self._layers:
            layer.keep_decoded(is_kept)


def batched_form(layer: AnyLayerKV) -> BatchedLayer:
    """An empty batch for layers like this one."""
    match layer:
        case LayerKV():
            return BatchLayerKV()
        case WindowKV():
            return BatchWindowKV()
        case StateKV():
            return BatchStateKV()
