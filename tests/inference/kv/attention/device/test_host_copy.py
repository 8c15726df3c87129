"""Rows that are sent ahead to a device arrive whole, in room that is used again only when nobody reads it."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.host_copies import failed_copies, host_copy, landings
from tests.inference.kv.attention.device.coming_files import PlayedDriver, play

UNITS = 3 << 10
REAL_LANDINGS = landings._landings
REAL_TRIAL, REAL_CHECK = host_copy._comes_back, host_copy._is_sound


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedDriver]:
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 4096)
    played = play(monkeypatch, 8 * UNITS)
    yield played
    played.gate.set()


def rows_of(seed: int, count: int = 4) -> list[host_copy.Units]:
    return [*np.random.default_rng(seed).integers(0, 1 << 16, (count, UNITS), dtype=np.uint16)]


def arrived(sent: landings.Sent) -> bool:
    """Waits, and reads."""
    found = np.array(sent.rows())
    sent.release(())
    return found.tobytes() in {np.stack(rows_of(seed, count)).tobytes() for seed in range(9) for count in range(1, 9)}


def test_each_array_has_its_own_address_after_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, wait = list[object](), mx.eval

    def kernel(*, inputs: list[mx.array], **_: Any) -> list[mx.array]:
        return [inputs[0].sum(keepdims=True).astype(mx.int64)]  # as if an array lay where its sum is

    monkeypatch.setattr(host_copy, "compiled", lambda *_: kernel)
    monkeypatch.setattr(mx, "eval", lambda *made: (waits.append(made), wait(*made)))
    arrays = [mx.full((number + 1,), 3, mx.uint16) for number in range(9)]
    assert host_copy.device_addresses(arrays) == [3 * (number + 1) for number in range(9)]
    assert host_copy.device_address(arrays[4]) == 15
    assert len(waits) == 2


def test_rows_arrive_whole_one_after_the_other(driver: PlayedDriver) -> None:
    for seed in range(9):
        sent = landings.send(rows_of(seed))
        assert sent.comes_by_itself
        assert np.array_equal(np.array(sent.rows()), np.stack(rows_of(seed)))
        sent.release(())


def test_nobody_waits_for_rows_until_they_are_read(driver: PlayedDriver) -> None:
    driver.gate.clear()
    sent = landings.send(rows_of(1))
    assert not sent.is_there
    driver.gate.set()
    assert np.array_equal(np.array(sent.rows()), np.stack(rows_of(1)))
    assert sent.is_there


def test_copies_are_made_by_the_driver_that_their_threads_began_with(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A played one's streams are none of CUDA's, which a test leaves behind with copies that have not begun."""
    driver.gate.clear()
    sent = [landings.send(rows_of(seed)) for seed in range(3)]
    monkeypatch.setattr(host_copy, "_driver", lambda: pytest.fail("another driver"))
    driver.gate.set()
    assert all(arrived(each) for each in sent)


