"""The facts of a loaded model, as plain data for the rooms above."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.layer_groups import has_recurrent_layers, windows_of
from kvasir.formats.tensor_layouts import expected_state_tensors, expected_tensors

from inference_svc.model.wedlm import MaskWindow

_WITHOUT_WINDOW = (identity_pb2.LAYER_KIND_FULL, identity_pb2.LAYER_KIND_LATENT)


@dataclass(frozen=True)
class KvFacts:
    kv_identity: identity_pb2.KvIdentity  # never mutated
    kv_identity_hash: str = field(init=False)
    kv_bytes_per_token: int = field(init=False)
    kv_bytes_per_token_fp16: int = field(init=False)
    layer_count: int = field(init=False)  # of those with K and V
    has_states: bool = field(init=False)  # some layers are recurrent: a sequence can go on from rewind points only
    state_bytes: int = field(init=False)  # that those layers keep at one rewind point
    window_bytes_per_token: Mapping[int, int] = field(init=False)  # by window, of all its layers
    mask_window: MaskWindow | None = None  # of a model that fills masks, behind the tokens that have KV

    def __post_init__(self) -> None:
        identity = self.kv_identity
        with_rows = [layer for layer in identity.layers if layer.kind != identity_pb2.LAYER_KIND_STATE]
        whole = [layer for layer in with_rows if layer.kind in _WITHOUT_WINDOW]
        found = {
            "kv_identity_hash": kv_identity_hash(identity),
            "kv_bytes_per_token": sum(tensor.size_bytes for tensor in expected_tensors(identity, 1)),
            "kv_bytes_per_token_fp16": sum(2 * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in whole),
            "layer_count": len(with_rows),
            "has_states": has_recurrent_layers(identity),
            "state_bytes": sum(tensor.size_bytes for tensor in expected_state_tensors(identity)),
            "window_bytes_per_token": {
                window: sum(tensor.size_bytes for tensor in expected_tensors(identity, 1, window))
                for window in windows_of(identity)
            },
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def has_rewind_points(self) -> bool:
        """Whether some layer does not keep all tokens. A sequence keeps what such layers need at rewind points."""
        return self.has_states or bool(self.window_bytes_per_token)


@dataclass(frozen=True, kw_only=True)
class ModelInfo(KvFacts):
    name: str
    tokenizer_digest: str
    template_digest: str
    context_tokens: int
    policy_applied_layers: int
    cell_tokens: int
    compute_type: str  # "float32", "float16" or "bfloat16"
    stop_token_ids: tuple[int, ...]  # the model's own end tokens
    policy_name: str = ""  # as text: "q4-rotated, layer 7 exact"
    policy_why: str = ""  # the reason for this policy
    weights_bytes: int = 0  # in memory, in the type that is computed in
    weights_placement: str = ""  # how they came there: "2.97 GB mapped"
    embedding_width: int = 0  # of its hidden rows; 0 if they cannot be had: it is no trunk with a head
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # what a request leaves out takes these
