"""Files that all threads read, in pieces, the file that was begun first before others."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
from kvasir.clients.blob_memory import BlobMemory
from kvasir.formats.digest import Digest

from inference_svc.memory.store import file_reading
from inference_svc.memory.store.file_reading import FileReading, OrderedThreads

PIECES = 4
DATA = os.urandom(1000)
MEMORY = BlobMemory(0)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a file that no page cache has, in four pieces."""
    monkeypatch.setattr(file_reading, "is_cached", lambda *_: False)
    monkeypatch.setattr(file_reading, "PIECE_BYTES", -(-len(DATA) // PIECES))
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


def begun(path: Path, threads: OrderedThreads) -> FileReading:
    return FileReading(path, Digest.of(DATA), MEMORY, threads)


def waits(event: Event) -> None:
    event.wait(10)


def test_all_threads_read_one_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, read = Barrier(PIECES), os.preadv

    def read_together(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        together.wait(10)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read_together)
    assert bytes(begun(path, OrderedThreads(PIECES)).data.result(20) or b"") == DATA


@pytest.mark.parametrize(("is_cached", "pieces"), [(True, 2), (False, PIECES)])
def test_a_file_that_the_page_cache_has_is_read_in_larger_pieces(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool, pieces: int
) -> None:
    read, offsets = os.preadv, list[int]()

    def noting(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        offsets.append(offset)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(file_reading, "is_cached", lambda *_: is_cached)
    monkeypatch.setattr(file_reading, "CACHED_PIECE_BYTES", len(DATA) // 2)
    monkeypatch.setattr(os, "preadv", noting)
    assert bytes(begun(path, OrderedThreads(1)).data.result(10) or b"") == DATA
    assert offsets == [len(DATA) // pieces * piece for piece in range(pieces)]


def test_a_file_that_is_gone_costs_no_pieces_of_the_size_that_it_should_have(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.unlink()
    threads = OrderedThreads(1)
    places, submit = list[int](), threads.submit

    def noting(number: int, offset: int, work: Callable[[], None]) -> None:
        places.append(offset)
        submit(number, offset, work)

    monkeypatch.setattr(threads, "submit", noting)
    assert FileReading(path, Digest("0" * 64, 1 << 60), MEMORY, threads).data.result(10) is None
    assert len(places) == 2


def test_an_empty_file_is_read(path: Path) -> None:
    path.write_bytes(b"")
    data = FileReading(path, Digest.of(b""), MEMORY, OrderedThreads(1)).data.result(10)
    assert data is not None
    assert bytes(data) == b""


def test_work_at_the_file_that_was_begun_first_comes_first() -> None:
    threads, may_begin, ended = OrderedThreads(1), Event(), Event()
    done: list[tuple[int, int]] = []
    threads.submit(0, 0, partial(waits, may_begin))
    places = [(2, 0), (1, 1), (3, 0), (1, 0)]
    for place in places:
        threads.submit(*place, partial(done.append, place))
    threads.submit(4, 0, ended.set)
    may_begin.set()
    assert ended.wait(10)
    assert done == sorted(places)


def test_a_file_that_is_cut_while_it_is_read_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda _, buffers, offset: len(buffers[0]) - (offset > 0))
    assert begun(path, OrderedThreads(1)).data.result(10) is None


def test_an_error_of_one_piece_reaches_the_reader_and_the_rest_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fail(descriptor: int, _: object, __: int) -> int:
        calls.append(descriptor)
        raise MemoryError

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(MemoryError):
        begun(path, OrderedThreads(1)).data.result(10)
    [descriptor] = calls
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_hash_that_fails_is_an_error_of_the_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> Digest:
        raise MemoryError

    threads, may_begin = OrderedThreads(1), Event()
    threads.submit(-1, 0, partial(waits, may_begin))
    reading = begun(path, threads)
    monkeypatch.setattr(Digest, "of", fail)
    may_begin.set()
    with pytest.raises(MemoryError):
        reading.data.result(10)


def test_nothing_is_read_of_a_file_that_nobody_waits_for_any_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, may_begin, ended = OrderedThreads(1), Event(), Event()
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("it was read"))
    threads.submit(-1, 0, partial(waits, may_begin))
    reading = begun(path, threads)
    assert reading.data.cancel()
    threads.submit(100, 0, ended.set)
    may_begin.set()
    assert ended.wait(10)
    assert reading.data.cancelled()


@pytest.mark.parametrize(
    ("cached", "error", "is_there"),
    [
        (range(1000), BlockingIOError, True),
        (range(500), BlockingIOError, False),
        (range(500, 1000), BlockingIOError, False),
        ((), OSError, True),  # the file system does not know
    ],
)
def test_a_file_is_cached_if_all_bytes_are(
    monkeypatch: pytest.MonkeyPatch, cached: Sequence[int], error: type[OSError], is_there: bool
) -> None:
    def read(_: int, buffers: Sequence[Any], offset: int, flags: int) -> int:
        assert flags == 8
        if offset not in cached:
            raise error
        return len(buffers[0])

    monkeypatch.setattr(file_reading, "_NO_WAIT", 8)
    monkeypatch.setattr(os, "preadv", read)
    assert all(file_reading.is_cached(0, 1000) for _ in range(40)) is is_there


def test_a_file_is_not_cached_because_somebody_looked_whether_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does; files that were computed instead of being read passed for cached ones after six turns."""
    there = set[int]()

    def read(_: int, buffers: Sequence[Any], offset: int, __: int) -> int:
        if offset in there:
            return len(buffers[0])
        there.add(offset)
        raise BlockingIOError

    monkeypatch.setattr(file_reading, "_NO_WAIT", 8)
    monkeypatch.setattr(os, "preadv", read)
    assert not any(file_reading.is_cached(0, 1 << 40) for _ in range(20))
