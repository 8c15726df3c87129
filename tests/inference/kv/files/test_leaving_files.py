"""Files that threads copy from the device while others go on are the files that are copied at once.

On a GPU they are CUDA's copies; elsewhere a played driver reads pages as late as CUDA may.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import FileBytes, FileIdentity
from kvasir.formats.block_hash import chain_hashes, kv_identity_hash
from kvasir.formats.layer_groups import windows_of
from kvasir.formats.token_files import file_identities

from inference_svc.engine.files.snapshots import PendingFiles, when_there
from inference_svc.kv import sequence_files
from inference_svc.kv.attention import in_place
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.host_copies import failed_copies, host_copy
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.page_rows import UNIT
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_files import begin_files, files_of, first_whole_block
from inference_svc.kv.sequence_kv import PassRoom, SequenceKV
from tests.emulation.emulator import cxx
from tests.inference.kv.attention.device.coming_files import PlayedDriver, play
from tests.inference.kv.attention.emulators import EMULATORS
from tests.inference.kv.greedy import tokens_of
from tests.inference.kv.sequences import POISON, full, identity_of, poison_free_pages, windowed

MIXED = [full(), windowed(100), full(heads=1), windowed(300), windowed(100)]
DIVIDED = [full(), *[windowed(100)] * 3]  # three pages are a block of the window
TOKENS = tokens_of(1400, 1)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedDriver | None]:
    """None: this device has CUDA's own."""
    monkeypatch.setattr(sequence_files, "_TAIL_PART_BYTES", 20_000)  # else tests' tails are one
    if host_copy.copies_itself():
        monkeypatch.setattr(failed_copies, "out", failed_copies.FailedCopies())
        yield None
        return
    if not cxx():
        pytest.skip("the emulation of the kernels needs a C++ compiler")
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 20_000)  # no whole number of pages
    for dialect, emulator in EMULATORS.items():
        monkeypatch.setitem(in_place.COMPILERS, dialect, emulator)
    played = play(monkeypatch)
    yield played
    played.gate.set()


def pool_of(layers: Sequence[identity_pb2.LayerLayout], pages: int = 40, rung: Rung = Rung.Q4) -> KvPool:
    """One whose pages threads copy."""
    identity = identity_of(layers, policy_of(rung, "float32"))
    pool = KvPool(identity, pages * KvPool(identity, 1).page_bytes, is_allocated=True, dialect=Dialect.CUDA)
    assert pool.is_copied_by_threads
    poison_free_pages(pool)
    return pool


def filled(kv: SequenceKV, counts: Sequence[int], seed: int = 0) -> SequenceKV:
    """The sequence after chunks of so many tokens, in whose pages anything lies."""
    chance = np.random.default_rng(seed)
    for count in counts:
        room = PassRoom(kv)
        room.take(count)
        for layer, page_format in kv.pool.formats.items():
            pages = list(room.pages[kv.pool.group_number(layer)].values())
            content = chance.integers(0, 1 << 16, (len(pages), page_format.units), dtype=np.uint16)
            kv.pool.write_pages(layer, pages, mx.array(content))
        kv.pool.evaluate()
        room.move_in()
        kv.advanced(count)
    return kv


def identities_of(kv: SequenceKV, window: int = 0) -> list[FileIdentity]:
    name, tokens = kv_identity_hash(kv.pool.identity), TOKENS[: kv.length]
    first = first_whole_block(kv, window) if window else 0
    return file_identities(name, tokens, chain_hashes(name, tokens), first, window)


def plain(kv: SequenceKV, identities: Sequence[FileIdentity]) -> list[FileBytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvPool, "is_copied_by_threads", False)
        return files_of(kv, identities)


def opened_soon(driver: PlayedDriver | None) -> threading.Timer:
    timer = threading.Timer(0.05, driver.gate.set if driver is not None else lambda: None)
    timer.start()
    return timer


def close(driver: PlayedDriver | None) -> None:
    if driver is not None:
        driver.gate.clear()


