"""The claims of this user's engines to a device's memory, so that two together do not take more than it has."""

import asyncio
import contextlib
import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvasir.errors import FailedPrecondition
from kvasir.waits import WORK_S

_LOCK = "lock"
_MAX_BYTES = 32
_CLOSED = -1  # no file's number


class ClaimsUnusable(FailedPrecondition):
    """The directory of the claims cannot be written, or belongs to another user."""


class Claims:
    """A directory with a file of each engine: its bytes. The engine locks its file, so a claim ends with the process,
    however it ends.
    """

    def __init__(self, directory: Path | None = None, *, card: str = "") -> None:
        """`directory`: left out, the user's own below the one for temporary files. `card`: a GPU whose memory is its
        own, and has claims of its own; without one, the machine's RAM. Raises ClaimsUnusable.
        """
        self._gate = threading.Lock()  # a model may be loaded just as the file is made again
        try:
            directory = directory or Path(tempfile.gettempdir()) / f"kvasir-memory-{os.getuid()}"
            self._directory = directory.with_name(f"{directory.name}-{card}") if card else directory
            self._begin()
        except OSError as error:
            text = f"claims to memory cannot be written: {error}; TMPDIR names another directory"
            raise ClaimsUnusable(text, reason="NO_CLAIMS") from None

    def _begin(self, claimed: bytes = b"") -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._directory.lstat()  # once: whoever owns the entry could change it between two questions
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{self._directory}: another user's")
        with self._locked():
            descriptor, name = tempfile.mkstemp(dir=self._directory)
            self._file, self._path = descriptor, Path(name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.pwrite(descriptor, claimed, 0)

    async def keep(self) -> None:
        """Until it is cancelled: systems remove temporary files that nobody touched for days."""
        while True:
            await asyncio.sleep(WORK_S)
            with contextlib.suppress(OSError):
                self._touch()

    def _touch(self) -> None:
        """Make the file again, too, if it was removed: a machine sleeps for days."""
        with self._gate:
            if self._path.exists():
                os.utime(self._file)
                return
            before = self._file
            self._begin(os.pread(before, _MAX_BYTES, 0))
            os.close(before)

    def claim(self, decide: Callable[[int], int]) -> int:
        """Claim the bytes that `decide` makes of those that others claim, while nobody else decides. An error of
        its leaves the claim as it was.
        """
        self._touch()
        with self._locked():
            size_bytes = decide(self._of_others())
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(size_bytes).encode(), 0)
        return size_bytes

    def of_others(self) -> int:
        """Bytes that other living engines claim."""
        with self._locked():  # a file that its engine has made and not locked yet looks like one that was left behind
            return self._of_others()

    def _of_others(self) -> int:
        return sum(_claimed(path) for path in self._directory.iterdir() if path not in (self._path, self._lock_path))

    def close(self) -> None:
        with self._gate:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = _CLOSED  # nobody makes it again

    @property
    def _lock_path(self) -> Path:
        return self._directory / _LOCK

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock_path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _claimed(path: Path) -> int:
    """Bytes of an engine's claim; 0, and its file is removed, if it does not live."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read(_MAX_BYTES) or b"0")
            path.unlink(missing_ok=True)
    except (OSError, ValueError):
        return 0
    return 0
