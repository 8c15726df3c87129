"""Tensor files on their way to the engine, added by one thread and taken by the MLX thread. `end` comes after the last
`add`: so who reads `has_ended` before `ready` misses none. Needs no MLX.
"""

from collections.abc import Callable, Iterable, Sequence

from kvasir.formats.block_file import FileBytes

from inference_svc.kv.tensor_files import CheckedFile, FileChecks


class Incoming:
    def __init__(self, expected: int, *, is_kept: bool = False) -> None:
        """`is_kept`: files that were taken may be taken again."""
        self.expected = expected
        self.has_ended = False
        self._files: list[FileBytes | None] = []
        self._is_kept = is_kept
        self._first_needed = 0
        self._wake: Callable[[], object] = lambda: None
        self._was_taken: Callable[[], object] = lambda: None

    @classmethod
    def of(cls, files: Iterable[FileBytes]) -> "Incoming":
        found = list(files)
        made = cls(len(found), is_kept=True)
        made._files += found
        made.has_ended = True
        return made

    @property
    def ready(self) -> int:
        return len(self._files)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the files that came, are needed, and were not taken."""
        return sum(len(data) for data in self._files[self._first_needed :] if data is not None)

    def add(self, data: FileBytes) -> None:
        self._files.append(data if len(self._files) >= self._first_needed else None)
        self._wake()

    def skip(self, count: int) -> None:
        """The turn needs no first files, because it shares pages. Their bytes keep no reader waiting."""
        self._first_needed = count
        for index in range(min(count, len(self._files))):
            self._files[index] = None
        self._was_taken()

    def end(self) -> None:
        self.has_ended = True
        self._wake()

    def watch(self, wake: Callable[[], object]) -> None:
        """Call `wake` now, and after each file that comes, and at the end."""
        self._wake = wake
        wake()

    def watch_taking(self, was_taken: Callable[[], object]) -> None:
        """Call `was_taken` after each file that is taken, on the thread that takes it."""
        self._was_taken = was_taken

    def leading(self, count: int) -> "Incoming":
        return Incoming.of(map(self.take, range(count)))

    def take(self, index: int) -> FileBytes:
        data = self._files[index]
        assert data is not None, "it was taken"
        if not self._is_kept:
            self._files[index] = None
            self._was_taken()
        return data


class ArrivingFiles(Sequence[CheckedFile]):
    """Incoming files, each checked when it is taken. It grows as they come."""

    def __init__(self, incoming: Incoming, checks: FileChecks) -> None:
        """Raises DataLoss for another number of files than there must be."""
        checks.check_count(incoming.expected)
        self._incoming = incoming
        self._checks = checks

    def __len__(self) -> int:
        return self._incoming.ready

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._checks.checked(index, self._incoming.take(index))
