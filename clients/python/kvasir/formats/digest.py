"""Digests: names of bytes, BLAKE3-256 and a size. The hash becomes a file's name: 64 lower-case hex digits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from typing import TypeAlias

from blake3 import blake3

from kvasir.cachestore.v1 import manifest_pb2

Buffer: TypeAlias = bytes | bytearray | memoryview
BlobName: TypeAlias = tuple[str, int]  # a digest's hash and size: made, compared and looked up in a third of its time

_HASH_DIGITS = 64
_HASH = re.compile(r"[0-9a-f]{64}")
# From this size on, several threads hash faster than one.
_MANY_THREADS_BYTES = 1 << 20
_ROOM_BYTES = 8 << 20  # of a file that is read


def is_hash(text: str) -> bool:
    """True for exactly 64 lower-case hex digits."""
    return _HASH.fullmatch(text) is not None


def are_hashes(texts: Sequence[str]) -> bool:
    """Whether all are hashes: much faster than one after the other."""
    digits = "".join(texts)
    try:
        return {_HASH_DIGITS}.issuperset(map(len, texts)) and bytes.fromhex(digits).hex() == digits
    except ValueError:
        return False


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

    def __hash__(self) -> int:
        return hash(self.hash)  # which a text computes once

    @classmethod
    def of(cls, data: Buffer) -> "Digest":
        """The digest of these bytes. Large ones are hashed on all cores, without the interpreter's lock."""
        view = memoryview(data).cast("B")
        return cls(blake3(view, max_threads=_threads_for(len(view))).hexdigest(), len(view))

    @classmethod
    def from_proto(cls, message: manifest_pb2.Digest) -> "Digest":
        return cls(message.hash, message.size_bytes)

    @classmethod
    def from_protos(cls, messages: Sequence[manifest_pb2.Digest]) -> "list[Digest]":
        """Of many, which are checked together: a third of the time."""
        names = names_of(messages)
        made = [cls.__new__(cls) for _ in names]
        for digest, (hash_, size_bytes) in zip(made, names, strict=True):
            _SET_HASH(digest, hash_)
            _SET_SIZE(digest, size_bytes)
        return made

    def to_proto(self) -> manifest_pb2.Digest:
        return manifest_pb2.Digest(hash=self.hash, size_bytes=self.size_bytes)

    def __str__(self) -> str:
        return f"{self.hash[:12]}…/{self.size_bytes}"


# Of a frozen class: its `__init__` sets its fields so, too, and checks each.
_SET_HASH, _SET_SIZE = (vars(Digest)[name].__set__ for name in ("hash", "size_bytes"))


def names_of(messages: Sequence[manifest_pb2.Digest]) -> list[BlobName]:
    """Hashes and sizes of many digests, checked. Raises ValueError as `Digest`."""
    hashes, sizes = [each.hash for each in messages], [each.size_bytes for each in messages]
    names = list(zip(hashes, sizes, strict=True))
    if not are_hashes(hashes) or min(sizes, default=0) < 0:
        for each in names:
            Digest(*each)
    return names


def _threads_for(size_bytes: int) -> int:
    return blake3.AUTO if size_bytes >= _MANY_THREADS_BYTES else 1


class Hasher:
    """Takes bytes piece by piece and gives the digest of all of them."""

    def __init__(self, piece_bytes: int = 0) -> None:
        """`piece_bytes`: a size that the pieces have, where it is known; large ones are hashed on all cores."""
        self._blake3 = blake3(max_threads=_threads_for(piece_bytes))
        self.size_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        self._blake3.update(data)
        self.size_bytes += len(data)

    def digest(self) -> Digest:
        return Digest(self._blake3.hexdigest(), self.size_bytes)


def hash_of_file(file: FileIO) -> str:
    """Of a file, which is read: one that is mapped, and then cut short, ends this process."""
    hasher, room = Hasher(_ROOM_BYTES), memoryview(bytearray(_ROOM_BYTES))
    while count := file.readinto(room):
        hasher.update(room[:count])
    return hasher.digest().hash
