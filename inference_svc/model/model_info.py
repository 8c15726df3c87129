"""The facts of a loaded model, as plain data for the rooms above."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.cachestore.v1 import identity_pb2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of a loaded model that other rooms need, read after a probe of the live caches."""

    name: str
    kv_identity: identity_pb2.KvIdentity  # never mutated
    kv_identity_hash: str
    tokenizer_digest: str
    template_digest: str
    context_tokens: int
    kv_bytes_per_token: int
    kv_bytes_per_token_fp16: int
    layer_count: int
    policy_applied_layers: int
    cell_tokens: int
    compute_type: str  # "float32", "float16" or "bfloat16"
    stop_token_ids: tuple[int, ...]  # the model's own end tokens
    policy_name: str = ""  # as text: "q4-rotated, layer 7 exact"
    policy_why: str = ""  # the reason for this policy
    has_states: bool = False  # some layers are recurrent: a sequence can go on from rewind points only
    state_bytes: int = 0  # that those layers keep at one rewind point
    window_bytes_per_token: Mapping[int, int] = field(default_factory=dict)  # by window, of all its layers
    weights_bytes: int = 0  # in memory, in the type that is computed in
    weights_placement: str = ""  # how they came there: "2.97 GB mapped"
    embedding_width: int = 0  # of its hidden rows; 0 if they cannot be had: it is no trunk with a head
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # what a request leaves out takes these

    @property
    def has_rewind_points(self) -> bool:
        """Whether some layer does not keep all tokens. A sequence keeps what such layers need at rewind points."""
        return self.has_states or bool(self.window_bytes_per_token)
