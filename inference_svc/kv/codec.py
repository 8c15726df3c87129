"""How a KV policy stores rows of K or V: quantized in groups along the head, plain or rotated, or exact in 16 bits.
Each row is encoded by itself, as `part_count` arrays; files hold the bytes of memory. `problem` explains why rows of a
head dimension cannot be stored.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import InvalidArgument

# The arrays that rows are stored in, [1, kv_heads, rows, …]: each is a tensor of a file.
EncodedRows = tuple[mx.array, ...]

SCALE_TYPES = {identity_pb2.SCALE_TYPE_FLOAT16: mx.float16, identity_pb2.SCALE_TYPE_BFLOAT16: mx.bfloat16}
QUANTIZED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class QuantizedCodec:
    part_count: ClassVar[int] = 3
    bits: int
    group_size: int
    scale_type: mx.Dtype

    def problem(self, dim: int) -> str:
        if dim % self.group_size:
            return f"head dimension {dim} is no multiple of the group size {self.group_size}"
        return ""

    def encode(self, rows: mx.array) -> EncodedRows:
        codes, scales, biases = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        return codes, scales.astype(self.scale_type), biases.astype(self.scale_type)

    def decode(self, parts: EncodedRows, dtype: mx.Dtype) -> mx.array:
        # Casting the few scales first is ten times faster on a CPU than asking dequantize for another type.
        codes, scales, biases = parts[0], parts[1].astype(dtype), parts[2].astype(dtype)
        if mx.default_device().type == mx.DeviceType.cpu:
            return _dequantized(codes, scales, biases, self.group_size, self.bits)
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)


def _dequantized(codes: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """`mx.dequantize` to the bit, of 4 or 8 bits, for a CPU, where MLX's own takes 1.5 to 2 times as long."""
    values = codes.view(mx.uint8)  # the first code is in the lowest bits, and words are little-endian
    if bits == 4:
        values = mx.stack([values & 0x0F, values >> 4], axis=-1)
    groups = values.reshape(*scales.shape, group_size).astype(scales.dtype)
    rows = groups * scales[..., None] + biases[..., None]
    return rows.reshape(*scales.shape[:-1], scales.shape[-1] * group_size)


@dataclass(frozen=True, slots=True)
class RotatedCodec:
    """Quantization after a Hadamard rotation along the head, as in QuaRot. A channel much larger than its neighbours
    would take its group's whole range; the rotation spreads it over all channels. Decoding rotates back, so attention
    and RoPE are unchanged. The rotation is orthonormal and its own inverse.
    """

    part_count: ClassVar[int] = QuantizedCodec.part_count
    inner: QuantizedCodec

    def problem(self, dim: int) -> str:
        # MLX has transforms of a few other sizes, but not all of them are their own inverse. For sizes that it lacks,
        # its CPU back-end writes outside its buffers instead of raising.
        if dim < 2 or dim & (dim - 1):
            return f"head dimension {dim} is no power of two, which the Hadamard rotation of keys needs"
        return self.inner.problem(dim)

    def encode(self, rows: mx.array) -> EncodedRows:
        # In 32 bits: a sum of `dim` values in 16 bits would round before the quantization does.
        return self.inner.encode(mx.hadamard_transform(rows.astype(mx.float32)))

    def decode(self, parts: EncodedRows, dtype: mx.Dtype) -> mx.array:
        return mx.hadamard_transform(self.inner.decode(parts, mx.float32)).astype(dtype)


@dataclass(frozen=True, slots=True)
class ExactCodec:
    part_count: ClassVar[int] = 1
    scale_type: mx.Dtype

    def problem(self, dim: int) -> str:  # noqa: ARG002 - as the others have it; 16 bits store any dimension
        return ""

    def encode(self, rows: mx.array) -> EncodedRows:
        return (rows.astype(self.scale_type),)

    def decode(self, parts: EncodedRows, dtype: mx.Dtype) -> mx.array:
        return parts[0].astype(dtype)


Codec: TypeAlias = QuantizedCodec | RotatedCodec | ExactCodec


def layer_codecs(policy: identity_pb2.KvPolicy, layer: int) -> tuple[Codec, Codec]:
    """Codecs of one layer's K and V. Raises InvalidArgument for a policy that this engine does not support."""
    if policy.key_rotation not in (identity_pb2.KEY_ROTATION_NONE, identity_pb2.KEY_ROTATION_HADAMARD):
        raise InvalidArgument("key rotation: expected none or Hadamard", field="policy.key_rotation")
    if policy.scale_type not in SCALE_TYPES:
        raise InvalidArgument("scale type: expected float16 or bfloat16", field="policy.scale_type")
    keys = _codec(policy, layer, policy.key_bits, "key_bits")
    if policy.key_rotation == identity_pb2.KEY_ROTATION_HADAMARD:
        if policy.key_bits == 16:
            raise InvalidArgument("key rotation: keys of 16 bits are stored as they are", field="policy.key_rotation")
        if isinstance(keys, QuantizedCodec):
            keys = RotatedCodec(keys)
    return keys, _codec(policy, layer, policy.value_bits, "value_bits")


def _codec(policy: identity_pb2.KvPolicy, layer: int, bits: int, field: str) -> Codec:
    scale_type = SCALE_TYPES[policy.scale_type]
    if bits == 16 or layer in policy.exact_layers:
        return ExactCodec(scale_type)
    if bits not in QUANTIZED_BITS:
        raise InvalidArgument(f"{field}: expected 4, 8 or 16, got {bits}", field=f"policy.{field}")
    if policy.group_size not in (32, 64, 128):
        raise InvalidArgument(f"group_size: expected 32, 64 or 128, got {policy.group_size}", field="policy.group_size")
    return QuantizedCodec(bits, policy.group_size, scale_type)
