"""Whether stored keys follow a KV policy, by the buffers: a rotated key has the shape of a plain one."""

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.layout import PROBE_TOKENS, Layout
from inference_svc.kv.page import PageFormat
from inference_svc.kv.pages.page_rows import UNIT
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.prefill_layer import PrefillLayer, commit, prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV


def applied_layers(layout: Layout, identity: identity_pb2.KvIdentity, pool: KvPool, compute_type: str) -> int:
    """Layers with K and V that store rows exactly as the identity's policy wants: they are given some."""
    kv = SequenceKV(pool)
    layers, keys = prefill_layers(kv, compute_type), {}
    for index, layer in enumerate(layers):
        if isinstance(layer, PrefillLayer):
            keys[index], values = _some_rows(layout, index)
            layer.update_and_fetch(keys[index], values)
    commit(kv, layers, len(PROBE_TOKENS))
    return sum(is_stored_as_named(kv, index, identity, given) for index, given in keys.items())


def _some_rows(layout: Layout, index: int) -> tuple[mx.array, mx.array]:
    entry = layout.entries[index]
    keys, values = (
        mx.random.normal((1, entry.kv_heads, len(PROBE_TOKENS), dim), layout.kv_type, key=mx.random.key(index))
        for dim in (entry.key_dim, entry.value_dim)
    )
    return keys, values


def is_stored_as_named(kv: SequenceKV, layer: int, identity: identity_pb2.KvIdentity, keys: mx.array | None) -> bool:
    """Whether a layer stores `keys` as the policy wants, rotated only if it wants that, and shows them plain."""
    rows = kv.rows(layer, 0, kv.length) if keys is not None else None
    wanted_units = [part.units for part in PageFormat.of(identity, layer).parts]
    if keys is None or rows is None or [part.view(UNIT).shape[-1] for part in rows] != wanted_units:
        return False
    codec, given, policy = kv.pool.codecs[layer][0], keys.astype(mx.float32), identity.policy
    parts = rows[: codec.part_count]
    is_quantized = len(parts) > 1
    wants_rotated = is_quantized and policy.key_rotation == identity_pb2.KEY_ROTATION_HADAMARD
    stored = _plain_values(parts, policy) if is_quantized else parts[0].astype(mx.float32)
    if _is_rotated(stored, given) != wants_rotated:
        return False
    return not _is_rotated(codec.decode(parts, mx.float32), given)


def _plain_values(parts: tuple[mx.array, ...], policy: identity_pb2.KvPolicy) -> mx.array:
    codes, scales, biases = parts
    return mx.dequantize(
        codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=policy.group_size, bits=policy.key_bits
    )


def _is_rotated(values: mx.array, given: mx.array) -> bool:
    """Whether `values` are nearer to the rotated keys. Deep layers compute with quantized KV: none fits exactly."""
    dim = given.shape[-1]
    if dim & (dim - 1):
        return False  # no such rotation exists, and for such a size MLX writes outside its buffers
    return bool((_distance(values, _rotated(given)) < _distance(values, given)).item())


def _rotated(keys: mx.array) -> mx.array:
    """By a product: CUDA compiles MLX's transform for 1.7 s, in each machine's first start."""
    matrix = mx.array([[keys.shape[-1] ** -0.5]])
    while matrix.size < keys.shape[-1] ** 2:
        matrix = mx.concatenate([mx.concatenate([matrix, sign * matrix], axis=1) for sign in (1, -1)])
    return keys @ matrix


def _distance(one: mx.array, two: mx.array) -> mx.array:
    return mx.square(one - two).sum()
