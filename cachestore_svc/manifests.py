"""What a manifest promises about the blobs that it names, and whether a blob keeps it. Pure.

A block of the right shape can still hold other tokens or other weights. So each blob must be of the manifest's KV
identity, at its place, and of the chain of exactly these tokens (LESSONS 9 and 13).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir.block_file import FileIdentity, TensorSpec, expected_tensors, layer_tensors
from kvasir.block_hash import BLOCK_TOKENS, chain_hash, kv_identity_hash
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.digest import Digest, is_hash
from kvasir.errors import InvalidArgument

from cachestore_svc.blob_checks import parse_manifest, schema_tensors, schema_text

MAX_TOKENS = 1 << 24
_KEEPS_ALL = (identity_pb2.LAYER_KIND_FULL, identity_pb2.LAYER_KIND_LATENT)
_KEEPS_SOME = (identity_pb2.LAYER_KIND_WINDOW, identity_pb2.LAYER_KIND_STATE)


@dataclass(frozen=True, slots=True)
class NamedBlob:
    """A blob as a manifest needs it."""

    digest: Digest
    kind: str
    start: int
    tokens: int
    chain: str
    schema: str | None  # schema_text; None for a state, whose rows and recurrent shapes are its model's


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """A checked manifest: what the store keeps of it, and what its blobs must be."""

    kv_identity: identity_pb2.KvIdentity
    kv_identity_hash: str
    token_ids: Sequence[int]
    shareable_blocks: int
    request_id: str
    named: tuple[NamedBlob, ...]  # blocks, tail, states


def read_manifest(data: bytes | memoryview) -> ManifestFacts:
    """Check a manifest against itself. Raises InvalidArgument (MANIFEST_REFUSED) saying what was expected."""
    message = parse_manifest(data)
    identity = message.kv_identity
    _check_identity(identity)
    tokens = len(message.token_ids)
    _expect(1 <= tokens <= MAX_TOKENS, "token_ids", f"1 to {MAX_TOKENS} tokens", tokens)
    _check_text(message)
    shareable = message.shareable_tokens
    _expect(shareable <= tokens, "shareable_tokens", f"at most {tokens}", shareable)
    parent = message.parent_manifest
    _expect(parent == "" or is_hash(parent), "parent_manifest", "64 lower-case hex digits or nothing", parent[:80])
    hash_ = kv_identity_hash(identity)
    named = tuple(_named_blobs(message, hash_))
    digests = {blob.digest.hash for blob in named}
    _expect(len(digests) == len(named), "blobs", f"{len(named)} different ones", len(digests))
    return ManifestFacts(
        identity,
        hash_,
        message.token_ids,
        shareable // BLOCK_TOKENS if message.blocks else 0,
        message.turn.request_id,
        named,
    )


def unfit(need: NamedBlob, found: FileIdentity, facts: ManifestFacts) -> str | None:
    """Why a stored tensor file is not the one needed, in words; None when it is, but for its tensors."""
    if found.kv_identity_hash != facts.kv_identity_hash:
        return f"kv_identity: expected {facts.kv_identity_hash[:12]}…, found {found.kv_identity_hash[:12]}…"
    for field in ("kind", "start", "tokens", "chain"):
        expected, value = getattr(need, field), getattr(found, field)
        if value != expected:
            return f"{field}: expected {expected}, found {value}"
    return None


def unfit_state(tensors: Sequence[TensorSpec], identity: identity_pb2.KvIdentity) -> str | None:
    """Why tensors are not the memory of exactly the layers that do not keep all tokens; None when they are."""
    stateful = {index for index, layer in enumerate(identity.layers) if layer.kind in _KEEPS_SOME}
    found = {_layer_of(tensor): [t for t in tensors if _layer_of(t) == _layer_of(tensor)] for tensor in tensors}
    if set(found) != stateful:
        return f"layers: expected {sorted(stateful)}, found {sorted(found)}"
    for index, own in found.items():
        layer = identity.layers[index]
        if layer.kind == identity_pb2.LAYER_KIND_STATE:
            if any("_state_" not in tensor.name for tensor in own):
                return f"layer {index}: expected recurrent state"
            continue
        rows = own[0].shape[1] if len(own[0].shape) == 3 else 0
        if not 1 <= rows <= layer.window or own != layer_tensors(identity, index, rows):
            return f"layer {index}: expected K and V of at most {layer.window} tokens of the layout"
    return None


def unfit_schema(need: NamedBlob, schema: str, identity: identity_pb2.KvIdentity) -> str | None:
    """Why a blob's tensors are not those of the KV identity; None when they are."""
    if need.schema is None:
        return unfit_state(schema_tensors(schema), identity)
    return None if schema == need.schema else "tensors: not those of the layout"


def _layer_of(tensor: TensorSpec) -> int:
    # The header check let only layer_N_… pass.
    return int(tensor.name.split("_")[1])


