"""A backup's folder: objects named by the BLAKE3 digest of their bytes, and the list of files that are made of them.

The list is replaced last: a backup that is cut short leaves the one before it whole. Nothing is reached through a
symbolic link."""

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

from blake3 import blake3

from kvasir.errors import DataLoss, FailedPrecondition, NotFound
from kvasir.syncing import sync, sync_disk_of, sync_names

LIST, LOCK, _OBJECTS, _FORMAT = "kvasir-backup.json", "kvasir-backup.lock", "objects", 1
_NEW = ".new-"  # what the name of an object that is being copied begins with
_PIECE_BYTES = 1 << 20
_MOST_LIST_BYTES = 1 << 30  # of some million files
_MOST_NAME_BYTES = 255
_HASH = re.compile(r"[0-9a-f]{64}")


class Kept(NamedTuple):
    """The bytes of a file: an object's name and size."""

    hash: str
    size_bytes: int


Files = Mapping[str, Kept]  # by their paths in the home


class BackupFolder:
    """An open folder. No other command writes there meanwhile."""

    def __init__(self, root: Path, descriptor: int) -> None:
        self.root = root
        self._folder = descriptor

    @classmethod
    @contextlib.contextmanager
    def open(cls, root: Path) -> Iterator[Self]:
        """Raises NotFound, and FailedPrecondition where another command uses it, or it is a link."""
        with _directory(root) as descriptor, _locked(root, descriptor):
            yield cls(root, descriptor)

    def files(self) -> Files:
        """The files of the newest backup. Raises NotFound, DataLoss."""
        try:
            with _file(self._folder, LIST, self.root / LIST) as source:
                return _files(_text(source))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            text = f"{str(error) or type(error).__name__}; this backup cannot be restored"
            raise damaged(self.root / LIST, text) from None

    def newest(self) -> tuple[Files, int]:
        """The files of the newest backup, and when it was made, in Unix nanoseconds; none, and 0. Raises DataLoss."""
        try:
            made_ns = os.stat(LIST, dir_fd=self._folder, follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return {}, 0
        return self.files(), made_ns

    def has(self, kept: Kept) -> bool:
        """Whether an object of this size is there. Its bytes are not read."""
        try:
            with self._shelf(kept.hash) as shelf:
                found = os.stat(kept.hash, dir_fd=shelf, follow_symlinks=False)
        except (NotFound, FileNotFoundError):
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == kept.size_bytes

    def add(self, source: Path) -> Kept:
        """Copy a file's bytes, unless they are there. Raises FileNotFoundError."""
        with _file(None, source, source) as opened, _made(self._folder, _OBJECTS, self.root) as objects:
            name = f"{_NEW}{os.getpid()}"
            new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=objects)
            try:
                with os.fdopen(new, "wb") as out:
                    kept = _copied(opened, out.write)
                with _made(objects, kept.hash[:2], self.root / _OBJECTS) as shelf:
                    os.rename(name, kept.hash, src_dir_fd=objects, dst_dir_fd=shelf)
            except BaseException:
                os.unlink(name, dir_fd=objects)
                raise
        return kept

    def copy(self, kept: Kept, target: Path) -> None:
        """Write an object to a new file, 0600. Raises DataLoss unless its bytes are those of its digest."""
        where = self.root / _OBJECTS / kept.hash[:2] / kept.hash
        new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(new, "wb") as out:
            try:
                with self._shelf(kept.hash) as shelf, _file(shelf, kept.hash, where) as source:
                    if (size_bytes := os.fstat(source).st_size) != kept.size_bytes:  # a few bytes on disk may claim any
                        raise damaged(where, f"expected {kept.size_bytes} bytes, found {size_bytes}")
                    found = _copied(source, out.write)
            except (NotFound, FailedPrecondition) as error:
                raise damaged(where, error.message.removeprefix(f"{where}: ")) from None
        if found != kept:
            raise damaged(where, "its bytes have another digest")

    def finish(self, files: Files) -> int:
        """Make these the backup's files, and remove the objects that it does not need any more; returns their bytes."""
        text = json.dumps({name: [*kept] for name, kept in sorted(files.items())})
        data = json.dumps({"format": _FORMAT, "files": json.loads(text), "blake3": blake3(text.encode()).hexdigest()})
        sync_disk_of(self.root)  # the objects: one after the other takes far longer
        new = os.open(f"{LIST}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=self._folder)
        with os.fdopen(new, "w") as out:
            out.write(data)
            out.flush()
            sync(out.fileno())
        os.rename(f"{LIST}.new", LIST, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        sync_names(self._folder)
        return self._remove_all_but({kept.hash for kept in files.values()})

    def _remove_all_but(self, needed: Collection[str]) -> int:
        removed_bytes = 0
        with _made(self._folder, _OBJECTS, self.root) as objects:
            found = {each.name: each.is_dir(follow_symlinks=False) for each in os.scandir(objects)}
            for name in (name for name, is_shelf in found.items() if name.startswith(_NEW) and not is_shelf):
                os.unlink(name, dir_fd=objects)  # of a backup that was killed
            for shelf_name in sorted(name for name, is_shelf in found.items() if is_shelf):
                with _below(objects, shelf_name, self.root / _OBJECTS) as shelf:
                    names = {each.name for each in os.scandir(shelf)}
                    for name in sorted(filter(_HASH.fullmatch, names - {*needed})):
                        removed_bytes += os.stat(name, dir_fd=shelf, follow_symlinks=False).st_size
                        os.unlink(name, dir_fd=shelf)
        return removed_bytes

    @contextlib.contextmanager
    def _shelf(self, hash_: str) -> Iterator[int]:
        shelf_name, objects = hash_[:2], self.root / _OBJECTS
        with _below(self._folder, _OBJECTS, self.root) as above, _below(above, shelf_name, objects) as shelf:
            yield shelf


def damaged(where: Path, problem: str) -> DataLoss:
    return DataLoss(f"{where}: {problem}", reason="BACKUP_DAMAGED")


def _text(source: int) -> bytes:
    """Of a list. Raises ValueError for one that no backup has."""
    if (size_bytes := os.fstat(source).st_size) > _MOST_LIST_BYTES:
        raise ValueError(f"expected at most {_MOST_LIST_BYTES} bytes, found {size_bytes}")
    return os.read(source, size_bytes + 1)


def _files(data: bytes) -> Files:
    """Raises ValueError, LookupError, TypeError, AttributeError for what is no list."""
    read = json.loads(data)
    if read["format"] != _FORMAT:
        raise ValueError(f"expected format {_FORMAT}, got {read['format']!r}")
    if blake3(json.dumps(read["files"]).encode()).hexdigest() != read["blake3"]:
        raise ValueError("its entries have another digest")
    files = {name: Kept(*kept) for name, kept in read["files"].items()}
    for name, kept in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name or "\0" in name:
            raise ValueError(f"{name!r} is no path in a home")
        if any(len(part.encode()) > _MOST_NAME_BYTES for part in path.parts):
            raise ValueError(f"{name[:80]!r} is too long for a file's name")
        if inside := next((str(each) for each in path.parents if str(each) in files), ""):
            raise ValueError(f"{name!r} lies in {inside!r}, which is a file")
        if _HASH.fullmatch(kept.hash) is None or type(kept.size_bytes) is not int:
            raise ValueError(f"{name!r} has no digest")
    return files


def _copied(source: int, write: Callable[[bytes], object]) -> Kept:
    hashed, size_bytes = blake3(), 0
    while piece := os.read(source, _PIECE_BYTES):
        write(piece)
        hashed.update(piece)
        size_bytes += len(piece)
    return Kept(hashed.hexdigest(), size_bytes)


@contextlib.contextmanager
def _locked(root: Path, folder: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            _lock(root, folder)
        except OSError:  # macOS: on a network share only files have locks
            if (file := _lock_file(folder)) is not None:
                stack.callback(os.close, file)
                _lock(root, file)
        yield


def _lock(root: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FailedPrecondition(f"{root}: another command uses this backup", reason="BACKUP_IN_USE") from None
    except OSError as error:
        raise OSError(error.errno, "its file system has no locks", str(root)) from None


def _lock_file(folder: int) -> int | None:
    """None for a reader that may not write there, and disturbs nobody."""
    try:
        return os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return None


@contextlib.contextmanager
def _file(folder: int | None, name: str | Path, where: Path) -> Iterator[int]:
    """A regular file, for reading; not through a link, and without waiting for the writer of a pipe."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        if folder is None:
            raise
        raise NotFound(f"{where}: there is no such file", reason="FILE_NOT_FOUND") from None
    except OSError as error:
        raise FailedPrecondition(f"{where}: {error.strerror}", reason="FILE_REFUSED") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FailedPrecondition(f"{where}: expected a file", reason="FILE_REFUSED")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _below(folder: int, name: str, above: Path) -> Iterator[int]:
    with _directory(above / name, name, folder) as descriptor:
        yield descriptor


@contextlib.contextmanager
def _made(folder: int, name: str, above: Path) -> Iterator[int]:
    """A directory in another one, made if it is not there."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
    with _below(folder, name, above) as descriptor:
        yield descriptor


@contextlib.contextmanager
def _directory(where: Path, name: str = "", folder: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(name or where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        raise NotFound(f"{where}: there is no such directory", reason="FILE_NOT_FOUND") from None
    except OSError:
        raise FailedPrecondition(f"{where}: expected a directory, and no link", reason="FILE_REFUSED") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)
