"""Digests: names of bytes. BLAKE3-256 and a size, together.

The hash is exactly 64 lower-case hex digits, by full match. A digest from the wire becomes a file name, so no other
text may pass (LESSONS: a "digest" used as a path).
"""

import re
from dataclasses import dataclass

from blake3 import blake3

from kvasir.cachestore.v1 import manifest_pb2

_HASH = re.compile(r"[0-9a-f]{64}")


def is_hash(text: str) -> bool:
    """True for exactly 64 lower-case hex digits."""
    return _HASH.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Digest:
    """The BLAKE3-256 of some bytes, in hex, and their number. Raises ValueError for other values."""

    hash: str
    size_bytes: int

    def __post_init__(self) -> None:
        if not is_hash(self.hash):
            raise ValueError("digest hash: expected 64 lower-case hex digits")
        if self.size_bytes < 0:
            raise ValueError(f"digest size_bytes: expected 0 or more, got {self.size_bytes}")

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> "Digest":
        return cls(blake3(data).hexdigest(), len(memoryview(data).cast("B")))

    @classmethod
    def from_proto(cls, message: manifest_pb2.Digest) -> "Digest":
        return cls(message.hash, message.size_bytes)

    def to_proto(self) -> manifest_pb2.Digest:
        return manifest_pb2.Digest(hash=self.hash, size_bytes=self.size_bytes)

    def __str__(self) -> str:
        return f"{self.hash[:12]}…/{self.size_bytes}"


class Hasher:
    """Takes bytes piece by piece and gives the digest of all of them."""

    def __init__(self) -> None:
        self._blake3 = blake3()
        self._size_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        self._blake3.update(data)
        self._size_bytes += len(data)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def digest(self) -> Digest:
        return Digest(self._blake3.hexdigest(), self._size_bytes)
