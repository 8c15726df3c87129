"""How mlx-lm's models are led to attention over pages, and over K and V that several rows share: the one place that
changes anything of mlx-lm's. The hook takes the place of `scaled_dot_product_attention`, which each model's module
imports by name, and hands other caches on. A model that never calls it is found by the probe (`layout`), and its rows
are de-quantized.
"""

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from inference_svc.kv.batch.decoded_layer import DecodedLayer
from inference_svc.kv.batch.fused_layer import FusedLayer
from inference_svc.kv.prefill_layer import InPlaceLayer

_NAME = "scaled_dot_product_attention"
_MODELS = "mlx_lm.models."
_upstream: Any = getattr(base, _NAME)


def install() -> None:
    """Take the place of attention in loaded models' modules, and in `base` for later ones. Idempotent."""
    for name, module in sys.modules.copy().items():  # other threads import meanwhile
        if name.startswith(_MODELS) and getattr(module, _NAME, None) is _upstream:
            setattr(module, _NAME, attention)


def is_hooked(module: Any) -> bool:
    """Whether a module's attention is mlx-lm's own, which `attention` is or takes the place of."""
    return getattr(module, _NAME, None) in (_upstream, attention)


def attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """As mlx-lm's function of this place, but over pages, or K and V that rows share, if the cache attends to them."""
    if isinstance(cache, FusedLayer | InPlaceLayer) and cache.attends:
        return cache.attend(queries, scale, mask, sinks)
    if isinstance(cache, DecodedLayer) and sinks is None:
        shared = cache.attend(queries, keys, values, scale, mask)
        if shared is not None:
            return shared
    attended: mx.array = _upstream(queries, keys, values, cache, scale, mask, sinks)
    return attended
