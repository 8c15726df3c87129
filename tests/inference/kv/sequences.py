"""Sequences for tests whose layers all keep all their tokens, and the policy that they have unless a test says more."""

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.codec import layer_codecs
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV


def four_bits() -> identity_pb2.KvPolicy:
    """The default policy of a model that computes in 32 bits."""
    return policy_of(Rung.Q4, "float32")


def empty_rows(policy: identity_pb2.KvPolicy, layer_count: int) -> SequenceKV:
    return SequenceKV([LayerKV(*layer_codecs(policy, index)) for index in range(layer_count)])
