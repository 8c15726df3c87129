"""What is asked of a blob's bytes while they arrive, besides their digest. Pure.

A tensor file's header is checked as soon as it is whole, before anything else looks at the bytes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3
from google.protobuf.message import DecodeError
from kvasir.block_file import FileIdentity, Header, HeaderError, TensorSpec, header_size, parse_header
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument

from cachestore_svc.records import MANIFEST_FORMAT, BlobKind


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """What the store keeps of a blob beside its digest: for a tensor file its identity and schema."""

    kind: str  # "manifest", "block", "tail" or "state"
    identity: FileIdentity | None = None
    schema: str = ""  # schema_text of its tensors


class BlobCheck(Protocol):
    """Is fed a blob's bytes in order, and says what they are."""

    def feed(self, data: bytes | memoryview) -> None:
        """Look at the next bytes. Raises InvalidArgument as soon as they cannot be right."""

    def finish(self) -> BlobFacts:
        """What the blob is, once all of it was fed. Raises InvalidArgument."""


def schema_text(tensors: Sequence[TensorSpec]) -> str:
    """Names, types and shapes of a file's tensors, in order: equal texts are equal schemas."""
    return json.dumps([[tensor.name, tensor.dtype, *tensor.shape] for tensor in tensors], separators=(",", ":"))


def schema_hash(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def schema_tensors(text: str) -> tuple[TensorSpec, ...]:
    """The tensors of a schema_text."""
    return tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, *shape in json.loads(text))


def check_for(kind: BlobKind, size_bytes: int) -> BlobCheck:
    """The check for a blob of this kind that will have this many bytes."""
    return TensorCheck(size_bytes) if kind is BlobKind.TENSORS else ManifestCheck()


class TensorCheck:
    """Reads a tensor file's header, and lets the tensors pass."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._start = bytearray()
        self._header: Header | None = None

    def feed(self, data: bytes | memoryview) -> None:
        if self._header is not None:
            return
        self._start += data
        try:
            if len(self._start) >= 8 and len(self._start) >= header_size(bytes(self._start[:8])):
                self._header = parse_header(bytes(self._start), self._size_bytes)
                self._start.clear()
        except HeaderError as error:
            raise InvalidArgument(f"tensor header refused: {error}", reason="HEADER_REFUSED", field="data") from None

    def finish(self) -> BlobFacts:
        if self._header is None:
            raise InvalidArgument("tensor header refused: it is truncated", reason="HEADER_REFUSED", field="data")
        return BlobFacts(self._header.identity.kind, self._header.identity, schema_text(self._header.tensors))


class ManifestCheck:
    """Sees that the bytes are a Manifest of a format that this store knows. What it names is checked at commit."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._data += data

    def finish(self) -> BlobFacts:
        parse_manifest(bytes(self._data))
        return BlobFacts("manifest")


def parse_manifest(data: bytes | memoryview) -> manifest_pb2.Manifest:
    """The message. Raises InvalidArgument for what is not one, or of another format."""
    try:
        message = manifest_pb2.Manifest.FromString(bytes(data))
    except DecodeError:
        raise InvalidArgument("not a serialized Manifest", reason="MANIFEST_REFUSED", field="manifest") from None
    if message.format != MANIFEST_FORMAT:
        raise InvalidArgument(
            f"manifest: expected format {MANIFEST_FORMAT}, got {message.format}",
            reason="MANIFEST_REFUSED",
            field="manifest",
        )
    return message
