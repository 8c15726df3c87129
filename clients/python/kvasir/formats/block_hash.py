"""Block hashes and KV identity hashes: the names of computed KV.

Each is BLAKE3-256 over fields, every field prefixed with its length as 8 bytes little-endian, so that no two
different lists of fields give the same bytes. There is no seed: processes and machines agree. Golden cases for
every language are in proto/vectors."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

from blake3 import blake3

from kvasir.cachestore.v1 import identity_pb2

BLOCK_TOKENS = 256

_BLOCK_TAG = b"kvasir.block.v1"
_WINDOW_TAG = b"kvasir.window_block.v1"
_IDENTITY_TAG = b"kvasir.kv_identity.v1"
_STATES_TAG = b"states"


def block_hash(namespace: str, kv_identity_hash: str, parent: str, token_ids: Sequence[int]) -> str:
    """H(namespace, KV identity, parent block hash, token ids); `parent` is "" for the first block. Token ids are 4
    bytes little-endian, the namespace is never normalised. Raises OverflowError for an id that has no 4 bytes."""
    names = namespace.encode(), bytes.fromhex(kv_identity_hash), bytes.fromhex(parent)
    return _hash_fields(_BLOCK_TAG, *names, _token_bytes(token_ids))


def block_hash_chain(
    namespace: str, kv_identity_hash: str, token_ids: Sequence[int], known: Sequence[str] = ()
) -> list[str]:
    """Hashes of the full blocks of `token_ids`, first block first; those in `known` are not computed again."""
    hashes = list(known)
    full = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    tokens = _token_bytes(token_ids[len(hashes) * BLOCK_TOKENS : full])
    names = _prefixed(_BLOCK_TAG, namespace.encode(), bytes.fromhex(kv_identity_hash))
    parent = bytes.fromhex(hashes[-1]) if hashes else b""
    for start in range(0, len(tokens), 4 * BLOCK_TOKENS):  # as `block_hash`, without what all blocks have in common
        block = names + _prefixed(parent, tokens[start : start + 4 * BLOCK_TOKENS])
        parent = blake3(block).digest()
        hashes.append(parent.hex())
    return hashes


def window_block_hash(block_hash: str, window: int) -> str:
    """Of the same tokens' block in the group of window layers: H(block hash, window as 4 bytes little-endian)."""
    return _hash_fields(_WINDOW_TAG, bytes.fromhex(block_hash), _numbers(window))


def chain_hash(kv_identity_hash: str, parent: str, token_ids: Sequence[int]) -> str:
    """The hash in a tensor file: of its tokens and all before them, in no namespace. It is never looked up."""
    return block_hash("", kv_identity_hash, parent, token_ids)


def chain_hashes(kv_identity_hash: str, token_ids: Sequence[int], known: Sequence[str] = ()) -> tuple[str, ...]:
    """The chain hashes of the full blocks of `token_ids`. `known` holds those of the first blocks."""
    return tuple(block_hash_chain("", kv_identity_hash, token_ids, known))


def kv_identity_hash(identity: identity_pb2.KvIdentity) -> str:
    """Hash of a KV identity. Fields in the order of the .proto; numbers are 4 bytes little-endian.

    A property that the first identities did not have is a tagged field behind the others, and absent while unused: so
    the hash of an identity without it never changes."""
    return _kv_identity_hash(identity.SerializeToString(deterministic=True))


@lru_cache(maxsize=16)  # each commit of a line has the same one
def _kv_identity_hash(serialized: bytes) -> str:
    identity = identity_pb2.KvIdentity.FromString(serialized)
    policy = identity.policy
    layers = (
        _numbers(layer.kind, layer.window, layer.kv_heads, layer.key_dim, layer.value_dim) for layer in identity.layers
    )
    return _hash_fields(
        _IDENTITY_TAG,
        bytes.fromhex(identity.weights_digest),
        b"".join(layers),
        _numbers(policy.key_bits, policy.value_bits, policy.group_size, policy.scale_type, policy.key_rotation),
        _numbers(*policy.exact_layers),
        *_state_fields(identity.layers),
    )


def _state_fields(layers: Iterable[identity_pb2.LayerLayout]) -> Iterable[bytes]:
    """The recurrent states that layers describe: index, count, and each tensor's type, axes and shape."""
    described = [(index, layer.state_tensors) for index, layer in enumerate(layers) if layer.state_tensors]
    if described:
        yield _STATES_TAG + b"".join(
            _numbers(index, len(tensors))
            + b"".join(_numbers(tensor.type, len(tensor.shape), *tensor.shape) for tensor in tensors)
            for index, tensors in described
        )


def differing_field(ours: identity_pb2.KvIdentity, theirs: identity_pb2.KvIdentity) -> str | None:
    """The first field in which two KV identities differ, in words; None when they are equal."""
    if ours.weights_digest != theirs.weights_digest:
        return f"weights_digest: expected {ours.weights_digest[:12]}…, found {theirs.weights_digest[:12]}…"
    if len(ours.layers) != len(theirs.layers):
        return f"layers: expected {len(ours.layers)}, found {len(theirs.layers)}"
    for index, (mine, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        if difference := _first_difference(mine, other):
            return f"layers[{index}].{difference}"
    if difference := _first_difference(ours.policy, theirs.policy):
        return f"policy.{difference}"
    return None


def _first_difference(mine: object, other: object) -> str | None:
    for field in mine.DESCRIPTOR.fields:  # type: ignore[attr-defined]
        expected, found = getattr(mine, field.name), getattr(other, field.name)
        if expected != found:
            return f"{field.name}: expected {expected}, found {found}"
    return None


def _numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    tokens = array("I", token_ids)  # 50 times faster than token by token
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _hash_fields(*fields: bytes) -> str:
    return blake3(_prefixed(*fields)).hexdigest()


def _prefixed(*fields: bytes) -> bytes:
    return b"".join([part for field in fields for part in (len(field).to_bytes(8, "little"), field)])
