"""How many bytes KV takes, of any layout and of well-known models by their configurations: arithmetic."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.layer_groups import windows_of
from kvasir.formats.tensor_layouts import (
    expected_state_tensors,
    expected_tensors,
    layer_tensors,
    plain_policy,
    recurrent_tensors,
)

Layers = Sequence[identity_pb2.LayerLayout]


def _full(kv_heads: int, key_dim: int, value_dim: int | None = None) -> identity_pb2.LayerLayout:
    value_dim = key_dim if value_dim is None else value_dim
    return identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_FULL, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim
    )


def _window(window: int, kv_heads: int, dim: int) -> identity_pb2.LayerLayout:
    return identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_WINDOW, window=window, kv_heads=kv_heads, key_dim=dim, value_dim=dim
    )


def _latent(rank: int, rope_dim: int) -> identity_pb2.LayerLayout:
    return identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_LATENT, kv_heads=1, key_dim=rank, value_dim=rope_dim)


def _mamba2(heads: int, head_dim: int, state_dim: int, groups: int, kernel: int) -> identity_pb2.LayerLayout:
    channels = heads * head_dim + 2 * groups * state_dim
    tensors = [
        identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_BFLOAT16, shape=[kernel - 1, channels]),
        identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_FLOAT32, shape=[heads, head_dim, state_dim]),
    ]
    return identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_STATE, state_tensors=tensors)


def _every(period: int, count: int, one: identity_pb2.LayerLayout, others: identity_pb2.LayerLayout) -> Layers:
    """`count` layers, each `period`-th of them `one`."""
    return [one if index % period == period - 1 else others for index in range(count)]


REAL_LAYOUTS: Mapping[str, Layers] = {
    "Gemma 3 4B": _every(6, 34, _full(4, 256), _window(1024, 4, 256)),
    "Gemma 3 12B": _every(6, 48, _full(8, 256), _window(1024, 8, 256)),
    "GPT-OSS 20B": _every(2, 24, _full(8, 64), _window(128, 8, 64)),
    "Llama 3.1 8B": [_full(8, 128)] * 32,
    "Qwen 2.5 7B": [_full(4, 128)] * 28,
    "Qwen 2.5 14B": [_full(8, 128)] * 48,
    "Qwen 3 8B": [_full(8, 128)] * 36,
    "DeepSeek V2 Lite": [_full(16, 192, 128)] * 27,
    "DeepSeek V3": [_latent(512, 64)] * 61,
    "Granite 4.0 H Tiny": _every(10, 40, _full(4, 128), _mamba2(48, 64, 128, 1, 4)),
}


def byte_costs(layers: Layers) -> dict[str, Any]:
    """Layers by kind, and bytes of a token, of windows' rows and of states: by the default policy and at 16 bits."""
    quantized, exact = _identity(layers, 4), _identity(layers, 16)
    return {
        "layers": [{"kind": kind, "window": window, "count": n} for (kind, window), n in _kinds(layers).items()],
        "kv_bytes_per_token": sum(tensor.size_bytes for tensor in expected_tensors(quantized, 1)),
        "kv_bytes_per_token_fp16": sum(tensor.size_bytes for tensor in expected_tensors(exact, 1)),
        "window_bytes": window_bytes(quantized),
        "window_bytes_fp16": window_bytes(exact),
        "state_bytes": sum(tensor.size_bytes for tensor in expected_state_tensors(quantized)),
        "state_bytes_fp16": sum(tensor.size_bytes for tensor in expected_state_tensors(exact)),
    }


def window_bytes(identity: identity_pb2.KvIdentity) -> int:
    """Bytes of the rows that the next token of a long sequence sees in window layers, apart from its own."""
    return sum(
        tensor.size_bytes
        for window in windows_of(identity)
        for tensor in expected_tensors(identity, window - 1, window)
    )


def agent_bytes(identity: identity_pb2.KvIdentity, tokens: int) -> int:
    """Bytes of one agent's KV in memory: whole blocks, of a window those that it can touch, and recurrent states."""
    blocks = -(-tokens // BLOCK_TOKENS)
    size_bytes = 0
    for index, layer in enumerate(identity.layers):
        if layer.kind == identity_pb2.LAYER_KIND_STATE:
            size_bytes += sum(tensor.size_bytes for tensor in recurrent_tensors(layer, index))
        else:
            # A window that does not begin at a block's edge touches one block more than it is long.
            most = -(-(layer.window - 1) // BLOCK_TOKENS) + 1 if layer.window else blocks
            of_one = sum(tensor.size_bytes for tensor in layer_tensors(identity, index, BLOCK_TOKENS))
            size_bytes += min(blocks, most) * of_one
    return size_bytes


def _kinds(layers: Layers) -> Counter[tuple[str, int]]:
    return Counter(
        (identity_pb2.LayerKind.Name(layer.kind).removeprefix("LAYER_KIND_").lower(), layer.window) for layer in layers
    )


def _identity(layers: Layers, bits: int) -> identity_pb2.KvIdentity:
    policy = plain_policy(bits, identity_pb2.SCALE_TYPE_BFLOAT16)
    return identity_pb2.KvIdentity(layers=layers, policy=policy)
