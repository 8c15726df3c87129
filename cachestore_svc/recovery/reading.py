"""Reads the manifest of a version as the index names it: plain, or sealed and under a sealed name."""

from collections.abc import Sequence
from dataclasses import replace

from kvasir.formats.block_file import FileIdentity
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import BlobBackend
from cachestore_svc.blobs.blob_checks import BlobFacts
from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock, read_manifest, shared_blocks
from cachestore_svc.index.ports.history import ReadManifest
from cachestore_svc.sealing.sealed_names import REQUEST, PlainNames
from cachestore_svc.sealing.seals import Seals


def manifest_reader(backend: BlobBackend, seals: Seals) -> ReadManifest:
    """Reads manifests of any namespace. `backend` opens what is sealed."""

    def read(namespace: str, digest: Digest) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
        names = seals.names_of(namespace)
        return as_index_has_it(names, namespace, read_manifest(backend.of(namespace).read(names.open_digest(digest))))

    return read


def as_index_has_it(
    names: PlainNames, namespace: str, facts: ManifestFacts
) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
    """A manifest's facts, and its blocks that others may find."""
    shared = shared_blocks(facts, namespace)
    return seal_manifest(names, facts), [replace(each, block_hash=names.keyed(each.block_hash)) for each in shared]


def seal_blob(names: PlainNames, facts: BlobFacts) -> BlobFacts:
    """The facts of a blob as the index has them."""
    if facts.identity is None:
        return facts
    return replace(facts, identity=_sealed(names, facts.identity))


def seal_manifest(names: PlainNames, facts: ManifestFacts) -> ManifestFacts:
    """The facts of a manifest as the index has them, but for its token ids, which no index keeps."""
    named = (replace(need, digest=names.digest(need.digest), file=_sealed(names, need.file)) for need in facts.named)
    return replace(facts, request_id=names.text(REQUEST, facts.request_id), named=tuple(named))


def _sealed(names: PlainNames, file: FileIdentity) -> FileIdentity:
    return replace(file, chain=names.keyed(file.chain))
