"""The groups of a layout's layers: 0, which keep all tokens; n, of a window; recurrent ones keep a state instead."""

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS

KEEPS_ALL = (identity_pb2.LAYER_KIND_FULL, identity_pb2.LAYER_KIND_LATENT)


def row_groups(identity: identity_pb2.KvIdentity) -> tuple[int, ...]:
    """The groups that have rows, ascending: 0 if any layer keeps all tokens, then each window once."""
    return (*((0,) if keeps_all_tokens(identity) else ()), *windows_of(identity))


def keeps_all_tokens(identity: identity_pb2.KvIdentity) -> bool:
    """Whether any layer keeps every token, so that there are blocks and a tail."""
    return any(layer.kind in KEEPS_ALL for layer in identity.layers)


def windows_of(identity: identity_pb2.KvIdentity) -> tuple[int, ...]:
    """The different windows of the layout, ascending."""
    windows = {layer.window for layer in identity.layers if layer.kind == identity_pb2.LAYER_KIND_WINDOW}
    return tuple(sorted(windows))


def has_recurrent_layers(identity: identity_pb2.KvIdentity) -> bool:
    """Whether any layer keeps a state that rows cannot give back."""
    return any(layer.kind == identity_pb2.LAYER_KIND_STATE for layer in identity.layers)


def layers_of(identity: identity_pb2.KvIdentity, group: int) -> list[int]:
    return [
        index
        for index, layer in enumerate(identity.layers)
        if (layer.kind in KEEPS_ALL if group == 0 else layer.kind == identity_pb2.LAYER_KIND_WINDOW)
        and layer.window == group
    ]


def first_touched_block(group: int, tokens: int) -> int:
    """The first block with a row that the token at `tokens` sees: itself and those before it in its window."""
    return max(0, tokens - (group - 1)) // BLOCK_TOKENS if group else 0
