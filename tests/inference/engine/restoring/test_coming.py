"""What is made of files that are still on their way is there when the last one is; a copy that failed is made again."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial

import pytest
from kvasir.formats.block_file import FileBytes

from inference_svc.engine.files.snapshots import PendingFiles, when_there
from inference_svc.kv.host_copies import failed_copies

Begun = Future[PendingFiles[bytes] | None]


@pytest.fixture(autouse=True)
def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_copies, "out", failed_copies.FailedCopies())


def files(count: int) -> list[Future[FileBytes]]:
    return [Future() for _ in range(count)]


def begun(coming: PendingFiles[bytes] | None) -> Begun:
    made: Begun = Future()
    made.set_result(coming)
    return made


def joined(parts: list[Future[FileBytes]]) -> PendingFiles[bytes]:
    return PendingFiles(parts, lambda found: b"".join(found))


def test_it_is_there_with_its_last_file_whichever_that_is() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        parts = files(3)
        asked = when_there(lambda parts=parts: begun(joined(parts).made_into(lambda data: data + b"!")))  # type: ignore[misc]
        for place in order:
            assert not asked.done()
            parts[place].set_result(b"abc"[place : place + 1])
        assert asked.result(0) == b"abc!"


def test_without_files_or_without_a_memory_it_is_there_at_once() -> None:
    assert when_there(lambda: begun(joined([]))).result(0) == b""
    assert when_there(lambda: begun(None)).result(0) is None


def test_copies_that_fail_together_are_made_again_by_threads(capsys: pytest.CaptureFixture[str]) -> None:
    tries: list[list[Future[FileBytes]]] = []

    def begin() -> Begun:
        tries.append(files(2))
        return begun(joined(tries[-1]))

    asked = [when_there(begin) for _ in range(5)]
    for failing in tries[:5]:
        failing[1].set_exception(RuntimeError("CUDA refused a copy: error 1"))
    assert len(tries) == 5, "no file is on its way any more when it is tried again"
    for failing in tries[:5]:
        failing[0].set_result(b"a")
    assert (failed_copies.out.is_refused, failed_copies.out.in_a_row, len(tries)) == (False, 1, 10)
    for coming in tries[5:]:
        for file, data in zip(coming, (b"c", b"d"), strict=True):
            file.set_result(data)
    assert [each.result(0) for each in asked] == [b"cd"] * 5
    printed = capsys.readouterr().out
    assert (printed.count("host_copy.out_failed"), printed.count("host_copy.out_refused")) == (5, 0)


def test_threads_make_no_copies_once_several_failed_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    tries: list[bool] = []

    def begin(*, without: str = "threads") -> Begun:
        tries.append(failed_copies.out.is_refused)
        [file] = files(1)
        if without == "threads" and failed_copies.out.is_refused:
            file.set_result(b"a")
        else:
            file.set_exception(RuntimeError("refused"))
        return begun(joined([file]))

    assert when_there(begin).result(0) == b"a"
    assert tries == [False] * failed_copies.MOST_FAILURES + [True]
    assert capsys.readouterr().out.count("host_copy.out_refused") == 1
    tries.clear()
    with pytest.raises(RuntimeError, match="refused"):
        when_there(partial(begin, without="anything")).result(0)
    assert len(tries) == failed_copies.MOST_FAILURES + 1


@pytest.mark.parametrize("is_copied", [False, True], ids=["no memory", "what is made of them"])
def test_other_failures_leave_threads_on(*, is_copied: bool) -> None:
    def begin() -> Begun:
        [file] = files(1)
        if is_copied:
            file.set_result(b"a")
        else:
            file.set_exception(MemoryError())
        return begun(joined([file]).made_into(lambda _: (_ for _ in ()).throw(MemoryError())))

    for _ in range(failed_copies.MOST_FAILURES):
        with pytest.raises(MemoryError):
            when_there(begin).result(0)
    assert (failed_copies.out.is_refused, failed_copies.out.in_a_row) == (False, 0)


def test_work_that_fails_or_is_never_done_ends_who_asked() -> None:
    ends: list[tuple[Callable[[Begun], object], type[BaseException]]] = [
        (lambda work: work.cancel(), CancelledError),
        (lambda work: work.set_exception(ValueError("no")), ValueError),
    ]
    for end, expected in ends:
        work: Begun = Future()
        asked = when_there(lambda work=work: work)  # type: ignore[misc]
        end(work)
        with pytest.raises(expected):
            asked.result(0)


def test_a_result_that_nobody_has_is_gone_at_once() -> None:
    """It may be a pin, which holds a memory's room."""

    class Pin:
        pass

    gc.disable()
    try:
        parts, pin = files(2), Pin()
        known, work = weakref.ref(pin), [joined(parts).made_into(partial(lambda pin, _: pin, pin))]
        asked = when_there(lambda: begun(work.pop()))
        del pin
        parts[1].set_result(b"b")
        parts[0].set_result(b"a")
        assert asked.result(0) is known()
        del asked, parts
        assert known() is None
    finally:
        gc.enable()


def test_nobody_is_hurt_if_the_asker_has_gone() -> None:
    parts = files(1)
    asked = when_there(lambda: begun(joined(parts)))
    assert asked.cancel()
    parts[0].set_result(b"a")
    assert asked.cancelled()
