"""Reads the manifest of a version as the index names it: plain, or sealed and under a sealed name."""

from collections.abc import Sequence

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import BlobBackend
from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock, read_manifest, shared_blocks
from cachestore_svc.index.catalog import ReadManifest
from cachestore_svc.sealing.sealed_facts import seal_manifest, seal_shared
from cachestore_svc.sealing.sealed_names import PlainNames
from cachestore_svc.sealing.seals import Seals


def manifest_reader(backend: BlobBackend, seals: Seals) -> ReadManifest:
    """Reads manifests of any namespace. `backend` opens what is sealed."""

    def read(namespace: str, digest: Digest) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
        names = seals.names_of(namespace) or PlainNames()
        return as_index_has_it(names, namespace, read_manifest(backend.of(namespace).read(names.open_digest(digest))))

    return read


def as_index_has_it(
    names: PlainNames, namespace: str, facts: ManifestFacts
) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
    """A manifest's facts, and its blocks that others may find."""
    return seal_manifest(names, facts), seal_shared(names, shared_blocks(facts, namespace))
