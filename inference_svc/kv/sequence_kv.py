"""All layers' KV of one sequence: cut, fork, put back, and tensor files."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from kvasir.block_file import FileIdentity, TensorSpec, encode, expected_tensors
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.capacity import capacity_rows
from inference_svc.kv.codec import Parts, layer_codecs
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.tensor_files import Array, CheckedFile, gathered


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows taken out of a sequence so that they can be put back, layer by layer, K then V."""

    start: int
    rows: tuple[Parts, ...]


class SequenceKV:
    """KV of the first `length` tokens of a sequence."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        self.layers = list(layers)

    @classmethod
    def empty(cls, policy: identity_pb2.KvPolicy, layer_count: int) -> "SequenceKV":
        return cls([LayerKV(*layer_codecs(policy, index)) for index in range(layer_count)])

    @classmethod
    def from_files(cls, identity: identity_pb2.KvIdentity, files: Sequence[CheckedFile], keep: int) -> "SequenceKV":
        """The first `keep` tokens of files that cover them from position 0.

        Rows go straight to their places in the buffers, not through a long concatenation. Raises DataLoss before MLX
        sees a value that is not finite.
        """
        kv = cls.empty(identity.policy, len(identity.layers))
        buffers = gathered(identity, files, keep, capacity_rows(keep))
        arrays = iter([_to_mlx(buffer, spec) for spec, buffer in buffers])
        for layer in kv.layers:
            layer.offset = keep
            for buffer in layer.buffers:
                buffer.parts = tuple(next(arrays) for _ in range(buffer.codec.part_count))
        mx.eval([layer.state for layer in kv.layers])
        return kv

    @property
    def length(self) -> int:
        return self.layers[0].offset

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [array for layer in self.layers for array in layer.state]

    @property
    def allocated_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def trim_to(self, length: int) -> None:
        """Forget what lies behind `length` tokens. Rows are freed, not erased: nothing reads them."""
        for layer in self.layers:
            layer.trim(layer.offset - length)

    def fork(self) -> "SequenceKV":
        """The same memory; rows are shared until one side writes."""
        return SequenceKV([layer.fork() for layer in self.layers])

    def saved_rows(self, start: int) -> SavedRows:
        """Copies of the rows from `start` on."""
        rows = tuple(
            tuple(mx.contiguous(part) for part in buffer.read(start, layer.offset))
            for layer in self.layers
            for buffer in layer.buffers
        )
        mx.eval(rows)
        return SavedRows(start, rows)

    def put_back(self, saved: SavedRows) -> None:
        """Make the sequence again what it was when the rows were saved, to the bit."""
        rows = iter(saved.rows)
        for layer in self.layers:
            for buffer in layer.buffers:
                parts = next(rows)
                buffer.write(saved.start, parts)
            layer.offset = saved.start + parts[0].shape[2]
        mx.eval(self.state)

    def to_file(self, identity: identity_pb2.KvIdentity, file_identity: FileIdentity) -> bytes:
        """Tensor file of rows [start, start + tokens) as the file's identity says. The sequence must be evaluated."""
        start, stop = file_identity.start, file_identity.start + file_identity.tokens
        if stop > self.length:
            raise ValueError(f"rows: expected at most {self.length}, asked for [{start}, {stop})")
        parts = [data for layer in self.layers for buffer in layer.buffers for data in buffer.to_bytes(start, stop)]
        return encode(file_identity, list(zip(expected_tensors(identity, file_identity.tokens), parts, strict=True)))


def _to_mlx(buffer: Array, spec: TensorSpec) -> mx.array:
    array = mx.array(buffer)
    return array.view(mx.bfloat16) if spec.dtype == "BF16" else array
