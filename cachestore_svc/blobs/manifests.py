"""The facts of blobs in a manifest, and whether a blob is of its KV identity, place and chain of tokens. Pure."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.block_file import FileIdentity, HeaderError
from kvasir.formats.block_hash import BLOCK_TOKENS, block_hash_chain, chain_hashes, kv_identity_hash, window_block_hash
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import keeps_all_tokens
from kvasir.formats.tensor_layouts import Layout, expected_state_tensors, row_layouts
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
    chain: Sequence[str]  # of its full blocks
    packed_ids: bytes  # the token ids as its bytes have them; none where they were read in another way
    parent: str  # the hash of the manifest before it, or nothing
    known_blocks: int = 0  # how many of the leading ones that manifest's facts have, too
    known_named: int = 0  # how many of the leading `named` it names, too
    wake_ms: int | None = None  # of one that is asleep: how long its KV took to compute
    pending_tokens: int = 0  # behind the token ids, without KV

    @property
    def tokens(self) -> int:
        return len(self.token_ids) + self.pending_tokens


def _unknown(_manifest_hash: str) -> ManifestFacts | None:
    return None


def read_manifest(
    data: bytes | memoryview, facts_of: Callable[[str], ManifestFacts | None] = _unknown
) -> ManifestFacts:
    """Check a manifest as all its readers do; its blobs' identities. Raises InvalidArgument (MANIFEST_REFUSED).
    `facts_of` a manifest's hash: known ones are not computed again for the next manifest, which begins with its tokens.
    """
    tokens = _Tokens(facts_of)
    apart = manifests.parse_apart(data, tokens.read)
    message: Any = apart or manifests.parse(data)
    token_ids = array("I", message.token_ids)  # the hash of each block wants them so
    hash_ = kv_identity_hash(message.kv_identity)
    before = tokens.before if apart and tokens.before and tokens.before.kv_identity_hash == hash_ else None
    chain = chain_hashes(hash_, token_ids, before.chain if before else ())
    is_asleep = message.HasField("asleep")
    known = _known_rows(message, before) if before and not is_asleep else ()
    kv_identity = identity_pb2.KvIdentity()
    kv_identity.CopyFrom(message.kv_identity)  # a part of a message keeps all of it
    return ManifestFacts(
        kv_identity,
        hash_,
        token_ids,
        message.shareable_tokens // BLOCK_TOKENS,
        message.turn.request_id,
        () if is_asleep else (*known, *_named_blobs(message, token_ids, hash_, chain, len(known))),
        chain,
        tokens.packed if apart else b"",
        message.parent_manifest,
        len(before.chain) if before else 0,
        len(known),
        message.asleep.wake_ms if is_asleep else None,
        int(message.HasField("pending")),
    )


class _Tokens:
    """The token ids of a manifest, those of the one before it not read again."""

    def __init__(self, facts_of: Callable[[str], ManifestFacts | None]) -> None:
        self.before: ManifestFacts | None = None  # one whose tokens this one begins with
        self.packed = b""
        self._facts_of = facts_of

    def read(self, message: manifest_pb2.Manifest, packed: bytes) -> Sequence[int]:
        self.packed = packed
        known = self._facts_of(message.parent_manifest) if message.parent_manifest else None
        # Whole numbers: that manifest was read.
        if known is None or not known.packed_ids or not packed.startswith(known.packed_ids):
            return array("I", manifests.unpacked(packed))
        self.before = known
        return array("I", known.token_ids) + array("I", manifests.unpacked(packed[len(known.packed_ids) :]))


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


def shareable_hashes(facts: ManifestFacts, namespace: str, known: Sequence[str] = ()) -> list[str]:
    """The hashes of the manifest's shareable blocks. `known`: those of the first of its blocks."""
    tokens = facts.token_ids[: facts.shareable_blocks * BLOCK_TOKENS]
    return block_hash_chain(namespace, facts.kv_identity_hash, tokens, known[: facts.shareable_blocks])


def shared_blocks(
    facts: ManifestFacts, hashes: Sequence[str], before: Sequence[SharedBlock] = (), known: int = 0
) -> list[SharedBlock]:
    """The manifest's shareable blocks, which have these hashes, by index, and each index by group: those of one were
    computed together. Of the first `known` named blobs they are those of the manifest before it.
    """
    found = [block for block in before if block.place < known]
    for place, need in enumerate(islice(facts.named, known, None), known):
        index, window = need.file.start // BLOCK_TOKENS, need.file.window
        if need.file.kind == "block" and index < len(hashes):
            hash_ = window_block_hash(hashes[index], window) if window else hashes[index]
            found.append(SharedBlock(hash_, index, place))
    return sorted(found, key=lambda block: (block.index, block.place))


def _named_blobs(
    message: Any, tokens: Sequence[int], hash_: str, chain: Sequence[str], known: int
) -> Iterator[NamedBlob]:
    """But for the leading ones that are known."""
    if keeps_all_tokens(message.kv_identity):
        yield from _named_rows(message, message, file_identities(hash_, tokens, chain, known), known)
    for each in message.windows:
        files = file_identities(hash_, tokens, chain, int(each.first_block), each.window)
        yield from _named_rows(message, each, files[: len(each.blocks) + each.HasField("tail")])
    schema = _state_schema(message.kv_identity) if message.states else None
    for point in message.states:
        yield NamedBlob(Digest.from_proto(point.digest), state_identity(hash_, tokens, point.tokens, chain), schema)


def _known_rows(message: Any, before: ManifestFacts) -> Sequence[NamedBlob]:
    """The leading blobs that a manifest of the same KV identity names, too, whose tokens this one begins with."""

    named = before.named[: len(before.chain)] if keeps_all_tokens(message.kv_identity) else ()
    same = 0
    for each, digest in zip(named, message.blocks, strict=False):
        if each.digest.hash != digest.hash or each.digest.size_bytes != digest.size_bytes:
            break
        same += 1
    return named[:same]


def _state_schema(identity: identity_pb2.KvIdentity) -> str | None:
    """The same for all states; None if the layout does not describe them."""
    try:
        return schema_hash(Layout(expected_state_tensors(identity)).text)
    except HeaderError:
        return None


@lru_cache(maxsize=512)  # a layout has one for each length of a tail
def _schema_of_rows(identity: bytes, rows: int, group: int) -> str:
    return schema_hash(row_layouts(identity, group).layout(rows).text)


def _named_rows(
    message: Any, listed: manifest_pb2.WindowBlocks, files: Sequence[FileIdentity], first: int = 0
) -> Iterator[NamedBlob]:
    identity = message.kv_identity.SerializeToString(deterministic=True)
    schemas = {
        (rows, group): _schema_of_rows(identity, rows, group)
        for rows, group in {(file.tokens, file.window) for file in files}
    }
    digests = [*listed.blocks[first:], *((listed.tail,) if listed.HasField("tail") else ())]
    for digest, file in zip(Digest.from_protos(digests), files, strict=True):
        yield NamedBlob(digest, file, schemas[file.tokens, file.window])
