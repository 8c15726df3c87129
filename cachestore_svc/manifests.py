"""What a manifest promises about the blobs that it names, and whether a blob keeps it. Pure.

A block of the right shape can still hold other tokens or other weights. So each blob must be of the manifest's KV
identity, at its place, and of the chain of exactly these tokens (LESSONS 9 and 13).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir import manifest as manifests
from kvasir.block_file import FileIdentity, HeaderError, expected_state_tensors, expected_tensors
from kvasir.block_hash import BLOCK_TOKENS, chain_hash, kv_identity_hash
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.digest import Digest

from cachestore_svc.blob_checks import schema_text


@dataclass(frozen=True, slots=True)
class NamedBlob:
    """A blob as a manifest needs it."""

    digest: Digest
    kind: str
    start: int
    tokens: int
    chain: str
    schema: str | None  # schema_text; None for a state: a manifest may name many, each with rows of its own


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
    """Check a manifest as every reader of manifests does, and say what its blobs must be.

    Raises InvalidArgument (MANIFEST_REFUSED) naming the first wrong field.
    """
    message = manifests.parse(data)
    hash_ = kv_identity_hash(message.kv_identity)
    return ManifestFacts(
        message.kv_identity,
        hash_,
        message.token_ids,
        message.shareable_tokens // BLOCK_TOKENS if message.blocks else 0,
        message.turn.request_id,
        tuple(_named_blobs(message, hash_)),
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


def unfit_schema(need: NamedBlob, schema: str, identity: identity_pb2.KvIdentity) -> str | None:
    """Why a blob's tensors are not those of the KV identity; None when they are."""
    if need.schema is None:
        return unfit_state(need, schema, identity)
    return None if schema == need.schema else "tensors: not those of the layout"


def unfit_state(need: NamedBlob, schema: str, identity: identity_pb2.KvIdentity) -> str | None:
    """Why tensors are not the memory, after `need.tokens` tokens, of exactly the layers that do not keep all tokens."""
    try:
        expected = schema_text(expected_state_tensors(identity, need.tokens))
    except HeaderError as error:
        return f"tensors: {error}"
    return None if schema == expected else f"tensors: not those of a state of {need.tokens} tokens of the layout"


def _named_blobs(message: manifest_pb2.Manifest, hash_: str) -> Iterator[NamedBlob]:
    identity, tokens = message.kv_identity, message.token_ids
    chains = _chains(hash_, tokens)
    schema = schema_text(expected_tensors(identity, BLOCK_TOKENS)) if message.blocks else ""
    for index, block in enumerate(message.blocks):
        digest = Digest.from_proto(block)
        yield NamedBlob(digest, "block", index * BLOCK_TOKENS, BLOCK_TOKENS, chains[index], schema)
    if message.HasField("tail"):
        start = len(chains) * BLOCK_TOKENS
        rest = len(tokens) - start
        chain = _chain_at(hash_, chains, tokens, len(tokens))
        schema = schema_text(expected_tensors(identity, rest))
        yield NamedBlob(Digest.from_proto(message.tail), "tail", start, rest, chain, schema)
    for point in message.states:
        chain = _chain_at(hash_, chains, tokens, point.tokens)
        yield NamedBlob(Digest.from_proto(point.digest), "state", 0, point.tokens, chain, None)


def _chains(hash_: str, tokens: Sequence[int]) -> list[str]:
    """Chain hashes of the full blocks."""
    chains: list[str] = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chains.append(chain_hash(hash_, chains[-1] if chains else "", tokens[start : start + BLOCK_TOKENS]))
    return chains


def _chain_at(hash_: str, chains: Sequence[str], tokens: Sequence[int], count: int) -> str:
    """Chain hash of the first `count` tokens, cut in blocks, the last possibly partial."""
    full, rest = divmod(count, BLOCK_TOKENS)
    before = chains[full - 1] if full else ""
    return chain_hash(hash_, before, tokens[full * BLOCK_TOKENS : count]) if rest else before
