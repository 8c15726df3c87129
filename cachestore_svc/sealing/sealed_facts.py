"""The facts of blobs and manifests in the form that the index keeps for a sealed namespace. Pure.

Sizes, kinds, places and the KV identity stay as they are. Digests, chains, block hashes and request ids are sealed.
"""

from collections.abc import Iterable
from dataclasses import replace

from cachestore_svc.blobs.blob_checks import BlobFacts
from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock
from cachestore_svc.sealing.sealed_names import PlainNames

# Kinds of sealed texts; see SealedNames.text.
AGENT, LABEL, VALUE, DETAIL, REQUEST = "agent", "label", "value", "detail", "request"


def seal_blob(names: PlainNames, facts: BlobFacts) -> BlobFacts:
    """The facts of a blob, its chain sealed."""
    if facts.identity is None:
        return facts
    return replace(facts, identity=replace(facts.identity, chain=names.keyed(facts.identity.chain)))


def seal_manifest(names: PlainNames, facts: ManifestFacts) -> ManifestFacts:
    """The facts of a manifest, sealed but for its token ids, which no index keeps."""
    named = (replace(need, digest=names.digest(need.digest), chain=names.keyed(need.chain)) for need in facts.named)
    return replace(facts, request_id=names.text(REQUEST, facts.request_id), named=tuple(named))


def seal_shared(names: PlainNames, shared: Iterable[SharedBlock]) -> list[SharedBlock]:
    """Blocks that other agents may find, by sealed hashes."""
    return [replace(block, block_hash=names.keyed(block.block_hash)) for block in shared]
