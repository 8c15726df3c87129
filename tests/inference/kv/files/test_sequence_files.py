"""KV as tensor files and back: the same bytes, in any state of the sequence, and nothing that was damaged gets in."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import DataLoss, ResourceExhausted
from kvasir.formats.block_file import FileIdentity, parse_header
from kvasir.formats.block_hash import chain_hashes, kv_identity_hash
from kvasir.formats.layer_groups import first_touched_block, windows_of
from kvasir.formats.token_files import file_identities

from inference_svc.kv.kv_load import KvLoad
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_files import files_of, first_whole_block
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import CheckedFile, check_files
from inference_svc.model.loading import device
from tests.inference.kv.greedy import tokens_of
from tests.inference.kv.sequences import (
    fed,
    four_bits,
    from_files,
    full,
    page_bytes,
    pool_of,
    random_rows,
    stored,
    windowed,
)

TOKENS = tokens_of(1400, 1)
MIXED = [full(), windowed(100), full(heads=1), windowed(300), windowed(100)]


def named(identity: identity_pb2.KvIdentity, count: int) -> list[FileIdentity]:
    name = kv_identity_hash(identity)
    return file_identities(name, TOKENS[:count], chain_hashes(name, TOKENS[:count]))


def files(kv: SequenceKV) -> list[bytes]:
    return [*map(bytes, files_of(kv, named(kv.pool.identity, kv.length)))]


def checked(identity: identity_pb2.KvIdentity, blobs: Sequence[bytes], count: int) -> list[CheckedFile]:
    return check_files(identity, kv_identity_hash(identity), blobs, TOKENS[:count])


def window_files(kv: SequenceKV, window: int, first: int | None = None) -> list[bytes]:
    """Of the blocks that it holds whole, or from `first` on."""
    name, first = kv_identity_hash(kv.pool.identity), first_whole_block(kv, window) if first is None else first
    tokens = TOKENS[: kv.length]
    return [*map(bytes, files_of(kv, file_identities(name, tokens, chain_hashes(name, tokens), first, window)))]


def checked_windows(kv: SequenceKV) -> dict[int, list[CheckedFile]]:
    identity, found = kv.pool.identity, {}
    for window in windows_of(identity):
        blobs, first = window_files(kv, window), first_whole_block(kv, window)
        found[window] = check_files(identity, kv_identity_hash(identity), blobs, TOKENS[: kv.length], window, first)
    return found


@pytest.mark.parametrize("scale_type", [identity_pb2.SCALE_TYPE_FLOAT16, identity_pb2.SCALE_TYPE_BFLOAT16])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_files_and_live_rows_are_the_same_bytes(scale_type: identity_pb2.ScaleType, bits: int) -> None:
    policy = four_bits()
    policy.key_bits, policy.scale_type = bits, scale_type
    kv = fed(SequenceKV(pool_of([full()] * 2, policy)), [500, 100])
    identity, written = kv.pool.identity, files(kv)
    for keep in (600, 513, 512, 511, 3):
        back = from_files(pool_of([full()] * 2, policy), checked(identity, written, 600), keep)
        assert stored(back) == stored(kv.fork(keep))
        assert back.length == keep
    whole = from_files(pool_of([full()] * 2, policy), checked(identity, written, 600), 600)
    assert files(whole) == written
    assert stored(fed(whole, [300], seed=3)) == stored(fed(kv, [300], seed=3)), "it goes on as if it had never left"


@pytest.mark.parametrize("rows", [1, 2, 31, 100, 254, 255])
def test_a_tail_of_any_length_comes_back_as_it_was(rows: int) -> None:
    kv = fed(SequenceKV(pool_of([full(), full(heads=1)])), [256, rows])
    written = files(kv)
    assert [parse_header(blob, len(blob)).identity.tokens for blob in written] == [PAGE_TOKENS, rows]
    back = from_files(pool_of([full(), full(heads=1)]), checked(kv.pool.identity, written, 256 + rows), 256 + rows)
    assert stored(back) == stored(kv)
    assert files(back) == written


def test_more_blocks_than_leave_the_device_at_once() -> None:
    pool = pool_of([full(heads=1)])
    kv, tokens = fed(SequenceKV(pool), [256 * 35, 7]), tokens_of(256 * 35 + 7, 3)
    name = kv_identity_hash(pool.identity)
    identities = file_identities(name, tokens, chain_hashes(name, tokens))
    written = files_of(kv, identities)
    assert len(written) == 36
    assert written == [one for identity in identities for one in files_of(kv, [identity])]
    back = from_files(pool, check_files(pool.identity, name, written, tokens), kv.length)
    assert stored(back) == stored(kv)


def test_a_file_read_by_any_safetensors_library_holds_each_layers_keys_and_values() -> None:
    kv = fed(SequenceKV(pool_of([full()] * 2)), [300])
    for kind, start, count in (("block", 0, 256), ("tail", 256, 44)):
        identity = FileIdentity(kind, "0" * 64, start, count, "0" * 64)
        tensors = safetensors.numpy.load(bytes(files_of(kv, [identity])[0]))
        for index in range(2):
            for letter, given in zip("kv", random_rows(300, index), strict=True):
                parts = [tensors[f"layer_{index}_{letter}_{part}"] for part in ("weights", "scales", "biases")]
                own = given[0, :, start : start + count]
                for found, made in zip(parts, mx.quantize(own, group_size=64, bits=4), strict=True):
                    assert np.array_equal(found, np.array(made).astype(found.dtype))


def test_rows_that_a_sequence_does_not_have_are_refused() -> None:
    kv = fed(SequenceKV(pool_of([full()])), [300])
    with pytest.raises(ValueError, match="at most 300"):
        files_of(kv, [FileIdentity("tail", "0" * 64, 256, 45, "0" * 64)])


def test_writing_files_changes_no_byte_and_takes_no_page() -> None:
    kv = fed(SequenceKV(pool_of(MIXED)), [600, 1])
    kv.mark()
    held, used = page_bytes(kv.pool, kv.pages), kv.pool.allocator.used
    files(kv)
    checked_windows(kv)
    assert (page_bytes(kv.pool, kv.pages), kv.pool.allocator.used) == (held, used)


# --- windows ---


@pytest.mark.parametrize("length", [1, 62, 63, 64, 65, 200, 256, 257, 319, 320, 512, 575])
def test_files_of_a_window_hold_all_that_it_needs(length: int) -> None:
    kv = fed(SequenceKV(pool_of([windowed(64)])), [length])
    first = first_whole_block(kv, 64)
    assert first == max(0, length - 63) // PAGE_TOKENS
    assert len(window_files(kv, 64)) == -(-length // PAGE_TOKENS) - first
    back = from_files(pool_of([windowed(64)]), [], length, windows=checked_windows(kv))
    assert (back.length, back.rewind_points) == (length, (length,))
    assert stored(back) == stored(kv)
    assert window_files(back, 64) == window_files(kv, 64)
    for counts in ([20], [1], [1, 1], [300]):
        assert stored(fed(back.fork(), counts, seed=4)) == stored(fed(kv.fork(), counts, seed=4))


def test_blocks_that_have_left_a_window_are_refused() -> None:
    kv = fed(SequenceKV(pool_of([windowed(64)])), [700])
    assert first_whole_block(kv, 64) == 2
    with pytest.raises(ValueError, match="of a window the last"):
        window_files(kv, 64, first=1)


def test_a_block_that_is_whole_only_for_a_rewind_point_is_no_file() -> None:
    """The rows behind the point were never stored: the window had gone on."""
    kv = fed(SequenceKV(pool_of([windowed(64)])), [300])
    kv.mark()
    fed(kv, [700], seed=1)
    assert [sorted(table.pages) for table in kv.tables] == [[0, 1, 3]]
    assert first_whole_block(kv, 64) == 3
    kv.trim_to(300)
    assert first_whole_block(kv, 64) == 0
    fed(kv, [1], seed=2)
    assert first_whole_block(kv, 64) == 0


@pytest.mark.long(4)
@pytest.mark.parametrize("points", [(60, 200), (100, 120), (310, 1000), (256, 512), (500, 513)])
def test_a_sequence_comes_back_with_the_rewind_points_that_its_files_reach(points: tuple[int, int]) -> None:
    """Also where their windows touch the same blocks; not where blocks between them are missing."""
    kv = SequenceKV(pool_of(MIXED))
    for number, (start, stop) in enumerate(zip((0, *points), points, strict=False)):
        fed(kv, [stop - start], seed=number)
        kv.mark()
    firsts = {window: first_whole_block(kv, window) for window in (100, 300)}
    kept = tuple(p for p in points if all(first <= first_touched_block(w, p) for w, first in firsts.items()))
    assert kept == ((1000,) if points == (310, 1000) else points)
    back = from_files(
        pool_of(MIXED),
        checked(kv.pool.identity, files(kv), points[1]),
        points[1],
        windows=checked_windows(kv),
        points=kept,
    )
    assert back.rewind_points == kept
    assert stored(back) == stored(kv)
    for length in {0, *kept, *range(1, points[1], 37)}:
        assert back.can_go_on_from(length) <= kv.can_go_on_from(length), "it has no rows that were not stored"
        if back.can_go_on_from(length):
            one, other = back.fork(length), kv.fork(length)
            assert stored(one) == stored(other), length
            assert stored(fed(one, [290], seed=7)) == stored(fed(other, [290], seed=7))
            assert one.can_go_on_from(one.length)
    assert all(back.can_go_on_from(length) for length in (0, *kept))
    assert [window_files(back, window) for window in firsts] == [window_files(kv, window) for window in firsts]


def test_after_the_beginning_a_restored_window_is_as_free_as_any() -> None:
    """It forgets that rows before its window were missing, once they are there."""
    kv = fed(SequenceKV(pool_of([windowed(64)])), [500])
    back = from_files(kv.pool, [], 500, windows=checked_windows(kv))
    back.trim_to(0)
    fed(back, [100], seed=1)
    assert all(back.can_go_on_from(length) for length in range(101))


# --- damage ---


def not_a_number(blob: bytes, tensor: int) -> bytes:
    """The file with one number of a tensor that is not finite."""
    header = parse_header(blob, len(blob))
    offset = header.data_offset + sum(each.size_bytes for each in header.tensors[:tensor])
    return blob[:offset] + b"\xff\xff" + blob[offset + 2 :]


@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("rung", [Rung.Q4, Rung.FP])
def test_a_number_that_is_not_finite_is_refused_with_its_files_index(rung: Rung, compute_type: str) -> None:
    policy = policy_of(rung, compute_type)
    kv = fed(SequenceKV(pool_of([full()] * 2, policy)), [600])
    identity, written, pool = kv.pool.identity, files(kv), pool_of([full()] * 2, policy)
    tensors = parse_header(written[0], len(written[0])).tensors
    for number, tensor in enumerate(tensors):
        for index in range(3):
            damaged = [*written[:index], not_a_number(written[index], number), *written[index + 1 :]]
            if tensor.dtype == "U32":  # any bits are codes
                assert from_files(pool, checked(identity, damaged, 600), 600).length == 600
                continue
            with pytest.raises(DataLoss, match=f"file {index}: .*not finite") as error:
                from_files(pool, checked(identity, damaged, 600), 600)
            assert error.value.metadata == {"blob": str(index)}
            assert from_files(pool, checked(identity, damaged, 600), index * PAGE_TOKENS).length == index * PAGE_TOKENS
    assert pool.allocator.used == 0


@pytest.mark.parametrize("tensor", range(1, 3))
def test_a_window_that_is_not_finite_is_refused_with_its_files_place(tensor: int) -> None:
    kv = fed(SequenceKV(pool_of([windowed(64)])), [600])
    identity, pool = kv.pool.identity, pool_of([windowed(64)])
    blobs = [not_a_number(blob, tensor) for blob in window_files(kv, 64)]
    first = first_whole_block(kv, 64)
    damaged = check_files(identity, kv_identity_hash(identity), blobs, TOKENS[:600], 64, first)
    with pytest.raises(DataLoss, match=r"file 0 of window 64: .*not finite") as error:
        from_files(pool, [], 600, windows={64: damaged})
    assert error.value.metadata == {"blob": "0", "window": "64"}
    assert pool.allocator.used == 0


@pytest.mark.parametrize("pieces", range(8))
def test_a_load_that_is_given_up_after_any_piece_gives_every_page_back(pieces: int) -> None:
    kv = fed(SequenceKV(pool_of(MIXED)), [500, 100])
    pool = pool_of(MIXED, pages=40)
    load = KvLoad(SequenceKV(pool), checked(kv.pool.identity, files(kv), 600), 600, windows=checked_windows(kv))
    whole = [load.advance(1) for _ in range(pieces)]
    before_last = 7 if device() == "cuda" else 6  # what comes by itself is written one call later
    assert whole == [False] * min(pieces, before_last) + [True] * (pieces - before_last)
    assert load.kv.length == (600 if pieces > before_last else 0)
    assert bool(pieces) == bool(pool.allocator.used)
    load.release()
    assert pool.allocator.used == 0
    again = from_files(
        pool, checked(kv.pool.identity, files(kv), 600), 600, windows=checked_windows(kv), at_once=pieces + 1
    )
    assert stored(again) == stored(kv)


@pytest.mark.parametrize("pages", [1, 2, 4, 6, 8])
def test_files_without_room_leave_nothing_in_the_pool(pages: int) -> None:
    """Also while the error is held, which holds the frames that it went through."""
    kv = fed(SequenceKV(pool_of(MIXED)), [500, 100])
    small = pool_of(MIXED, pages=pages)
    with pytest.raises(ResourceExhausted) as error:
        from_files(small, checked(kv.pool.identity, files(kv), 600), 600, windows=checked_windows(kv))
    assert (error.value.reason, small.allocator.free) == ("MEMORY_BUSY", pages)
