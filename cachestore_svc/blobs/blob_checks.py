"""Checks of a blob's bytes while they arrive: a tensor file's header before anything else looks at them. Pure."""

from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3
from kvasir.errors import InvalidArgument
from kvasir.formats.block_file import MAX_HEADER_BYTES, FileIdentity, Header, HeaderError, header_size, parse_header
from kvasir.formats.manifest import MAX_MANIFEST_BYTES
from kvasir.formats.manifest_checks import MANIFEST_FORMAT

from cachestore_svc.facts.records import BlobKind

_MANIFEST_START = bytes((1 << 3, MANIFEST_FORMAT))


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """The facts of a blob that the store keeps beside its digest: for a tensor file its identity and schema."""

    kind: str  # "manifest", "block", "tail" or "state"
    identity: FileIdentity | None = None
    schema: str = ""  # its layout's text


class BlobCheck(Protocol):
    """Takes a blob's bytes in order, and finds out what they are."""

    def feed(self, data: bytes | memoryview) -> None:
        """Look at the next bytes. Raises InvalidArgument as soon as they cannot be right."""

    def finish(self) -> BlobFacts:
        """The facts of the blob, once all of it was fed. Raises InvalidArgument."""


def schema_hash(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def check_for(kind: BlobKind, size_bytes: int) -> BlobCheck:
    return TensorCheck(size_bytes) if kind is BlobKind.TENSORS else ManifestCheck()


def check_size(kind: BlobKind, size_bytes: int) -> None:
    """Raises InvalidArgument (BLOB_TOO_LARGE) for a manifest that no reader takes. Checked before room is reserved."""
    if kind is BlobKind.MANIFEST and size_bytes > MAX_MANIFEST_BYTES:
        raise InvalidArgument(
            f"size_bytes: expected at most {MAX_MANIFEST_BYTES} for a manifest, got {size_bytes}",
            reason="BLOB_TOO_LARGE",
            field="digest.size_bytes",
        )


class TensorCheck:
    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._start = bytearray()
        self._header: Header | None = None

    def feed(self, data: bytes | memoryview) -> None:
        if self._header is not None:
            return
        start: bytearray | memoryview = memoryview(data)[: 8 + MAX_HEADER_BYTES]
        if self._start:
            self._start += start
            start = self._start
        try:
            if len(start) >= 8 and len(start) >= header_size(start[:8]):
                self._header = parse_header(start, self._size_bytes)
                self._start = bytearray()
            elif start is not self._start:
                self._start += start
        except HeaderError as error:
            raise InvalidArgument(f"tensor header refused: {error}", reason="HEADER_REFUSED", field="data") from None

    def finish(self) -> BlobFacts:
        if self._header is None:
            raise InvalidArgument("tensor header refused: it is truncated", reason="HEADER_REFUSED", field="data")
        return BlobFacts(self._header.identity.kind, self._header.identity, self._header.layout.text)


class ManifestCheck:
    """Checks that the bytes begin like a Manifest of a known format; the rest is read once, at the commit. Nothing is
    kept, so many manifests that are written at once take no memory. Every serializer writes fields in the order of
    their numbers, so the format comes first; no tensor file begins like that.
    """

    def __init__(self) -> None:
        self._start = b""

    def feed(self, data: bytes | memoryview) -> None:
        if len(self._start) < len(_MANIFEST_START):
            self._start += bytes(data[: len(_MANIFEST_START) - len(self._start)])
        if not _MANIFEST_START.startswith(self._start):
            raise _no_manifest()

    def finish(self) -> BlobFacts:
        if self._start != _MANIFEST_START:
            raise _no_manifest()
        return BlobFacts("manifest")


def _no_manifest() -> InvalidArgument:
    return InvalidArgument(
        f"not a serialized Manifest of format {MANIFEST_FORMAT}", reason="MANIFEST_REFUSED", field="manifest"
    )
