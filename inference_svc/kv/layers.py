"""The three kinds of layer memory as one type, and how each is made from a layout.

`LayerKV` keeps every token's rows: it can be cut anywhere, and its rows go into blocks. `WindowKV` and `StateKV` can
only go back to a rewind point, and are stored whole, in a state file.
"""

from typing import TypeAlias

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.codec import layer_codecs
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.state_kv import StateKV
from inference_svc.kv.window_kv import WindowKV

StatefulKV: TypeAlias = WindowKV | StateKV
AnyLayerKV: TypeAlias = LayerKV | StatefulKV


def new_layer(identity: identity_pb2.KvIdentity, index: int) -> AnyLayerKV:
    """The empty memory of one entry of a layout. Raises InvalidArgument for a policy that this engine cannot do."""
    layer = identity.layers[index]
    if layer.kind == identity_pb2.LAYER_KIND_STATE:
        return StateKV(len(layer.state_tensors))
    codecs = layer_codecs(identity.policy, index)
    if layer.kind == identity_pb2.LAYER_KIND_WINDOW:
        return WindowKV(*codecs, layer.window)
    return LayerKV(*codecs)
