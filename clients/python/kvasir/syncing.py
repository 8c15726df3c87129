"""Files that survive a loss of power: fsync, and on macOS F_FULLFSYNC, where fsync alone does not. And directories that
survive no program: the next one of its kind removes those of a killed one. And in which directories others may write.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shlex
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

SHORT_ROOT = Path("/tmp")  # noqa: S108 - a socket's path must fit into a hundred bytes
_KEPT = stat.S_ISVTX  # of a directory's mode: a mark that needs no room on a disk
_SUFFIX = "~"  # no name that a user chose is taken for one of a killed program, as PREFIX-20261130
_FOLDER, _AT_ONCE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, fcntl.LOCK_EX | fcntl.LOCK_NB
_WRITES = 9
_OF_SHARES = {errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.ENOENT}  # the last one is macOS's, for SMB
_FULL_AND_WAIT = 0x01 | 0x02  # macOS: SYNC_VOLUME_FULLSYNC, SYNC_VOLUME_WAIT
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
_BEGINS = 0x02  # SYNC_FILE_RANGE_WRITE


def why_not_own(directory: Path) -> str:
    """Why another user may write in it, or in what a link leads to; empty if none may. Raises OSError."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return f"{directory.resolve()}: belongs to another user (uid {status.st_uid}); expected a directory of yours"
    if status.st_mode & 0o022:
        return f"{directory}: others can write there; run: chmod 700 {shlex.quote(str(directory))}"
    return ""


def sync(descriptor: int) -> None:
    """The file's bytes, or the directory's names, survive a loss of power on return. Raises OSError."""
    if (full_sync := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(descriptor, full_sync)
        except OSError as error:
            # A file system without it (a network share, some volumes of others) has fsync only; SQLite does the same.
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(descriptor)


def begin_writing_back(descriptor: int) -> None:
    """Let the disk begin with the file's bytes where the system can: a `sync` then waits less. It promises nothing."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _BEGINS)


def sync_disk_of(path: Path) -> None:
    """All that was written to the file system of a path survives a loss of power on return."""
    # sync() of macOS does not wait for the disk.
    of_volume = getattr(ctypes.CDLL(None), "sync_volume_np", None)
    if of_volume is None or of_volume(os.fsencode(path), _FULL_AND_WAIT) != 0:
        os.sync()


def synced_write_s(directory: Path, clock: Callable[[], float]) -> float:
    """The median of small writes in this directory that survive a loss of power. Raises OSError."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:  # without a name: a kill leaves nothing
        for _ in range(_WRITES):
            began = clock()
            os.pwrite(file.fileno(), b"k" * 4096, 0)
            sync(file.fileno())
            times.append(clock() - began)
    return sorted(times)[_WRITES // 2]


def try_file(directory: Path) -> None:
    """Begin a file without a name there, and end it; where there are none such, set the directory's times to their
    present values. Raises OSError where the disk takes no change.
    """
    try:
        os.close(os.open(directory, getattr(os, "O_TMPFILE", os.O_DIRECTORY) | os.O_RDWR, 0o600))
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP):
            raise
        now = directory.stat()
        os.utime(directory, ns=(now.st_atime_ns, now.st_mtime_ns))


def sync_directory(path: Path) -> None:
    """As `sync_names`, of a directory by its path."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(descriptor)
    finally:
        os.close(descriptor)


def sync_names(descriptor: int) -> None:
    """The directory's names survive a loss of power on return, except on a file system that cannot sync directories, as
    a network share. Raises OSError."""
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _OF_SHARES:
            raise


class Scratch:
    """A new directory, until the block or the program ends. It holds a lock on it, which ends with the program, however
    that ends; so those of this prefix that nobody holds are removed first: they may be large, and secret."""

    def __init__(self, prefix: str, directory: Path | None = None) -> None:
        """`directory`: left out, the system's for temporary files."""
        directory = directory or Path(tempfile.gettempdir())
        for left in directory.glob(f"{glob.escape(prefix)}????????{_SUFFIX}"):
            with contextlib.suppress(OSError):  # in use, another user's, or where no lock can be had
                _remove_unheld(left)
        self.path, held = _made(prefix, directory)
        self._end = weakref.finalize(self, _removed, self.path, held)

    def keep(self) -> None:
        """The directory stays, also when the next program begins."""
        self.path.chmod(0o700 | _KEPT)
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()


def _made(prefix: str, directory: Path) -> tuple[Path, int]:
    """Another program may remove the directory before it is locked: then another one is made."""
    while True:
        path = Path(tempfile.mkdtemp(_SUFFIX, prefix, directory))
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, _FOLDER)
            try:
                fcntl.flock(descriptor, _AT_ONCE)
            except BlockingIOError:
                os.close(descriptor)
                continue
            except OSError:
                pass  # no locks there, as on NFS: nobody can remove it either
            if path.exists():
                return path, descriptor
            os.close(descriptor)


def _removed(path: Path, descriptor: int) -> None:
    if not os.fstat(descriptor).st_mode & _KEPT:
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _remove_unheld(path: Path) -> None:
    """Raises OSError where another program holds it, or it cannot be locked."""
    descriptor = os.open(path, _FOLDER)
    try:
        fcntl.flock(descriptor, _AT_ONCE)
        found = os.fstat(descriptor)
        if found.st_uid == os.getuid() and not found.st_mode & _KEPT:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
