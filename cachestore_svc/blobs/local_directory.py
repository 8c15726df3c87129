"""Blobs as files in one local directory, at paths made of the namespace's hash and the digest's hex digits alone."""

import builtins
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvasir.errors import InvalidArgument
from kvasir.formats.blob_place import HANDED, is_token, namespace_place
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import Aside, Damaged, Listing, NotHanded
from cachestore_svc.blobs.disk import NO_FILE, Disk, refusal

PART_SUFFIX = ".part"
_DIRECTORY_NAME = re.compile(r"[0-9a-f]{32}")
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")
_BLOB_NAMES = re.compile(r"(?:\n[0-9a-f]{64})*+")
_ASIDE_NAME = re.compile(r"([0-9a-f]{64})\.aside-([0-9]{1,15})")
_SHELF_NAME = re.compile(r"[0-9a-f]{2}")
_ALL_SHELVES = [f"{number:02x}" for number in range(256)]
_LOCKS = 1024
# These errors last: the device lost the bytes, or something else lies where they should.
_LASTING = (errno.EIO, errno.EISDIR, errno.ELOOP, NO_FILE, errno.ENODEV)


class LocalDirectory:
    """Implements `BlobBackend`: a folder for each namespace. The process that locks the data directory is alone."""

    is_shared = False

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self._opened: dict[str, LocalBlobs] = {}
        self._made: dict[Path, bool] = {}

    @property
    def where(self) -> str:
        return str(self.root)

    def of(self, namespace: str) -> "LocalBlobs":
        return self.at(namespace_place(namespace))

    def all(self) -> list["LocalBlobs"]:
        """Folders of namespaces; other files there (.DS_Store) are not the store's."""
        return [self.at(name) for name in self.disk.names(self.root) if _DIRECTORY_NAME.fullmatch(name)]

    def remove_aside(self, aside: Aside) -> int:
        path = self.at(aside.place).aside_path(aside)
        size_bytes = self.disk.size_bytes(path) or 0
        self.disk.remove(path)
        return size_bytes

    def drop_copies(self, listed: Callable[[str, Sequence[str]], Collection[str]]) -> None:
        """There are none."""

    def at(self, name: str) -> "LocalBlobs":
        """The blobs of a place, which may have none."""
        # One object for a directory: its locks are in it.
        if name not in self._opened:
            self._opened.setdefault(name, LocalBlobs(self.root / name, self.disk, self._made))
        return self._opened[name]


