"""The entries of blobs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.formats.block_file import FileIdentity
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.blob_checks import BlobFacts


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """The catalog's entry of a blob. A manifest has no KV identity, place or tensors."""

    id: int  # the catalog's own number of the blob, never used again
    hash: str
    size_bytes: int
    kind: str
    kv_identity_hash: str | None
    start: int | None
    tokens: int | None
    chain: str | None
    schema_hash: str | None
    is_damaged: bool
    promised_unix_ms: int
    is_brought: bool  # by an archive or from another store, or computed on what was; see provenance
    window: int  # group of a block's or tail's layers; 0 for every other blob

    @property
    def digest(self) -> Digest:
        return Digest(self.hash, self.size_bytes)

    @property
    def file(self) -> FileIdentity | None:
        """What a tensor file says of itself; None for a manifest."""
        if self.kv_identity_hash is None or self.start is None or self.tokens is None or self.chain is None:
            return None
        return FileIdentity(self.kind, self.kv_identity_hash, self.start, self.tokens, self.chain, self.window)


class BlobsView(Protocol):
    def find_blob(self, digest: Digest) -> BlobEntry | None:
        """The blob's entry, damaged or not."""

    def find_blobs(self, digests: Iterable[Digest]) -> dict[Digest, BlobEntry]:
        """The entries of listed blobs, damaged ones too. A digest whose size is another blob's finds nothing."""

    def has_hash(self, hash_: str) -> bool:
        """Whether the namespace lists a blob of this hash, damaged or not."""

    def all_hashes(self) -> set[str]:
        """Hashes of the blobs of every namespace, damaged ones too."""

    def hashes_of(self) -> set[str]:
        """Hashes of the namespace's blobs, damaged ones too."""

    def whole_blobs(self) -> list[Digest]:
        """Every blob that is not in quarantine."""

    def damaged_blobs(self) -> list[Digest]:
        """Every blob in quarantine."""

    def blobs_after(self, number: int, limit: int) -> list[tuple[int, Digest]]:
        """Blobs behind one by the catalog's number, with their own; those in quarantine too."""

    def bound_blobs(self, kv_hash: str, block_hashes: Sequence[str]) -> dict[str, BlobEntry]:
        """Blobs by those of the block hashes that are bound to one which is whole and was not brought."""


class BlobsChange(BlobsView, Protocol):
    def add_blobs(self, blobs: Sequence[tuple[Digest, BlobFacts]], now_unix_ms: int) -> list[bool]:
        """List blobs whose files are durable. False for each that replaces a damaged one."""

    def promise(self, blobs: Sequence[BlobEntry], now_unix_ms: int) -> None:
        """Note that a caller relies on these."""

    def set_damaged(self, digest: Digest, is_damaged: bool) -> bool:
        """Quarantine a blob, or take it out. True when that changed something."""
