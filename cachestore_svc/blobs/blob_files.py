"""Blob files: where they lie, how their bytes are read and verified, and how they go.

A path is made of the namespace's own hash and of a digest's 64 hex digits; no name from outside is ever part of one.
"""

import errno
import re
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.disk import NO_FILE, Disk, refusal

PART_SUFFIX = ".part"
_DIRECTORY_NAME = re.compile(r"[0-9a-f]{32}")
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")
_ASIDE_NAME = re.compile(r"[0-9a-f]{64}\.aside-([0-9]{1,15})")
_SHELF_NAME = re.compile(r"[0-9a-f]{2}")
_LOCKS = 64
# What these say will be so the next time: the device lost the bytes, or something else lies where they should.
_LASTING = (errno.EIO, errno.EISDIR, errno.ELOOP, NO_FILE, errno.ENODEV)


def aside_since(name: str) -> int:
    """When a file was set aside, by its name."""
    return int(name.rpartition("-")[2])


class Damaged(Exception):
    """A file's bytes are not those of its digest, or the device lost them."""


@dataclass
class Listing:
    """What lies in a namespace's directory, by name."""

    blobs: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    asides: set[Path] = field(default_factory=set)
    strange: list[Path] = field(default_factory=list)

    @property
    def asides_by_hash(self) -> dict[str, Path]:
        """Files set aside, by the hash that they had as a name."""
        return {path.name.partition(".")[0]: path for path in self.asides}


class BlobFiles:
    """The files of all namespaces under one directory. Used from any thread."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self._disk = disk
        self._durable_directories: set[Path] = set()
        self.asides: set[Path] = set()
        """Files set aside, as the start found and left them."""
        self._locks: dict[Path, list[threading.Lock]] = {}

    def directory(self, namespace: str) -> Path:
        return self.root / blake3(namespace.encode()).hexdigest()[:32] / "blobs"

    def path(self, namespace: str, hash_: str) -> Path:
        return self.directory(namespace) / hash_[:2] / hash_

    def part_path(self, namespace: str, hash_: str) -> Path:
        path = self.path(namespace, hash_)
        return path.with_name(path.name + PART_SUFFIX)

    def open_part(self, namespace: str, hash_: str) -> int:
        """A descriptor of the part, made where the blob will lie, so that the rename stays in one directory."""
        path = self.part_path(namespace, hash_)
        shelf = path.parent
        for directory in (self.root, shelf.parent.parent, shelf.parent, shelf):
            if directory not in self._durable_directories:
                self._disk.make_directory(directory)
                self._durable_directories.add(directory)
        return self._disk.open_append(path)

    def publish(self, namespace: str, hash_: str) -> None:
        """Give a synced part its blob's name, durably."""
        path = self.path(namespace, hash_)
        self._disk.rename(self.part_path(namespace, hash_), path)
        self._disk.fsync_directory(path.parent)

    def remove(self, namespace: str, hash_: str) -> None:
        self._disk.remove(self.path(namespace, hash_))

    def remove_part(self, namespace: str, hash_: str) -> None:
        self._disk.remove(self.part_path(namespace, hash_))

    def part_in(self, directory: Path, hash_: str) -> Path:
        """Where a part lies in the directory of a namespace that nobody knows."""
        return directory / "blobs" / hash_[:2] / (hash_ + PART_SUFFIX)

    def set_aside(self, directory: Path, hash_: str, now_unix_ms: int) -> None:
        """Give a blob's file of a namespace's directory a name that no row can mean."""
        path = directory / "blobs" / hash_[:2] / hash_
        aside = path.with_name(f"{hash_}.aside-{now_unix_ms}")
        self._disk.rename(path, aside)
        self.asides.add(aside)

    def naming(self, namespace: str, hash_: str) -> AbstractContextManager[object]:
        """Held from giving a name to listing it, and from looking a row up to removing its file: else a sweep could
        remove the file of a blob that was just written again. Nothing else is locked inside but the index."""
        return self.naming_in(self.directory(namespace).parent, hash_)

    def naming_in(self, directory: Path, hash_: str) -> AbstractContextManager[object]:
        """The same for the directory of a namespace: no namespace waits for the locks of another."""
        if directory not in self._locks:
            self._locks.setdefault(directory, [threading.Lock() for _ in range(_LOCKS)])
        return self._locks[directory][int(hash_[:2], 16) % _LOCKS]

    def read(self, namespace: str, digest: Digest) -> memoryview:
        """The blob's bytes, verified. Raises Damaged, FileNotFoundError, and Unavailable: nothing is known of them now.

        A sweep and a new write between opening and now can make the first two untrue; see `naming`.
        """
        try:
            data = self._disk.read(self.path(namespace, digest.hash), digest.size_bytes + 1)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in _LASTING:
                raise Damaged(f"cannot be read: {error.strerror}") from error
            raise refusal(error, f"{digest}") from error
        if len(data) != digest.size_bytes:
            raise Damaged(f"expected {digest.size_bytes} bytes, found {'more' if data else 'fewer'}")
        if blake3(data).hexdigest() != digest.hash:
            raise Damaged("its bytes have another digest")
        return data

    def size_bytes(self, namespace: str, hash_: str) -> int | None:
        return self._disk.size_bytes(self.path(namespace, hash_))

    def listing(self, namespace: str) -> Listing:
        """Every name under a namespace's directory."""
        return self._listing(self.directory(namespace))

    def unknown_directories(self, namespaces: set[str]) -> list[Path]:
        """Directories of namespaces under the root that belong to none of these. Whatever else people and their systems
        leave there (.DS_Store) is not ours."""
        known = {self.directory(namespace).parent.name for namespace in namespaces}
        names = [name for name in self._disk.names(self.root) if _DIRECTORY_NAME.fullmatch(name)]
        return [self.root / name for name in names if name not in known]

    def directories(self) -> list[Path]:
        """Directories of namespaces, whoever they belong to."""
        return self.unknown_directories(set())

    def has_any(self) -> bool:
        """Whether there is any blob, of whatever namespace."""
        return any(self.listing_of(directory).blobs for directory in self.directories())

    def listing_of(self, directory: Path) -> Listing:
        """Every name under a namespace's directory."""
        return self._listing(directory / "blobs")

    def _listing(self, directory: Path) -> Listing:
        listing = Listing()
        for shelf in self._disk.names(directory):
            if _SHELF_NAME.fullmatch(shelf) is None:
                listing.strange.append(directory / shelf)
                continue
            for name in self._disk.names(directory / shelf):
                hash_ = name.removesuffix(PART_SUFFIX)
                if _ASIDE_NAME.fullmatch(name) and name[:2] == shelf:
                    listing.asides.add(directory / shelf / name)
                elif _BLOB_NAME.fullmatch(hash_) is None or hash_[:2] != shelf:
                    listing.strange.append(directory / shelf / name)
                elif hash_ == name:
                    listing.blobs.add(name)
                else:
                    listing.parts.add(hash_)
        return listing