def test_the_first_rows_get_room_that_was_made_before(driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    landings.make_room()
    monkeypatch.setattr(host_copy.mx, "zeros", lambda *_, **__: pytest.fail("room was made for rows"))
    held = [landings.send(rows_of(seed)) for seed in range(3)]
    assert [each.comes_by_itself and arrived(each) for each in held] == [True] * 3


def test_room_is_not_used_again_before_its_readers_are_there(driver: PlayedDriver) -> None:
    """A reader that is enqueued, and not evaluated, sees the rows that it was enqueued with."""
    sums = []
    for seed in range(9):
        sent = landings.send(rows_of(seed))
        sums.append(sent.rows().astype(mx.uint32).sum())
        sent.release([sums[-1]])
    assert [int(each.item()) for each in sums] == [int(np.stack(rows_of(seed)).sum()) for seed in range(9)]


def test_room_that_is_given_up_is_not_given_to_others_while_bytes_come_and_nobody_waits(driver: PlayedDriver) -> None:
    driver.gate.clear()
    landings.send(rows_of(1)).release(())
    held = [landings.send(rows_of(2)) for _ in range(2) if landings.may_send()]
    assert [(each.comes_by_itself, each.is_there) for each in held] == [(True, False)] * 2
    assert not landings.may_send()
    driver.gate.set()
    assert [np.array_equal(np.array(each.rows()), np.stack(rows_of(2))) for each in held] == [True] * 2
    for each in held:
        each.release(())
    assert all(arrived(landings.send(rows_of(seed))) for seed in range(3, 9))


def test_copies_of_what_is_given_up_are_not_begun(driver: PlayedDriver) -> None:
    driver.gate.clear()
    held, given_up = landings.send(rows_of(1)), landings.send(rows_of(2))
    given_up.release(())
    driver.gate.set()
    assert arrived(held)
    assert arrived(landings.send(rows_of(3)))
    assert driver.copies == 2 * 4 * 2, "of four rows two pieces each"


@pytest.mark.parametrize("refused", range(5))
def test_a_start_tries_again_to_copy_from_the_device_and_tells_which_memory_was_refused(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: int
) -> None:
    """One refusal in a start of an engine made every copy of its memories slow."""
    monkeypatch.setattr(host_copy, "_comes_back", REAL_TRIAL.__wrapped__)
    driver.error, driver.errors_left = 1, refused
    assert (host_copy.takes_out(), failed_copies.out.is_refused) == (refused < 3, refused >= 3)
    printed = capsys.readouterr().out
    assert printed.count("host_copy.out_failed") == min(refused, 3)
    facts = "error 1, 4096 bytes at 100 of bytes 1048576, kind 2, device 0, managed 1"
    assert printed.count(facts) == min(refused, 3) + (refused >= 3)
    failed_copies.out.in_a_row = 0


@pytest.mark.parametrize("fault", ["", "refused", "other bytes"])
def test_a_start_tells_why_threads_copy_nothing(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """Both trials fell back to MLX's slower way without a word in the log."""
    monkeypatch.setattr(host_copy, "_comes_back", REAL_TRIAL.__wrapped__)
    monkeypatch.setattr(host_copy, "_is_sound", REAL_CHECK.__wrapped__)
    if fault:
        monkeypatch.setattr(driver, "cuMemcpyDtoH_v2", lambda *_: fault == "refused")
    assert host_copy.copies_itself() is (fault == "")
    assert ("host_copy.refused" in capsys.readouterr().out) is (fault != "")
    monkeypatch.setattr(host_copy, "_is_sound", lambda: True)
    if fault == "other bytes":
        monkeypatch.setattr(driver, "cuMemcpyDtoHAsync_v2", lambda *_: 0)
        assert not host_copy.takes_out()
        assert capsys.readouterr().out.count("other bytes") == 1


def test_who_drops_rows_leaves_room_for_others(driver: PlayedDriver) -> None:
    driver.gate.clear()
    for seed in range(4):
        assert landings.send(rows_of(seed)).comes_by_itself
    driver.gate.set()
    assert arrived(landings.send(rows_of(5)))


def test_a_landing_that_cannot_be_made_takes_no_room_and_rows_are_copied_now(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(landings._Landing):
        def make_ready(self, units: int) -> None:
            raise RuntimeError(f"[malloc] Unable to allocate {2 * units} bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(landings, "_Landing", Refusing)
        for seed in range(4):
            sent = landings.send(rows_of(seed))
            assert (sent.comes_by_itself, arrived(sent)) == (False, True)
    held = [landings.send(rows_of(seed)) for seed in range(3)]
    assert [each.comes_by_itself for each in held] == [True] * 3


@pytest.mark.long(3)
@pytest.mark.skipif(
    mx.default_device().type == mx.DeviceType.gpu, reason="a GPU moves memory that played copies still write to"
)
def test_each_thread_has_its_own_room(driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who evaluates another thread's readers crashes the process."""
    monkeypatch.setattr(landings, "_landings", REAL_LANDINGS)
    found = list[bool]()

    def go_on(first: int) -> None:
        held = [landings.send(rows_of(first)) for _ in range(3)]
        found.extend(each.comes_by_itself and arrived(each) for each in held)
        found.extend(arrived(landings.send(rows_of((first + number) % 9))) for number in range(30))
        landings.drop_room()  # a thread that leaves its streams to MLX may crash the process at its end (`MlxThread`)
        mx.synchronize()
        mx.clear_streams()

    held = [landings.send(rows_of(seed)) for seed in range(3)]
    threads = [threading.Thread(target=go_on, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 132
    assert all(map(arrived, held))
    landings.drop_room()


def test_room_that_is_free_is_dropped_and_made_again(driver: PlayedDriver) -> None:
    held = landings.send(rows_of(1))
    landings.send(rows_of(2)).release(())
    landings.drop_room()
    assert len(landings._landings()._all) == 1
    assert arrived(held)
    assert arrived(landings.send(rows_of(3)))


def test_without_room_rows_are_copied_at_once_and_larger_rows_get_larger_room(driver: PlayedDriver) -> None:
    held = [landings.send(rows_of(seed)) for seed in range(3)]
    assert [each.comes_by_itself for each in held] == [True] * 3
    assert not landings.may_send()
    last = landings.send(rows_of(3))
    assert (last.comes_by_itself, last.is_there, arrived(last)) == (False, True, True)
    assert all(map(arrived, held))
    assert landings.may_send()
    assert all(arrived(landings.send(rows_of(seed, count))) for seed, count in pairwise(range(9)))


def test_a_copy_that_cuda_refuses_is_an_error_of_who_reads_it_and_no_others(driver: PlayedDriver) -> None:
    driver.error = 700
    sent: Any = landings.send(rows_of(1))
    memory = sent._landing.array
    with pytest.raises(RuntimeError, match="error 700"):
        sent.rows()
    sent.release(())
    driver.error = 0
    after: Any = landings.send(rows_of(2))
    assert after._landing.array is not memory, "CUDA may still write there"
    assert arrived(after)
    assert len(landings._landings()._all) == 1


def test_a_copy_that_is_refused_ends_when_those_before_it_have_arrived(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.local()
    unwaited = list[int]()

    def begin(*_: object) -> int:
        waits.left = 2
        return 700

    def wait(_: object) -> int:
        waits.left = getattr(waits, "left", 0) - 1
        return 0

    monkeypatch.setattr(driver, "cuMemcpyHtoDAsync_v2", begin)
    monkeypatch.setattr(driver, "cuStreamSynchronize", wait)
    copies = host_copy._copiers()
    ended = copies._threads.submit(copies._copy, [(0, np.zeros(9).ctypes.data, 1)], None)
    assert ended.exception() is not None
    copies._threads.submit(lambda: unwaited.append(waits.left)).result()
    assert unwaited == [0], "both streams"


@pytest.mark.cpu_only("a GPU has rows come by themselves")
def test_a_cpu_copies_at_once() -> None:
    sent = landings.send(rows_of(1))
    assert (sent.comes_by_itself, sent.is_there, landings.may_send()) == (False, True, True)
    assert arrived(sent)
