"""Whether stored keys are what a KV policy says, checked in the buffers rather than by asking the codec.

Shapes and types show bits and groups, but a rotated key has the shape of a plain one. So the stored arrays are decoded
with MLX's own de-quantization and compared with the keys that the model computed, plain and rotated.
"""

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.window_kv import WindowKV


def keys_are_stored_as_said(layer: LayerKV | WindowKV, policy: identity_pb2.KvPolicy, keys: mx.array) -> bool:
    """Whether the layer stores `keys` [1, kv_heads, rows, dim] rotated if and only if the policy says so, and shows
    them to attention plain. `keys` are those that it was given; shapes are not checked.
    """
    given = keys.astype(mx.float32)
    parts = layer.keys.read(0, layer.offset)
    is_quantized = len(parts) > 1
    says_rotated = is_quantized and policy.key_rotation == identity_pb2.KEY_ROTATION_HADAMARD
    stored = _plain_values(parts, policy) if is_quantized else parts[0].astype(mx.float32)
    if _is_rotated(stored, given) != says_rotated:
        return False
    return not _is_rotated(layer.keys.decoded(layer.offset, mx.float32), given)


def _plain_values(parts: tuple[mx.array, ...], policy: identity_pb2.KvPolicy) -> mx.array:
    codes, scales, biases = parts
    return mx.dequantize(
        codes,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=policy.group_size,
        bits=policy.key_bits,
    )


def _is_rotated(values: mx.array, given: mx.array) -> bool:
    """Whether `values` are nearer to the rotated keys than to the plain ones. Deeper layers compute with quantized KV,
    so neither fits exactly.
    """
    dim = given.shape[-1]
    if dim & (dim - 1):
        return False  # no such rotation exists, and for such a size MLX writes outside its buffers
    return bool((_distance(values, mx.hadamard_transform(given)) < _distance(values, given)).item())


def _distance(one: mx.array, two: mx.array) -> mx.array:
    return mx.square(one - two).sum()