class LocalBlobs:
    """`made`: directories that are durable, and whether a disk was mounted at each."""

    def __init__(self, directory: Path, disk: Disk, made: dict[Path, bool]) -> None:
        self._directory = directory
        self._shelves = directory / "blobs"
        self._handed = directory / HANDED
        self._disk = disk
        self._made = made
        self._durable_shelves: set[str] = set()
        self._locks: dict[int, threading.Lock] = {}  # made at the first need: most namespaces only rest

    @property
    def place(self) -> str:
        return self._directory.name

    def exists(self) -> bool:
        places = self._directory.parent, self._directory, self._shelves
        return self._shelves.is_dir() and all(os.path.ismount(each) for each in places if self._made.get(each))

    def expect(self) -> bool:
        places = self._directory.parent, self._directory, self._shelves
        mounted = {each for each in places if os.path.ismount(each)}
        empty = {each for each in places if each not in mounted and self._disk.is_empty(each)}
        self._made |= dict.fromkeys(mounted | empty, True)
        # macOS removes a disk's mount point with it, so a link there leads nowhere.
        return not empty and not any(each.is_symlink() and not each.exists() for each in places)

    def prepare(self, hashes: Sequence[str]) -> None:
        """Make the directories in which the blobs lie; those above them are synced once."""
        if self._durable_shelves and not self.exists():
            self._durable_shelves.clear()
        new = {hash_[:2] for hash_ in hashes} - self._durable_shelves
        if not new:
            return
        self._make_durable(self._shelves)
        for shelf in sorted(new):
            self._disk.add_directory(self._shelves / shelf)
        self._disk.fsync_directory(self._shelves)
        self._durable_shelves |= new

    def begin(self, hash_: str) -> "LocalPart":
        """The part is made where the blob will lie, so that the rename stays in one directory. Behind `prepare`."""
        if hash_[:2] not in self._durable_shelves:
            self.prepare([hash_])
        return LocalPart(self._disk, self._disk.open_append(self._part_path(hash_)))

    def receive_files(self) -> None:
        """Makes all shelves, too: no blob of a turn then waits for the sync of a new one's name."""
        self._make_durable(self._handed)
        self.prepare(_ALL_SHELVES)

    def take(self, digest: Digest, token: str) -> "LocalPart":
        """The file gets the part's name first, which the program that wrote it does not know."""
        source, path = self._handed / token, self._part_path(digest.hash)
        if self._disk.size_bytes(source) is None:
            raise NotHanded
        self.prepare([digest.hash])
        self._disk.rename(source, path)
        part = LocalPart(self._disk, self._disk.open_append(path), is_whole=True)
        if problem := part.problem_of_handed(digest.size_bytes):
            part.close()
            raise InvalidArgument.of("handed", problem)
        return part

    def handed(self) -> set[str]:
        return set(filter(is_token, self._disk.names(self._handed)))

    def remove_handed(self, token: str) -> None:
        self._disk.remove(self._handed / token)

    def publish(self, editions: Mapping[str, int]) -> None:
        """Directories are synced once, however many names are new in them."""
        for hash_ in editions:
            self._disk.rename(self._part_path(hash_), self._path(hash_))
        for shelf in sorted({hash_[:2] for hash_ in editions}):
            self._disk.fsync_directory(self._shelf_path(shelf))

    def read(self, digest: Digest, *, past_copies: bool = False) -> memoryview:  # noqa: ARG002  there are none
        data = self.bytes_of(digest.hash, digest.size_bytes + 1)
        if len(data) != digest.size_bytes:
            raise Damaged(f"expected {digest.size_bytes} bytes, found {'more' if data else 'fewer'}")
        if Digest.of(data) != digest:
            raise Damaged("its bytes have another digest")
        return data

    def bytes_of(self, hash_: str, most_bytes: int, *, past_copies: bool = False) -> memoryview:  # noqa: ARG002
        try:
            return self._disk.read(self._path(hash_), most_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in _LASTING:
                raise Damaged(f"cannot be read: {error.strerror}") from error
            raise refusal(error, f"blob {hash_}") from error

    def unverified(self, hash_: str, most_bytes: int) -> Iterator[tuple[memoryview, Aside | None]]:
        if (data := self._read_unless_longer(self._path(hash_), most_bytes)) is not None:
            yield data, None
        for aside in self._asides(hash_):
            if (data := self._read_unless_longer(self.aside_path(aside), most_bytes)) is not None:
                yield data, aside

    def size_bytes(self, hash_: str) -> int | None:
        return self._disk.size_bytes(self._path(hash_))

    def remove(self, hash_: str, edition: int = 0) -> None:  # noqa: ARG002
        self._disk.remove(self._path(hash_))

    def remove_part(self, hash_: str) -> None:
        self._disk.remove(self._part_path(hash_))

    def set_aside(self, hash_: str, now_unix_ms: int, edition: int = 0) -> Aside:  # noqa: ARG002
        aside = Aside(self.place, hash_, now_unix_ms)
        self._disk.rename(self._path(hash_), self.aside_path(aside))
        return aside

    def restore(self, aside: Aside) -> None:
        self._disk.rename(self.aside_path(aside), self._path(aside.hash))

    def list(self) -> Listing:
        listing = Listing()
        for shelf in self._disk.names(self._shelves):
            if _SHELF_NAME.fullmatch(shelf) is None:
                listing.strange.append(shelf)
                continue
            names = self._disk.names(self._shelves / shelf)
            if _are_blobs(names, shelf):
                listing.blobs.update(names)
                continue
            for name in names:
                if name[:2] == shelf and _BLOB_NAME.fullmatch(name):
                    listing.blobs.add(name)
                else:
                    self._list_other(listing, shelf, name)
        return listing

    @contextmanager
    def naming(self, *hashes: str) -> Iterator[None]:
        """All callers take the locks in one order."""
        with ExitStack() as held:
            for number in sorted({int(hash_[:3], 16) % _LOCKS for hash_ in hashes}):
                held.enter_context(self._locks.setdefault(number, threading.Lock()))
            yield

    def aside_path(self, aside: Aside) -> str:
        """Where the file of an aside lies: beside the blob that it was."""
        return f"{self._path(aside.hash)}.aside-{aside.since_unix_ms}"

    def _make_durable(self, directory: Path) -> None:
        """It is made again where somebody removed it, but not where those above are gone, too, or a disk that was
        mounted there: that disk is away, and files below it would be out of sight when it is back.
        """
        for each in (self._directory.parent, self._directory, directory):
            was_mounted = self._made.get(each)
            if was_mounted is not None and each.is_dir() and (not was_mounted or os.path.ismount(each)):
                continue
            if was_mounted or (was_mounted is not None and each != directory):
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            self._disk.make_directory(each)
            self._made[each] = os.path.ismount(each)

    def _read_unless_longer(self, path: str, most_bytes: int) -> memoryview | None:
        with suppress(OSError):
            size = self._disk.size_bytes(path)
            if size is not None and size <= most_bytes:
                return self._disk.read(path, size + 1)
        return None

    # Texts: to make a Path takes as long as to open a file.

    def _path(self, hash_: str) -> str:
        return f"{self._shelf_path(hash_[:2])}/{hash_}"

    def _part_path(self, hash_: str) -> str:
        return f"{self._path(hash_)}{PART_SUFFIX}"

    def _shelf_path(self, shelf: str) -> str:
        return f"{self._shelves}/{shelf}"

    def _asides(self, hash_: str) -> builtins.list[Aside]:
        names = self._disk.names(self._shelf_path(hash_[:2]))
        found = [_ASIDE_NAME.fullmatch(name) for name in names if name.startswith(f"{hash_}.")]
        return [Aside(self.place, hash_, int(match[2])) for match in found if match]

    def _list_other(self, listing: Listing, shelf: str, name: str) -> None:
        hash_ = name.removesuffix(PART_SUFFIX)
        if (aside := _ASIDE_NAME.fullmatch(name)) and name[:2] == shelf:
            listing.asides.add(Aside(self.place, aside[1], int(aside[2])))
        elif _BLOB_NAME.fullmatch(hash_) is None or hash_[:2] != shelf:
            listing.strange.append(name)
        else:
            listing.parts.add(hash_)


def _are_blobs(names: Sequence[str], shelf: str) -> bool:
    """Whether all of these are names of blobs that lie on this shelf. A look at each takes many times as long."""
    text = "\n".join(("", *names))
    count = text.count("\n")
    return count == len(names) == text.count(f"\n{shelf}") and _BLOB_NAMES.fullmatch(text) is not None


class LocalPart:
    def __init__(self, disk: Disk, descriptor: int, *, is_whole: bool = False) -> None:
        self._disk = disk
        self._descriptor = descriptor
        self._is_whole = is_whole  # another program wrote it: it is synced while it is read
        self._syncing: _Syncing | None = None
        self._found = os.fstat(descriptor)
        self._size_bytes = self._found.st_size

    def problem_of_handed(self, size_bytes: int) -> str:
        """Why the file is none that a caller of this user wrote whole, and for nobody else; "" if it is."""
        status = self._found
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600 or status.st_nlink != 1:
            return "it is not this user's alone"
        return "" if status.st_size == size_bytes else f"expected {size_bytes} bytes, found {status.st_size}"

    def pieces(self) -> Iterator[memoryview]:
        if self._is_whole:
            self.begin_sync()
        yield from self._disk.read_back(self._descriptor, self._size_bytes)

    def append(self, data: bytes | memoryview) -> None:
        self._forget_sync()
        self._disk.write(self._descriptor, data)
        self._size_bytes += len(data)
        self._disk.begin_writing_back(self._descriptor)

    def cut(self, size_bytes: int) -> None:
        self._forget_sync()
        self._disk.truncate(self._descriptor, size_bytes)
        self._size_bytes = size_bytes

    def begin_sync(self) -> None:
        self._syncing = self._syncing or _Syncing(self._disk, self._descriptor)

    def sync(self) -> None:
        if self._syncing is None:
            self._disk.fsync(self._descriptor)
        else:
            self._syncing.end()

    def close(self) -> int:
        self._forget_sync()  # it has the descriptor, whose number is another file's next
        self._disk.close(self._descriptor)
        return self._size_bytes

    def _forget_sync(self) -> None:
        syncing, self._syncing = self._syncing, None
        if syncing is not None:
            syncing.thread.join()


class _Syncing:
    """A file's sync on a thread of its own."""

    def __init__(self, disk: Disk, descriptor: int) -> None:
        self._disk = disk
        self._descriptor = descriptor
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._sync, name="store-sync")
        self.thread.start()

    def end(self) -> None:
        """Wait for it. Raises why it failed."""
        self.thread.join()
        if self._failure is not None:
            raise self._failure

    def _sync(self) -> None:
        try:
            self._disk.fsync(self._descriptor)
        except BaseException as error:  # noqa: BLE001  it is raised where somebody waits for it
            self._failure = error
