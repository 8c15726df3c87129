"""One layer of one sequence with a pool of its own, as a cache that mlx-lm's own loops can use: for measurements."""

import mlx.core as mx
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.prefill_layer import PrefillLayer
from inference_svc.kv.sequence_kv import SequenceKV

_MOST_BYTES = 1 << 40


class StandaloneLayer:
    """K and V of `offset` tokens. What the model computes is stored at once, without waiting for the whole pass."""

    def __init__(self, identity: identity_pb2.KvIdentity) -> None:
        """`identity`: of this layer alone."""
        self.kv = SequenceKV(KvPool(identity, _MOST_BYTES))

    @property
    def offset(self) -> int:
        return self.kv.length

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As `PrefillLayer.update_and_fetch`."""
        layer = PrefillLayer(self.kv, 0)
        seen = layer.update_and_fetch(keys, values)
        self.kv.append({0: layer.new_rows})
        return seen

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """As `PrefillLayer.make_mask`."""
        return PrefillLayer(self.kv, 0).make_mask(rows, return_array, window_size)

    def trim(self, rows: int) -> int:
        """Forget the last rows; returns how many."""
        rows = min(rows, self.offset)
        self.kv.trim_to(self.offset - rows)
        return rows

    @property
    def state(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        return [*self.kv.pool.arrays, *self.kv.state_arrays]


def standalone_identity(identity: identity_pb2.KvIdentity, layer: int) -> identity_pb2.KvIdentity:
    """The identity of one layer alone, stored as `identity` says."""
    alone = identity_pb2.KvIdentity(layers=[identity.layers[layer]], policy=identity.policy)
    del alone.policy.exact_layers[:]
    if layer in identity.policy.exact_layers:
        alone.policy.exact_layers.append(0)
    return alone