def _check_identity(identity: identity_pb2.KvIdentity) -> None:
    weights = identity.weights_digest
    _expect(is_hash(weights), "kv_identity.weights_digest", "64 lower-case hex digits", weights[:80])
    count = len(identity.layers)
    _expect(1 <= count <= 4096, "kv_identity.layers", "1 to 4096", count)
    for index, layer in enumerate(identity.layers):
        _expect(
            layer.kind in (*_KEEPS_ALL, *_KEEPS_SOME), f"kv_identity.layers[{index}].kind", "a known one", layer.kind
        )
    policy = identity.policy
    _expect(policy.key_bits in (4, 8, 16), "kv_identity.policy.key_bits", "4, 8 or 16", policy.key_bits)
    _expect(policy.value_bits in (4, 8, 16), "kv_identity.policy.value_bits", "4, 8 or 16", policy.value_bits)
    scales = (identity_pb2.SCALE_TYPE_FLOAT16, identity_pb2.SCALE_TYPE_BFLOAT16)
    _expect(policy.scale_type in scales, "kv_identity.policy.scale_type", "a known one", policy.scale_type)
    rotations = (identity_pb2.KEY_ROTATION_NONE, identity_pb2.KEY_ROTATION_HADAMARD)
    _expect(policy.key_rotation in rotations, "kv_identity.policy.key_rotation", "a known one", policy.key_rotation)
    is_quantized = min(policy.key_bits, policy.value_bits) < 16
    _expect(not is_quantized or policy.group_size > 0, "kv_identity.policy.group_size", "at least 1", policy.group_size)


def _check_text(message: manifest_pb2.Manifest) -> None:
    chars = message.token_chars
    # A memory of foreign origin may not know where its tokens end in the text; then it says nothing.
    if chars:
        _expect(len(chars) == len(message.token_ids), "token_chars", f"{len(message.token_ids)}", len(chars))
        _expect(sum(chars) == len(message.text), "token_chars", f"a sum of {len(message.text)}", sum(chars))


def _named_blobs(message: manifest_pb2.Manifest, hash_: str) -> Iterator[NamedBlob]:
    identity, tokens = message.kv_identity, message.token_ids
    keeps_all = any(layer.kind in _KEEPS_ALL for layer in identity.layers)
    chains = _chains(hash_, tokens)
    full = len(chains) if keeps_all else 0
    rest = len(tokens) % BLOCK_TOKENS if keeps_all else 0
    _expect(len(message.blocks) == full, "blocks", f"{full} for {len(tokens)} tokens", len(message.blocks))
    _expect(message.HasField("tail") == bool(rest), "tail", f"one of {rest} rows" if rest else "none", "the other")
    schema = schema_text(expected_tensors(identity, BLOCK_TOKENS)) if full else ""
    for index, block in enumerate(message.blocks):
        digest = _digest(block, f"blocks[{index}]")
        yield NamedBlob(digest, "block", index * BLOCK_TOKENS, BLOCK_TOKENS, chains[index], schema)
    if rest:
        chain = chain_at(hash_, chains, tokens, len(tokens))
        schema = schema_text(expected_tensors(identity, rest))
        yield NamedBlob(_digest(message.tail, "tail"), "tail", full * BLOCK_TOKENS, rest, chain, schema)
    yield from _named_states(message, hash_, chains)


def _named_states(message: manifest_pb2.Manifest, hash_: str, chains: Sequence[str]) -> Iterator[NamedBlob]:
    keeps_some = any(layer.kind in _KEEPS_SOME for layer in message.kv_identity.layers)
    _expect(keeps_some or not message.states, "states", "none for this layout", len(message.states))
    before = 0
    for index, point in enumerate(message.states):
        field = f"states[{index}]"
        _expect(
            before < point.tokens <= len(message.token_ids),
            f"{field}.tokens",
            f"more than {before}, at most {len(message.token_ids)}",
            point.tokens,
        )
        before = point.tokens
        chain = chain_at(hash_, chains, message.token_ids, point.tokens)
        yield NamedBlob(_digest(point.digest, f"{field}.digest"), "state", 0, point.tokens, chain, None)


def _chains(hash_: str, tokens: Sequence[int]) -> list[str]:
    """Chain hashes of the full blocks."""
    chains: list[str] = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chains.append(chain_hash(hash_, chains[-1] if chains else "", tokens[start : start + BLOCK_TOKENS]))
    return chains


def chain_at(hash_: str, chains: Sequence[str], tokens: Sequence[int], count: int) -> str:
    """Chain hash of the first `count` tokens, cut in blocks, the last possibly partial."""
    full, rest = divmod(count, BLOCK_TOKENS)
    before = chains[full - 1] if full else ""
    return chain_hash(hash_, before, tokens[full * BLOCK_TOKENS : count]) if rest else before


def _digest(message: manifest_pb2.Digest, field: str) -> Digest:
    try:
        return Digest.from_proto(message)
    except ValueError as error:
        raise InvalidArgument(f"{field}: {error}", reason="MANIFEST_REFUSED", field=f"manifest.{field}") from None


def _expect(is_right: bool, field: str, expected: str, found: object) -> None:
    if not is_right:
        raise InvalidArgument(
            f"{field}: expected {expected}, found {found}", reason="MANIFEST_REFUSED", field=f"manifest.{field}"
        )
