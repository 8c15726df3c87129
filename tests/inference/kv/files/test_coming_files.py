"""Files that come to the device by themselves become the same KV, and nobody waits for them who need not."""

from collections.abc import Iterator

import pytest
from kvasir.errors import DataLoss, ResourceExhausted

from inference_svc.kv import kv_load
from inference_svc.kv.attention import in_place
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.kv_load import MOST_FILES, KvLoad
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import CheckedFile
from tests.inference.kv.attention.device.coming_files import PlayedDriver, play
from tests.inference.kv.attention.emulators import EMULATORS, needs_compiler
from tests.inference.kv.files.test_sequence_files import (
    MIXED,
    checked,
    checked_windows,
    fed,
    files,
    not_a_number,
    pool_of,
)
from tests.inference.kv.sequences import PoisonedPool, from_files, identity_of, stored

LENGTH = 600
PIECES = 7  # of one file each


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedDriver]:
    played = play(monkeypatch)
    yield played
    played.gate.set()


def memory() -> SequenceKV:
    return fed(SequenceKV(pool_of(MIXED)), [500, 100])


def load_of(kv: SequenceKV, pool: PoisonedPool) -> KvLoad:
    return KvLoad(SequenceKV(pool), checked(kv.pool.identity, files(kv), LENGTH), LENGTH, windows=checked_windows(kv))


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    for dialect, emulator in EMULATORS.items():
        monkeypatch.setitem(in_place.COMPILERS, dialect, emulator)


def finish(load: KvLoad) -> None:
    while not load.advance(1):
        assert load.kv.length == 0


@pytest.mark.parametrize("at_once", [1, 2, 32])
def test_files_that_come_by_themselves_become_the_same_kv(driver: PlayedDriver, at_once: int) -> None:
    kv = memory()
    made = from_files(
        pool_of(MIXED),
        checked(kv.pool.identity, files(kv), LENGTH),
        LENGTH,
        windows=checked_windows(kv),
        at_once=at_once,
    )
    assert stored(made) == stored(kv)


@needs_compiler
def test_kernels_write_them_as_mlx_does(driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    kv = memory()
    pool = PoisonedPool(identity_of(MIXED), 40 * kv.pool.page_bytes, dialect=Dialect.CUDA)
    load = load_of(kv, pool)
    finish(load)
    assert stored(load.kv) == stored(kv)


def test_while_bytes_come_it_says_so_and_a_piece_later_they_are_written(driver: PlayedDriver) -> None:
    kv, told = memory(), list[int]()
    load = load_of(kv, pool_of(MIXED))
    assert not load.awaits_bytes
    driver.gate.clear()
    assert not load.advance(1)
    assert load.awaits_bytes
    driver.gate.set()
    for piece in range(PIECES - 1):
        assert not load.advance(1, lambda piece=piece: told.append(piece))  # type: ignore[misc]
    assert told == [], "it waits for the device at its end only"
    assert load.advance(1, lambda: told.append(PIECES))
    assert told == [PIECES]
    assert not load.awaits_bytes
    assert stored(load.kv) == stored(kv)


@pytest.mark.long(5)
@needs_compiler
@pytest.mark.parametrize("dialect", [None, Dialect.CUDA])
@pytest.mark.parametrize("pieces", range(PIECES + 1))
def test_a_load_that_is_given_up_leaves_neither_pages_nor_room_behind(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch, pieces: int, dialect: Dialect | None
) -> None:
    emulate(monkeypatch)
    kv = memory()
    pool = PoisonedPool(identity_of(MIXED), 40 * kv.pool.page_bytes, dialect=dialect)
    for _ in range(5):
        load = load_of(kv, pool)
        for _ in range(pieces):
            load.advance(1)
        load.release()
        assert pool.allocator.used == 0
    assert kv_load.may_send()
    load = load_of(kv, pool)
    finish(load)
    assert stored(load.kv) == stored(kv)


def test_many_loads_at_once_share_the_room_and_all_end(driver: PlayedDriver) -> None:
    kv, pool = memory(), pool_of(MIXED)
    loads = [load_of(kv, pool) for _ in range(5)]
    driver.gate.clear()
    for load in loads[:3]:
        load.advance(1)
    assert [load.awaits_bytes for load in loads] == [True] * 5, "three are on their way, and two have no room to be"
    driver.gate.set()
    left = list(loads)
    while left:
        left = [load for load in left if not load.advance(1)]
    assert [stored(load.kv) for load in loads] == [stored(kv)] * 5


@pytest.mark.parametrize("index", range(3))
def test_a_number_that_is_none_is_found_before_the_kv_is_anybodys(driver: PlayedDriver, index: int) -> None:
    kv, pool = memory(), pool_of(MIXED)
    damaged = [not_a_number(blob, 1) if place == index else blob for place, blob in enumerate(files(kv))]
    load = KvLoad(SequenceKV(pool), checked(kv.pool.identity, damaged, LENGTH), LENGTH, windows=checked_windows(kv))
    with pytest.raises(DataLoss, match=f"file {index}: .*not finite"):
        finish(load)
    assert pool.allocator.used == 0


def test_files_without_room_in_the_pool_leave_nothing(driver: PlayedDriver) -> None:
    """Neither pages nor room, even while the errors are kept."""
    kv, small, kept = memory(), pool_of(MIXED, pages=2), []
    for _ in range(3):
        with pytest.raises(ResourceExhausted) as info:
            finish(load_of(kv, small))
        kept.append(info.value)
        assert small.allocator.free == 2
    loads = [load_of(kv, pool_of(MIXED)) for _ in range(3)]
    driver.gate.clear()
    for load in loads:
        load.advance(1)
    assert [load.awaits_bytes for load in loads] == [True] * 3, "all room was free"
    assert kept


def test_pieces_have_no_more_bytes_than_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = memory()
    load = load_of(kv, pool_of(MIXED))
    assert load.next_files == -(-LENGTH // PAGE_TOKENS)
    monkeypatch.setattr(kv_load, "LANDING_BYTES", 1)
    assert load.next_files == 1


def test_files_wait_for_no_more_company_than_a_piece_holds(driver: PlayedDriver) -> None:
    """Of a small model: so many bytes as are worth a piece would be thousands of its files."""
    kv, came = memory(), list[CheckedFile]()
    load = KvLoad(SequenceKV(pool_of(MIXED)), came, 100 * PAGE_TOKENS)
    came += checked(kv.pool.identity, files(kv), LENGTH)[:1] * (MOST_FILES - 1)
    assert load.lacks_files
    came += came[:1]
    assert load.next_files == MOST_FILES


def test_a_small_piece_waits_while_more_files_are_to_come(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, came = memory(), list[CheckedFile]()
    every = checked(kv.pool.identity, files(kv), LENGTH)
    monkeypatch.setattr(kv_load, "_LEAST_BYTES", 2 * load_of(kv, pool_of(MIXED))._file_bytes(0))
    load = KvLoad(SequenceKV(pool_of(MIXED)), came, LENGTH, windows=checked_windows(kv))
    short = KvLoad(SequenceKV(pool_of(MIXED)), came, LENGTH, windows=checked_windows(kv))
    came.append(every[0])
    assert load.lacks_files
    short.cut(PAGE_TOKENS)
    assert not short.lacks_files, "no more come"
    came.append(every[1])
    assert not load.lacks_files
    assert load.next_files == 2
    load.advance(2)
    load.advance(2)
    assert load.lacks_files
    came.append(every[2])
    assert not load.lacks_files, "the last one has no company"
    finish(load)
    assert stored(load.kv) == stored(kv)