@pytest.mark.parametrize(("rung", "rows"), [(Rung.Q4, 1), (Rung.Q8, 88), (Rung.FP, 255)])
def test_files_that_threads_copy_are_those_that_are_copied_at_once(
    driver: PlayedDriver | None, rung: Rung, rows: int
) -> None:
    """Blocks, tails, and windows."""
    kv = filled(SequenceKV(pool_of(MIXED, 16, rung)), [500, 12 + rows])
    for window in (0, 100, 300):
        assert files_of(kv, identities_of(kv, window)) == plain(kv, identities_of(kv, window))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_tail_is_copied_by_several_threads(
    driver: PlayedDriver | None, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has some of the layers, which differ."""
    kv = filled(SequenceKV(pool_of([full(), full(heads=1), full(), full(heads=3)])), [300])
    expected, begin_out, begun = plain(kv, identities_of(kv)), sequence_files.begin_out, list[object]()
    monkeypatch.setattr(sequence_files, "begin_out", lambda work: (begun.append(work), begin_out(work))[1])
    size_bytes = sum(each.bytes for each in kv.pool.formats.values())
    monkeypatch.setattr(sequence_files, "_TAIL_PART_BYTES", size_bytes // parts)
    assert (files_of(kv, identities_of(kv)), len(begun)) == (expected, 2 + parts), "a block, a header, and the tail"


def test_nobody_waits_for_a_copy_who_does_not_want_its_bytes(driver: PlayedDriver | None) -> None:
    kv = filled(SequenceKV(pool_of([full()])), [600])
    expected = plain(kv, identities_of(kv))
    close(driver)
    files = begin_files(kv, identities_of(kv))
    if driver is not None:
        assert not any(file.done() for file in files)
        filled(kv.fork(), [20])
        assert not any(file.done() for file in files)
        driver.gate.set()
    assert [file.result() for file in files] == expected


@pytest.mark.long(2)
def test_pages_that_are_free_again_are_not_written_before_they_were_copied(driver: PlayedDriver | None) -> None:
    for seed, layers in enumerate((MIXED, DIVIDED, DIVIDED)):
        kv = filled(SequenceKV(pool := pool_of(layers, pages=20)), [500, 100], seed=seed)
        identities = [each for window in (0, *windows_of(pool.identity)) for each in identities_of(kv, window)]
        expected = plain(kv, identities)
        close(driver)
        files, timer = begin_files(kv, identities), opened_soon(driver)
        kv.release()
        while pool.allocator.free:
            taken = pool.take(1)
            for layer, page_format in pool.formats.items():
                pool.write_pages(layer, taken, mx.full((1, page_format.units), POISON, dtype=UNIT))
            pool.evaluate()
        assert [file.result() for file in files] == expected
        timer.join()


def test_a_page_that_its_only_holder_goes_on_writing_is_copied_first(driver: PlayedDriver | None) -> None:
    """It went back into a block that was full, or its tail is being copied."""
    for length, back in ((512, 300), (300, 300)):
        kv = filled(SequenceKV(pool_of([full()] * 2)), [length])
        expected = plain(kv, identities_of(kv))
        close(driver)
        files, timer = begin_files(kv, identities_of(kv)), opened_soon(driver)
        kv.trim_to(back)
        filled(kv, [PAGE_TOKENS], seed=5)
        assert [file.result() for file in files] == expected
        timer.join()


def test_what_was_enqueued_before_a_copy_is_in_it(driver: PlayedDriver | None) -> None:
    """As restored rows are, whose writes nobody has waited for."""
    kv = filled(SequenceKV(pool := pool_of([full()] * 3)), [1024])
    pages = [kv.tables[0].pages[block] for block in range(4)]
    for number in range(20):
        for layer, page_format in pool.formats.items():
            content = mx.full((len(pages), page_format.units), 10 * number + layer, dtype=UNIT)
            pool.write_pages(layer, pages, content)
        pool.begin_writes()
        files = files_of(kv, identities_of(kv))
        assert files == plain(kv, identities_of(kv))
        assert bytes(files[0][-2:]) == (10 * number + 2).to_bytes(2, "little")


@pytest.mark.long(2)
def test_many_copies_at_once_mix_nothing_up(driver: PlayedDriver | None) -> None:
    kvs = [
        filled(SequenceKV(pool), [700], seed=seed)
        for pool in (pool_of(MIXED, 60), pool_of(MIXED, 60))
        for seed in (1, 2)
    ]
    expected = [plain(kv, identities_of(kv)) for kv in kvs]
    close(driver)
    begun = [[begin_files(kv, identities_of(kv)) for kv in kvs] for _ in range(12)]
    opened_soon(driver).join()
    for files in begun:
        assert [[file.result() for file in some] for some in files] == expected


def test_a_pool_that_is_gone_has_no_copy_under_way(driver: PlayedDriver | None) -> None:
    kv = filled(SequenceKV(pool := pool_of([full()])), [600])
    expected = plain(kv, identities_of(kv))
    close(driver)
    files, timer = begin_files(kv, identities_of(kv)), opened_soon(driver)
    del kv, pool
    assert all(file.done() for file in files)
    assert [file.result() for file in files] == expected
    timer.join()


@pytest.mark.cpu_only("CUDA itself refuses nothing")
def test_where_cuda_refuses_a_copy_files_are_copied_at_once_from_then_on(
    driver: PlayedDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = filled(SequenceKV(pool := pool_of(MIXED)), [600])
    expected = plain(kv, identities_of(kv))
    driver.error = 700
    assert files_of(kv, identities_of(kv)) == expected
    assert not pool.is_copied_by_threads
    copies = driver.copies
    assert files_of(kv, identities_of(kv)) == expected
    assert driver.copies == copies
    assert capsys.readouterr().out.count("host_copy.out_refused") == 1


@pytest.mark.cpu_only("CUDA itself refuses nothing")
def test_a_tail_of_which_cuda_always_refuses_a_layer_is_copied_without_threads(driver: PlayedDriver) -> None:
    """Other layers arrive each time."""
    kv = filled(SequenceKV(pool := pool_of([full(), full(heads=1), full(), full(heads=3)])), [300])
    [_, tail], copy = identities_of(kv), driver.cuMemcpyDtoHAsync_v2
    [expected] = plain(kv, [tail])
    first, size = pool.run_of(3, kv.table_of(3).pages[1])

    def refuse(target: Any, source: Any, size_bytes: Any, stream: Any) -> int:
        return 700 if first <= source.value < first + size else copy(target, source, size_bytes, stream)

    driver.cuMemcpyDtoHAsync_v2 = refuse
    assert files_of(kv, [tail]) == [expected]
    assert not pool.is_copied_by_threads


@pytest.mark.cpu_only("CUDA itself refuses nothing")
def test_after_one_refused_copy_threads_go_on(driver: PlayedDriver, capsys: pytest.CaptureFixture[str]) -> None:
    kv = filled(SequenceKV(pool := pool_of(MIXED)), [600])
    expected = plain(kv, identities_of(kv))
    for _ in range(2 * failed_copies.MOST_FAILURES):
        driver.error, driver.errors_left = 1, 1
        assert files_of(kv, identities_of(kv)) == expected
        assert pool.is_copied_by_threads
    printed = capsys.readouterr().out
    assert printed.count("host_copy.out_failed") == 2 * failed_copies.MOST_FAILURES
    assert "host_copy.out_refused" not in printed


@pytest.mark.cpu_only("CUDA itself refuses nothing")
def test_where_no_thread_can_begin_files_are_copied_without_them(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = filled(SequenceKV(pool := pool_of(MIXED)), [600])
    expected = plain(kv, identities_of(kv))
    copiers = host_copy._Copiers()
    monkeypatch.setattr(driver, "cuMemHostAlloc", lambda *_: 2)
    monkeypatch.setattr(host_copy, "_copiers", lambda: copiers)

    def begin() -> PendingFiles[list[FileBytes]]:
        return PendingFiles(begin_files(kv, identities_of(kv)), list)

    with ThreadPoolExecutor(1) as mlx_thread:
        assert when_there(lambda: mlx_thread.submit(begin)).result(60) == expected  # type: ignore[arg-type]
    assert not pool.is_copied_by_threads


@pytest.mark.cpu_only("CUDA itself copies what it says")
def test_a_device_whose_bytes_come_back_as_others_is_not_copied_by_threads(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = REAL_COMES_BACK.__wrapped__
    assert sound()
    copy_out = host_copy.copy_out
    monkeypatch.setattr(host_copy, "copy_out", lambda runs, target: copy_out(runs[:1], target))
    assert not sound()
    driver.error = 1
    assert not sound()
    assert failed_copies.out.is_refused


REAL_COMES_BACK = host_copy._comes_back
