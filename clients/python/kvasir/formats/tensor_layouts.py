"""The tensors of a file of a block, tail or state by its KV identity: their names, types and shapes."""

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.layer_groups import layers_of

ITEM_BYTES = {"U32": 4, "F16": 2, "BF16": 2, "F32": 4}
_SCALE_DTYPE = {identity_pb2.SCALE_TYPE_FLOAT16: "F16", identity_pb2.SCALE_TYPE_BFLOAT16: "BF16"}
_STATE_DTYPE = {
    identity_pb2.TENSOR_TYPE_FLOAT32: "F32",
    identity_pb2.TENSOR_TYPE_FLOAT16: "F16",
    identity_pb2.TENSOR_TYPE_BFLOAT16: "BF16",
}
LAYOUTS = 64  # that are remembered


class HeaderError(ValueError):
    """A tensor file's header is not one that Kvasir would write. Names the found and the expected value."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file: its name, safetensors dtype, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The tensors of a file, in its order, and what follows from them: one object for all blocks of a model."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @cached_property
    def rows(self) -> set[int | None]:
        """Tokens of each tensor; None for one that is not `[kv_heads, rows, …]`."""
        return {rows_of(tensor) for tensor in self.tensors}

    @cached_property
    def text(self) -> str:
        """Names, types and shapes: equal texts are equal layouts."""
        return json.dumps(
            [[tensor.name, tensor.dtype, *tensor.shape] for tensor in self.tensors], separators=(",", ":")
        )


class RowLayouts:
    """Layouts of blocks and tails that differ in their rows alone. To make each of its tensors takes some ten times as
    long, and every turn ends with a tail of another length.
    """

    def __init__(self, one: Layout) -> None:
        """`one`: of any rows, all of whose tensors have them."""
        self._tensors = [(spec.name, spec.dtype, spec.shape[0], spec.shape[2]) for spec in one.tensors]
        self._factors: list[int] = []  # of the numbers in the text: each is so many times the rows
        entries, offset = [], 0
        for spec, (name, dtype, heads, width) in zip(one.tensors, self._tensors, strict=True):
            end = offset + spec.size_bytes // spec.shape[1]
            self._factors += (1, offset, end)
            entries.append(f'"{name}":{{"dtype":"{dtype}","shape":[{heads},%d,{width}],"data_offsets":[%d,%d]}}')
            offset = end
        self._form = ",".join(["", *entries]) + "}"

    def layout(self, rows: int) -> Layout:
        specs = [TensorSpec(name, dtype, (heads, rows, width)) for name, dtype, heads, width in self._tensors]
        return Layout(tuple(specs))

    def entries(self, rows: int) -> bytes:
        """As `tensor_entries` of that layout."""
        return (self._form % tuple([factor * rows for factor in self._factors])).encode()


def plain_policy(
    bits: int, scale_type: "identity_pb2.ScaleType" = identity_pb2.SCALE_TYPE_FLOAT16
) -> identity_pb2.KvPolicy:
    """As many bits for keys as for values, below 16 in groups of 64; keys are not rotated."""
    return identity_pb2.KvPolicy(
        key_bits=bits,
        value_bits=bits,
        group_size=64 if bits < 16 else 0,
        scale_type=scale_type,
        key_rotation=identity_pb2.KEY_ROTATION_NONE,
    )


def expected_tensors(identity: identity_pb2.KvIdentity, rows: int, group: int = 0) -> tuple[TensorSpec, ...]:
    """Tensors of a block or tail with `rows` tokens: every layer of the group, in order; none for a foreign group."""
    return tuple(spec for index in layers_of(identity, group) for spec in layer_tensors(identity, index, rows))


@lru_cache(LAYOUTS)
def row_layouts(identity: bytes, group: int) -> RowLayouts:
    """Those of a group's blocks and tails. `identity`: a KvIdentity, serialized."""
    return RowLayouts(Layout(expected_tensors(identity_pb2.KvIdentity.FromString(identity), BLOCK_TOKENS, group)))


def expected_state_tensors(identity: identity_pb2.KvIdentity) -> tuple[TensorSpec, ...]:
    """The tensors of all recurrent layers. Raises HeaderError where the identity does not describe their states."""
    specs: list[TensorSpec] = []
    for index, layer in enumerate(identity.layers):
        if layer.kind == identity_pb2.LAYER_KIND_STATE:
            specs += recurrent_tensors(layer, index)
    return tuple(specs)


def recurrent_tensors(layer: identity_pb2.LayerLayout, index: int) -> list[TensorSpec]:
    """One recurrent layer's state, as `layer_N_state_M`. Raises HeaderError when the layout does not describe it."""
    if not layer.state_tensors:
        raise HeaderError(f"layer {index}: the layout does not describe its recurrent state")
    return [
        TensorSpec(f"layer_{index}_state_{part}", _STATE_DTYPE[tensor.type], tuple(tensor.shape))
        for part, tensor in enumerate(layer.state_tensors)
    ]


def layer_tensors(identity: identity_pb2.KvIdentity, index: int, rows: int) -> list[TensorSpec]:
    """K and V of one layer for `rows` tokens, as `[kv_heads, rows, …]`."""
    layer, policy = identity.layers[index], identity.policy
    specs: list[TensorSpec] = []
    for letter, dim, bits in (("k", layer.key_dim, policy.key_bits), ("v", layer.value_dim, policy.value_bits)):
        if dim:
            name = f"layer_{index}_{letter}"
            is_exact = bits == 16 or index in policy.exact_layers
            specs += (
                _exact(name, layer.kv_heads, rows, dim, policy)
                if is_exact
                else _quantized(name, layer.kv_heads, rows, dim, bits, policy)
            )
    return specs


def _exact(name: str, heads: int, rows: int, dim: int, policy: identity_pb2.KvPolicy) -> list[TensorSpec]:
    return [TensorSpec(name, _SCALE_DTYPE[policy.scale_type], (heads, rows, dim))]


def _quantized(
    name: str, heads: int, rows: int, dim: int, bits: int, policy: identity_pb2.KvPolicy
) -> list[TensorSpec]:
    scale_shape = (heads, rows, dim // policy.group_size)
    scale_dtype = _SCALE_DTYPE[policy.scale_type]
    return [
        TensorSpec(f"{name}_weights", "U32", (heads, rows, dim * bits // 32)),
        TensorSpec(f"{name}_scales", scale_dtype, scale_shape),
        TensorSpec(f"{name}_biases", scale_dtype, scale_shape),
    ]


def rows_of(tensor: TensorSpec) -> int | None:
    return None if "_state_" in tensor.name or len(tensor.shape) != 3 else tensor.shape[1]
