"""Blobs in memory: the second backend of the suite, which shows that nothing above the port needs files."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from blake3 import blake3
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import Aside, Damaged, Listing, NotHanded


@dataclass
class MemoryBlobs:
    """Implements `BlobBackend` in RAM. It outlives a store that is closed, as a disk does."""

    where: str = "memory"
    is_shared: bool = False
    _places: dict[str, "MemoryOfNamespace"] = field(default_factory=dict)

    def of(self, namespace: str) -> "MemoryOfNamespace":
        place = blake3(namespace.encode()).hexdigest()
        return self._places.setdefault(place, MemoryOfNamespace(place))

    def all(self) -> "list[MemoryOfNamespace]":
        return [each for each in self._places.values() if each.exists()]

    def drop_copies(self, listed: object) -> None:
        """There are none."""

    def remove_aside(self, aside: Aside) -> int:
        return len(self._places[aside.place].asides.pop(aside))


@dataclass
class MemoryOfNamespace:
    """Implements `NamespaceBlobs`."""

    place: str
    blobs: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, bytearray] = field(default_factory=dict)
    asides: dict[Aside, bytes] = field(default_factory=dict)
    _locks: "defaultdict[str, threading.Lock]" = field(default_factory=lambda: defaultdict(threading.Lock))

    def exists(self) -> bool:
        return bool(self.blobs or self.parts or self.asides)

    def expect(self) -> bool:
        return True

    def prepare(self, hashes: Sequence[str]) -> None:
        """A part needs nothing to lie in."""

    def begin(self, hash_: str) -> "MemoryPart":
        return MemoryPart(self.parts.setdefault(hash_, bytearray()))

    def receive_files(self) -> None:
        """Nobody can write a file into this memory."""

    def take(self, digest: Digest, token: str) -> "MemoryPart":
        raise NotHanded

    def handed(self) -> set[str]:
        return set()

    def remove_handed(self, token: str) -> None:
        """There is none."""

    def publish(self, editions: Mapping[str, int]) -> None:
        for hash_ in editions:
            self.blobs[hash_] = bytes(self.parts.pop(hash_))

    def read(self, digest: Digest, *, past_copies: bool = False) -> memoryview:
        data = self.bytes_of(digest.hash, digest.size_bytes + 1)
        if Digest.of(data) != digest:
            raise Damaged("its bytes have another digest")
        return data

    def bytes_of(self, hash_: str, most_bytes: int, *, past_copies: bool = False) -> memoryview:
        if hash_ not in self.blobs:
            raise FileNotFoundError(hash_)
        return memoryview(self.blobs[hash_])[:most_bytes]

    def unverified(self, hash_: str, most_bytes: int) -> Iterator[tuple[memoryview, Aside | None]]:
        asides = [(data, aside) for aside, data in self.asides.items() if aside.hash == hash_]
        for data, aside in [*((data, None) for key, data in self.blobs.items() if key == hash_), *asides]:
            if len(data) <= most_bytes:
                yield memoryview(data), aside

    def size_bytes(self, hash_: str) -> int | None:
        return len(self.blobs[hash_]) if hash_ in self.blobs else None

    def remove(self, hash_: str, edition: int = 0) -> None:
        self.blobs.pop(hash_, None)

    def remove_part(self, hash_: str) -> None:
        self.parts.pop(hash_, None)

    def set_aside(self, hash_: str, now_unix_ms: int, edition: int = 0) -> Aside:
        aside = Aside(self.place, hash_, now_unix_ms)
        self.asides[aside] = self.blobs.pop(hash_)
        return aside

    def restore(self, aside: Aside) -> None:
        self.blobs[aside.hash] = self.asides.pop(aside)

    def list(self) -> Listing:
        return Listing(set(self.blobs), set(self.parts), set(self.asides))

    @contextmanager
    def naming(self, *hashes: str) -> Iterator[None]:
        with ExitStack() as held:
            for hash_ in sorted(set(hashes)):
                held.enter_context(self._locks[hash_])
            yield


@dataclass
class MemoryPart:
    """Implements `Part`."""

    data: bytearray

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(bytes(self.data))

    def append(self, data: bytes | memoryview) -> None:
        self.data += data

    def cut(self, size_bytes: int) -> None:
        del self.data[size_bytes:]

    def begin_sync(self) -> None:
        """It is memory."""

    def sync(self) -> None:
        """There is nothing to lose power."""

    def close(self) -> int:
        return len(self.data)
