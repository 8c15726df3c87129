"""All layers' KV of one sequence: how it is cut, forked, put back, and turned into tensor files.

Layers that keep all their tokens can be cut anywhere. The other layers can only go back to a *rewind point*: a moment
at which they were copied whole. So a sequence that has such layers goes back to its rewind points or to its beginning,
and nowhere else.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import FileIdentity, TensorSpec, encode, expected_state_tensors, expected_tensors

from inference_svc.kv.capacity import capacity_rows
from inference_svc.kv.codec import EncodedRows
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.layers import AnyLayerKV, StatefulKV, new_layer
from inference_svc.kv.tensor_files import Array, CheckedFile, gathered, state_arrays


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """The layers that do not keep all tokens, as they were after `tokens` tokens. These copies are never written."""

    tokens: int
    layers: tuple[StatefulKV, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows taken out of a sequence so that they can be put back: from `start` on, layer by layer, K then V. With them
    the rewind points of that moment.
    """

    start: int
    rows: tuple[EncodedRows, ...]
    points: tuple[RewindPoint, ...] = ()


class SequenceKV:
    """KV of the first `length` tokens of a sequence."""

    def __init__(self, layers: Sequence[AnyLayerKV], points: Iterable[RewindPoint] = ()) -> None:
        self.layers = list(layers)
        self._points = list(points)

    @classmethod
    def of(cls, identity: identity_pb2.KvIdentity) -> "SequenceKV":
        """An empty sequence of any layout."""
        return cls([new_layer(identity, index) for index in range(len(identity.layers))])

    @classmethod
    def from_files(
        cls,
        identity: identity_pb2.KvIdentity,
        files: Sequence[CheckedFile],
        keep: int,
        states: Sequence[CheckedFile] = (),
    ) -> "SequenceKV":
        """The first `keep` tokens of files that cover them from position 0, with its rewind points. If the model has
        states, the last rewind point is at `keep`.

        Rows go straight to their places in the buffers, not through a long concatenation. Raises DataLoss before MLX
        sees a value that is not finite.
        """
        kv = cls.of(identity)
        # Both are read and checked before MLX is given anything.
        buffers = gathered(identity, files, keep, capacity_rows(keep)) if kv.row_layers else []
        tensors = [(file.header.identity.tokens, state_arrays(identity, file)) for file in states]
        arrays = iter([_to_mlx(buffer, spec) for spec, buffer in buffers])
        for layer in kv.row_layers:
            layer.offset = keep
            for buffer in layer.buffers:
                buffer.parts = tuple(next(arrays) for _ in range(buffer.codec.part_count))
        kv._points = [kv._point(tokens, [_to_mlx(tensor, spec) for spec, tensor in found]) for tokens, found in tensors]
        if kv._points:
            kv._become(kv._points[-1].layers)
        mx.eval(kv.state)
        return kv

    # --- what it is ---

    @property
    def row_layers(self) -> list[LayerKV]:
        """The layers that keep all their tokens."""
        return [layer for layer in self.layers if isinstance(layer, LayerKV)]

    @property
    def stateful_layers(self) -> list[StatefulKV]:
        """The layers that do not keep all their tokens."""
        return [layer for layer in self.layers if not isinstance(layer, LayerKV)]

    @property
    def length(self) -> int:
        """Tokens that blocks can be made of. Layers that do not keep all tokens may have been set back further."""
        return (self.row_layers or self.layers)[0].offset

    @property
    def rewind_points(self) -> tuple[int, ...]:
        """Token counts that the sequence can go back to, ascending. Without stateful layers it can go to any count."""
        return tuple(point.tokens for point in self._points)

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [array for layer in self.layers for array in layer.state]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all arrays. Layers that still share the last rewind point's arrays are counted once, there."""
        at_point = self._points[-1].tokens if self._points else -1
        live = sum(layer.nbytes for layer in self.layers if isinstance(layer, LayerKV) or layer.offset != at_point)
        return live + sum(point.nbytes for point in self._points)

    # --- back in time ---

    def mark(self) -> None:
        """Make a rewind point of the present moment. Evaluates. Without effect if every layer keeps all its tokens."""
        if self.stateful_layers and self.length not in self.rewind_points:
            layers = tuple(layer.compacted() for layer in self.stateful_layers)
            mx.eval([layer.state for layer in layers])
            self._points.append(RewindPoint(self.length, layers))
            # From here on the layers share the copies, so that the arrays that these were cut from can be freed.
            self._become(layers)

    def keep_rewind_points(self, tokens: Collection[int]) -> None:
        """Forget all rewind points except those at these token counts."""
        self._points = [point for point in self._points if point.tokens in tokens]

    def start_before(self, length: int) -> int:
        """The largest token count, at most `length`, from which the next token can be computed."""
        if self.can_go_on_from(length):
            return length
        return max((point for point in self.rewind_points if point <= length), default=0)

    def can_go_on_from(self, length: int) -> bool:
        """Whether after `trim_to(length)` the next token can be computed."""
        return not self.stateful_layers or length == 0 or length in self.rewind_points or self._is_whole_at(length)

    def trim_to(self, length: int) -> None:
        """Forget everything behind `length` tokens. Rows are freed, not erased: nothing reads them.

        Layers that do not keep all tokens go back to the last rewind point at or before `length`. If that is earlier,
        the sequence can be stored but not continued: trim it first to a length for which `can_go_on_from` holds.
        """
        self._points = [point for point in self._points if point.tokens <= length]
        if self.stateful_layers and not self._is_whole_at(length):
            self._become(self._points[-1].layers if self._points else None)
        for layer in self.row_layers:
            layer.trim(layer.offset - length)

    def fork(self) -> "SequenceKV":
        """A second sequence with the same KV. Rows are shared until one side writes, rewind points for ever."""
        return SequenceKV([layer.fork() for layer in self.layers], self._points)

    def fork_of(self, length: int) -> "SequenceKV":
        """A fork of the first `length` tokens, with buffers of that size: writing to it copies no more than that.
        Evaluates.
        """
        forked = self.fork()
        forked.trim_to(length)
        forked.release_spare()
        mx.eval(forked.state)
        return forked

    def release_spare(self) -> None:
        """Shrink the buffers to what the tokens need. Does not evaluate: a cell that was left half-way stays so."""
        for layer in self.row_layers:
            for buffer in layer.buffers:
                buffer.shrink(layer.offset)

    def saved_rows(self, start: int) -> SavedRows:
        """Copies of the rows from `start` on, and the rewind points: everything that a turn from there may change."""
        rows = tuple(
            tuple(mx.contiguous(part) for part in buffer.read(start, layer.offset))
            for layer in self.row_layers
            for buffer in layer.buffers
        )
        mx.eval(rows)
        return SavedRows(start, rows, tuple(self._points))

    def put_back(self, saved: SavedRows) -> None:
        """Make the sequence what it was when the rows were saved, to the bit. Layers that do not keep all tokens go
        back to its last rewind point.
        """
        rows = iter(saved.rows)
        for layer in self.row_layers:
            for buffer in layer.buffers:
                parts = next(rows)
                buffer.write(saved.start, parts)
            layer.offset = saved.start + parts[0].shape[2]
        self._points = list(saved.points)
        self._become(self._points[-1].layers if self._points else None)
        mx.eval(self.state)

    # --- files ---

    def to_file(self, identity: identity_pb2.KvIdentity, file_identity: FileIdentity) -> bytes:
        """The tensor file of rows [start, start + tokens), or of the state at a rewind point, as the file's identity
        says. The sequence must be evaluated. Raises ValueError for rows or rewind points that it does not have.
        """
        if file_identity.kind == "state":
            return self._state_file(identity, file_identity)
        start, stop = file_identity.start, file_identity.start + file_identity.tokens
        if stop > self.length:
            raise ValueError(f"rows: expected at most {self.length}, asked for [{start}, {stop})")
        parts = [data for layer in self.row_layers for buffer in layer.buffers for data in buffer.to_bytes(start, stop)]
        return encode(file_identity, list(zip(expected_tensors(identity, file_identity.tokens), parts, strict=True)))

    def _state_file(self, identity: identity_pb2.KvIdentity, file_identity: FileIdentity) -> bytes:
        point = next((point for point in self._points if point.tokens == file_identity.tokens), None)
        if point is None:
            raise ValueError(f"state: rewind points are {self.rewind_points}, asked for {file_identity.tokens}")
        parts = [data for layer in point.layers for data in layer.to_bytes()]
        specs = expected_state_tensors(identity, file_identity.tokens)
        return encode(file_identity, list(zip(specs, parts, strict=True)))

    def _point(self, tokens: int, arrays: Sequence[mx.array]) -> RewindPoint:
        """The rewind point that a state file's tensors hold."""
        rest, layers = list(arrays), []
        for layer in self.stateful_layers:
            count, made = layer.part_count_after(tokens), layer.empty_like()
            made.put_parts(tokens, rest[:count])
            layers.append(made)
            del rest[:count]
        return RewindPoint(tokens, tuple(layers))

    def _is_whole_at(self, length: int) -> bool:
        return all(layer.offset == length for layer in self.stateful_layers)

    def _become(self, stateful: Sequence[StatefulKV] | None) -> None:
        """Replace the stateful layers by forks of these, or by empty ones."""
        forks = iter([layer.fork() if stateful else layer.empty_like() for layer in stateful or self.stateful_layers])
        self.layers = [layer if isinstance(layer, LayerKV) else next(forks) for layer in self.layers]


def _to_mlx(buffer: Array, spec: TensorSpec) -> mx.array:
    array = mx.array(buffer)
    return array.view(mx.bfloat16) if spec.dtype == "BF16" else array
