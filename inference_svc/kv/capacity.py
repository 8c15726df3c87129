"""Bytes that admission needs to know before anything is allocated."""

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import recurrent_tensors

STEP_ROWS = 256


def live_state_bytes(identity: identity_pb2.KvIdentity) -> int:
    """The bytes of the recurrent layers' states at one length."""
    return sum(
        tensor.size_bytes
        for index, layer in enumerate(identity.layers)
        if layer.kind == identity_pb2.LAYER_KIND_STATE
        for tensor in recurrent_tensors(layer, index)
    )
