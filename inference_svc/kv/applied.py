"""Whether stored keys are what a KV policy says: looked at in the buffers, not in what the codec says of itself.

Shapes and types tell bits and groups, but a rotated key has the shape of a plain one. So the parts are read with
MLX's own de-quantization and held against the keys that the model computed, plain and rotated.
"""

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.window_kv import WindowKV


def keys_are_stored_as_said(layer: LayerKV | WindowKV, policy: identity_pb2.KvPolicy, keys: mx.array) -> bool:
    """Whether the layer stores `keys` [1, kv_heads, rows, dim], which it was given, rotated if and only if the policy
    says so, and shows them to attention plain. Shapes are taken for granted.
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
    """Which of the two is nearer: keys of deeper layers follow from quantized ones, so neither is met exactly."""
    dim = given.shape[-1]
    if dim & (dim - 1):
        return False  # there is no such rotation, and asking MLX for one would be no harmless mistake
    return bool((_distance(values, mx.hadamard_transform(given)) < _distance(values, given)).item())


def _distance(one: mx.array, two: mx.array) -> mx.array:
    return mx.square(one - two).sum()
