"""Manifests as commits need them. A long line's last one is kept for a while: the next one begins with its tokens and
blocks, which are not read and hashed again.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.formats.digest import Digest
from kvasir.server.fair_shares import Shares

from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock, read_manifest, shareable_hashes, shared_blocks

KEPT_BYTES = 32 << 20
_LEAST_TOKENS = 4_096  # of fewer all is read in a millisecond
_BYTES_PER_NAME = 430  # measured, of a blob that is named or shared: a manifest of few tokens may name many
_READ_BYTES = 16  # at most, of a byte of a KV identity


@dataclass(frozen=True, slots=True)
class KnownManifest:
    """A stored manifest: its facts, and its blocks that others may find, with the hashes of these."""

    facts: ManifestFacts
    shared: Sequence[SharedBlock]
    hashes: Sequence[str] = ()


class KnownManifests:
    """From any thread."""

    def __init__(self, least_tokens: int = _LEAST_TOKENS) -> None:
        """`least_tokens`: of a manifest that is kept."""
        self._least_tokens = least_tokens
        self._lock = threading.Lock()
        self._shares = Shares(KEPT_BYTES)
        self._kept: OrderedDict[tuple[str, str], KnownManifest] = OrderedDict()  # by namespace and manifest

    def read(self, namespace: str, manifest: Digest, data: bytes | memoryview, *, bind_shared: bool) -> KnownManifest:
        """Read the bytes of a manifest. Raises InvalidArgument."""
        before: list[KnownManifest] = []

        def facts_of(parent: str) -> ManifestFacts | None:
            with self._lock:
                found = self._kept.get((namespace, parent))
            before[:] = () if found is None else (found,)
            return found.facts if found else None

        facts = read_manifest(data, facts_of)
        known, shared = (before[0].hashes, before[0].shared) if before else ((), ())
        hashes = shareable_hashes(facts, namespace, known[: facts.known_blocks]) if bind_shared else []
        as_before = min(facts.known_named, len(known), len(hashes))
        found = KnownManifest(facts, shared_blocks(facts, hashes, shared, as_before), hashes)
        if facts.packed_ids and len(facts.token_ids) >= self._least_tokens:
            self._keep(namespace, manifest.hash, found)
        return found

    def _keep(self, namespace: str, manifest: str, known: KnownManifest) -> None:
        """Instead of the manifest before it, and of the oldest of its namespace if there is no room for it."""
        with self._lock:
            for each in (manifest, known.facts.parent):
                self._drop(namespace, each)
            of_namespace = [each for owner, each in self._kept if owner == namespace]
            while not self._shares.has_room(namespace, bytes_of(known)) and of_namespace:
                self._drop(namespace, of_namespace.pop(0))
            if self._shares.take(namespace, bytes_of(known)):
                self._kept[namespace, manifest] = known

    def _drop(self, namespace: str, manifest: str) -> None:
        if (known := self._kept.pop((namespace, manifest), None)) is not None:
            self._shares.give_back(namespace, bytes_of(known))


def bytes_of(known: KnownManifest) -> int:
    facts, names = known.facts, len(known.facts.named) + len(known.shared)
    numbers_bytes = 4 * len(facts.token_ids) + len(facts.packed_ids)
    return numbers_bytes + _BYTES_PER_NAME * names + _READ_BYTES * facts.kv_identity.ByteSize()
