"""KV policies by name: the ladder from the cheapest rung to the exact one. Plain data, no MLX."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import InvalidArgument

GROUP_SIZE = 64
AUTO = "auto"
LAST = "last"


class Rung(Enum):
    """The ladder, cheapest first. The last rung stores 16 bits, the most that stored KV has."""

    Q4 = "q4"
    Q4_ROTATED = "q4-rotated"
    K8V4 = "k8v4"
    Q8 = "q8"
    FP = "fp"


# Of keys and values.
_BITS = {Rung.Q4: (4, 4), Rung.Q4_ROTATED: (4, 4), Rung.K8V4: (8, 4), Rung.Q8: (8, 8), Rung.FP: (16, 16)}
LADDER = tuple(Rung)
# Turned keys take as many bytes as plain ones, and four bits of them lose less.
_TURNED = {Rung.Q4.value: Rung.Q4_ROTATED.value}
NAMES = (*(rung.value for rung in LADDER), AUTO)


def tried_by_auto(names: Collection[str]) -> list[str]:
    """Of the rungs that a model can have, those that `auto` tries, in their order: plain keys only where turned ones
    cannot be had.
    """
    return [name for name in names if _TURNED.get(name) not in names]


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A rung, or the cheapest that costs the model nothing; and layers that stay exact on any rung."""

    rung: Rung | None = Rung.Q4  # None: auto
    exact_layers: tuple[int, ...] = ()  # from the front, or -1 for the last

    @classmethod
    def parse(cls, policy: str, exact_layers: str = "") -> "PolicyRequest":
        """From text: one of NAMES; and "last" or indexes, separated by commas. Raises InvalidArgument."""
        if policy not in NAMES:
            raise InvalidArgument(f"KV policy: expected one of {', '.join(NAMES)}, got {policy!r}", field="kv_policy")
        exact = tuple(_layer(word.strip()) for word in exact_layers.split(",")) if exact_layers else ()
        if exact and policy == Rung.FP.value:
            raise InvalidArgument("exact layers: under fp every layer is exact already", field="kv_exact_layers")
        return cls(None if policy == AUTO else Rung(policy), exact)

    def policy(self, rung: Rung, compute_type: str, layer_count: int) -> identity_pb2.KvPolicy:
        """The policy of a rung for such a model. Raises InvalidArgument for a layer that the model does not have."""
        policy = policy_of(rung, compute_type)
        if rung is Rung.FP:
            return policy
        for layer in self.exact_layers:
            if not -1 <= layer < layer_count:
                raise InvalidArgument(
                    f"exact layers: the model has layers 0 to {layer_count - 1}, and no {layer}",
                    field="kv_exact_layers",
                )
        policy.exact_layers.extend(sorted({layer % layer_count for layer in self.exact_layers}))
        return policy


def policy_of(rung: Rung, compute_type: str) -> identity_pb2.KvPolicy:
    """Groups of 64. Scales and exact values have the model's own 16-bit type, or float16 if it computes in 32 bits."""
    is_rotated = rung is Rung.Q4_ROTATED
    key_bits, value_bits = _BITS[rung]
    return identity_pb2.KvPolicy(
        key_bits=key_bits,
        value_bits=value_bits,
        group_size=0 if rung is Rung.FP else GROUP_SIZE,
        scale_type=(
            identity_pb2.SCALE_TYPE_BFLOAT16 if compute_type == "bfloat16" else identity_pb2.SCALE_TYPE_FLOAT16
        ),
        key_rotation=identity_pb2.KEY_ROTATION_HADAMARD if is_rotated else identity_pb2.KEY_ROTATION_NONE,
    )


def name_of(policy: identity_pb2.KvPolicy) -> str:
    """A policy as text: the name of its rung, or its bits if it is on none; and the layers that stay exact."""
    is_rotated = policy.key_rotation == identity_pb2.KEY_ROTATION_HADAMARD
    bits = (policy.key_bits, policy.value_bits)
    rungs = [rung.value for rung in LADDER if _BITS[rung] == bits and (rung is Rung.Q4_ROTATED) == is_rotated]
    name = rungs[0] if rungs else f"k{bits[0]}v{bits[1]}" + ("-rotated" if is_rotated else "")
    if not (layers := policy.exact_layers):
        return name
    return f"{name}, layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))} exact"


def _layer(word: str) -> int:
    if word == LAST:
        return -1
    if not (word.isascii() and word.isdigit()):
        raise InvalidArgument(f"exact layers: expected {LAST!r} or indexes, got {word!r}", field="kv_exact_layers")
    return int(word)
