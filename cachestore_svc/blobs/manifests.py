"""The facts of blobs in a manifest, and whether a blob is of its KV identity, place and chain of tokens. Pure."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.block_file import FileIdentity, HeaderError, Layout, expected_state_tensors, expected_tensors
from kvasir.formats.block_hash import BLOCK_TOKENS, block_hash_chain, chain_hashes, kv_identity_hash, window_block_hash
from kvasir.formats.digest import Digest
from kvasir.formats.token_files import file_identities, state_identity

from cachestore_svc.blobs.blob_checks import schema_hash


@dataclass(frozen=True, slots=True)
class NamedBlob:
    digest: Digest
    file: FileIdentity  # what it must be
    schema_hash: str | None  # None where no file can be of the layout


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """A checked manifest: the facts that the store keeps, and the identities of its blobs."""

    kv_identity: identity_pb2.KvIdentity
    kv_identity_hash: str
    token_ids: Sequence[int]
    shareable_blocks: int
    request_id: str
    named: tuple[NamedBlob, ...]  # blocks, tail, each window's blocks and tail, states
    wake_ms: int | None = None  # of one that is asleep: how long its KV took to compute


def read_manifest(data: bytes | memoryview) -> ManifestFacts:
    """Check a manifest as all its readers do; its blobs' identities. Raises InvalidArgument (MANIFEST_REFUSED)."""
    message = manifests.parse(data)
    hash_ = kv_identity_hash(message.kv_identity)
    token_ids = array("I", message.token_ids)  # the hash of each block wants them so
    return ManifestFacts(
        message.kv_identity,
        hash_,
        token_ids,
        message.shareable_tokens // BLOCK_TOKENS,
        message.turn.request_id,
        () if message.HasField("asleep") else tuple(_named_blobs(message, token_ids, hash_)),
        message.asleep.wake_ms if message.HasField("asleep") else None,
    )


def unfit(need: NamedBlob, found: FileIdentity, schema_hash_found: str | None) -> str | None:
    """Why a stored tensor file is not the one needed, in words; None when it is."""
    if found.kv_identity_hash != need.file.kv_identity_hash:
        return f"kv_identity: expected {need.file.kv_identity_hash[:12]}…, found {found.kv_identity_hash[:12]}…"
    for field in ("kind", "window", "start", "tokens", "chain"):
        expected, value = getattr(need.file, field), getattr(found, field)
        if value != expected:
            return f"{field}: expected {expected}, found {value}"
    is_right = need.schema_hash is not None and schema_hash_found == need.schema_hash
    return None if is_right else f"tensors: not those of a {need.file.kind} of the layout"


@dataclass(frozen=True, slots=True)
class SharedBlock:
    block_hash: str
    index: int  # of the block in its group
    place: int  # in the manifest's named blobs


def shared_blocks(facts: ManifestFacts, namespace: str) -> list[SharedBlock]:
    """The manifest's shareable blocks, by index, and each index by group: those of one were computed together."""
    tokens = facts.token_ids[: facts.shareable_blocks * BLOCK_TOKENS]
    hashes = block_hash_chain(namespace, facts.kv_identity_hash, tokens)
    found = []
    for place, need in enumerate(facts.named):
        index, window = need.file.start // BLOCK_TOKENS, need.file.window
        if need.file.kind == "block" and index < len(hashes):
            hash_ = window_block_hash(hashes[index], window) if window else hashes[index]
            found.append(SharedBlock(hash_, index, place))
    return sorted(found, key=lambda block: (block.index, block.place))


def _named_blobs(message: manifest_pb2.Manifest, tokens: Sequence[int], hash_: str) -> Iterator[NamedBlob]:
    chain = chain_hashes(hash_, tokens)
    if manifests.keeps_all_tokens(message.kv_identity):
        yield from _named_rows(message, message, file_identities(hash_, tokens, chain))
    for each in message.windows:
        files = file_identities(hash_, tokens, chain, int(each.first_block), each.window)
        yield from _named_rows(message, each, files[: len(each.blocks) + each.HasField("tail")])
    schema = _state_schema(message.kv_identity) if message.states else None
    for point in message.states:
        yield NamedBlob(Digest.from_proto(point.digest), state_identity(hash_, tokens, point.tokens, chain), schema)


def _state_schema(identity: identity_pb2.KvIdentity) -> str | None:
    """The same for all states; None if the layout does not describe them."""
    try:
        return schema_hash(Layout(expected_state_tensors(identity)).text)
    except HeaderError:
        return None


@lru_cache(maxsize=512)  # a layout has one for each length of a tail
def _schema_of_rows(identity: bytes, rows: int, group: int) -> str:
    layout = identity_pb2.KvIdentity.FromString(identity)
    return schema_hash(Layout(expected_tensors(layout, rows, group)).text)


def _named_rows(
    message: manifest_pb2.Manifest,
    listed: manifest_pb2.Manifest | manifest_pb2.WindowBlocks,
    files: Sequence[FileIdentity],
) -> Iterator[NamedBlob]:
    identity = message.kv_identity.SerializeToString(deterministic=True)
    schemas = {
        (rows, group): _schema_of_rows(identity, rows, group)
        for rows, group in {(file.tokens, file.window) for file in files}
    }
    digests = [*listed.blocks, *((listed.tail,) if listed.HasField("tail") else ())]
    for digest, file in zip(digests, files, strict=True):
        yield NamedBlob(Digest.from_proto(digest), file, schemas[file.tokens, file.window])
