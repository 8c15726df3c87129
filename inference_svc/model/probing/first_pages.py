"""Some rows in pages of a model's sizes, written while its weights come: CUDA finds and loads kernels that encode KV
when they are first used, for which opening the model would wait 0.15 s.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.applied import applied_layers
from inference_svc.kv.attention.choice import KernelChoice, Wanted, are_known
from inference_svc.kv.attention.kept_checks import KeptChecks
from inference_svc.kv.layout import Layout
from inference_svc.kv.policy import Rung, policy_of

_TYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
_POOL_BYTES = 1 << 30


def write_first_pages(config: Mapping[str, Any], wanted: Wanted, kept: KeptChecks | None) -> int:
    """Of a plain model's configuration, by the usual policy. Evaluates, on the MLX thread. Returns how many layers."""
    with contextlib.suppress(Exception):  # the model's own pages are the first then
        return _written(config, wanted, kept)
    return 0


def _written(config: Mapping[str, Any], wanted: Wanted, kept: KeptChecks | None) -> int:
    kind = config.get("torch_dtype") or config["dtype"]
    hidden, heads, layers = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    width = int(config.get("head_dim") or hidden // heads)
    entry = identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_FULL,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        key_dim=width,
        value_dim=width,
    )
    kernels = KernelChoice(wanted, kept)
    layout = Layout((entry,) * layers, tuple(range(layers)), _TYPES[kind], reads_pages=True, kernels=kernels)
    identity = identity_pb2.KvIdentity(layers=layout.entries, policy=policy_of(Rung.Q4, kind))
    if not are_known(kept, identity, layout.kv_type):  # a check would only be made sooner, and perhaps for nothing
        return 0
    return applied_layers(layout, identity, layout.new_pool(identity, _POOL_BYTES), kind)
