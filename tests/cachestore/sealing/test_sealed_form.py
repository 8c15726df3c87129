"""The sealed form: what was sealed opens as it was, and whatever else was done to a file is noticed."""

import secrets

import pytest
from blake3 import blake3

from cachestore_svc.sealing.sealed_form import (
    HEADER_BYTES,
    MAGIC,
    OVERHEAD,
    SEALED_SEGMENT_BYTES,
    SEGMENT_BYTES,
    DoesNotOpen,
    FileSeal,
    open_file,
    plain_size,
    sealed_size,
)
from cachestore_svc.sealing.sealed_names import SealedNames

KEY, OTHER_KEY = bytes(32), b"\x01" * 32
SIZES = (0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES, 3 * SEGMENT_BYTES + 5)


def sealed(data: bytes, key: bytes = KEY) -> bytearray:
    seal = FileSeal.begin(key, secrets.token_bytes)
    file = bytearray(seal.header(name_of(data), secrets.token_bytes))
    starts = range(0, max(1, len(data)), SEGMENT_BYTES)
    for number, start in enumerate(starts):
        is_last = number == len(starts) - 1
        plain = data[start : start + SEGMENT_BYTES]
        segment = memoryview(bytearray(len(plain) + OVERHEAD))
        seal.seal(plain, number, is_last, segment, secrets.token_bytes)
        file += segment
    return file


def name_of(data: bytes) -> str:
    return blake3(data).hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_what_was_sealed_opens_as_it_was_and_its_size_is_known_without_a_key(size: int) -> None:
    data = secrets.token_bytes(size)
    file = sealed(data)
    assert open_file(KEY, memoryview(file), name_of(data)) == data
    assert (len(file), plain_size(len(file))) == (sealed_size(size), size)


def test_equal_bytes_look_different_in_every_file() -> None:
    data = bytes(3 * SEGMENT_BYTES)
    files = [sealed(data) for _ in range(2)]
    pieces = [bytes(file[at : at + 16]) for file in files for at in range(len(MAGIC), len(file) - 16, 16)]
    assert len(set(pieces)) == len(pieces)


def refused(file: bytes | bytearray, data: bytes, key: bytes = KEY) -> bool:
    try:
        open_file(key, memoryview(file), name_of(data))
    except DoesNotOpen:
        return True
    return False


def test_a_file_that_is_cut_anywhere_does_not_open() -> None:
    data = secrets.token_bytes(2 * SEGMENT_BYTES + 100)
    file = sealed(data)
    borders = [0, HEADER_BYTES, HEADER_BYTES + SEALED_SEGMENT_BYTES, HEADER_BYTES + 2 * SEALED_SEGMENT_BYTES, len(file)]
    for border in borders:
        for size in {border - 1, border, border + 1} & set(range(len(file))):
            assert refused(file[:size], data)
    assert refused(file + b"\0", data)


def test_segments_of_a_file_that_change_places_do_not_open() -> None:
    data = secrets.token_bytes(3 * SEGMENT_BYTES)
    file = sealed(data)
    cut = [file[at : at + SEALED_SEGMENT_BYTES] for at in range(HEADER_BYTES, len(file), SEALED_SEGMENT_BYTES)]
    head = file[:HEADER_BYTES]
    assert not refused(head + cut[0] + cut[1] + cut[2], data)
    assert refused(head + cut[1] + cut[0] + cut[2], data)
    assert refused(head + cut[0] + cut[1] + cut[1], data)
    assert refused(head + cut[0] + cut[2], data)
    assert refused(head + cut[0] + cut[1], data)


def test_files_that_change_names_or_segments_with_others_do_not_open() -> None:
    one, other = secrets.token_bytes(100), secrets.token_bytes(100)
    first, second = sealed(one), sealed(other)
    assert refused(second, one)
    assert refused(first[:HEADER_BYTES] + second[HEADER_BYTES:], one)
    assert refused(first, one, OTHER_KEY)


def test_every_flipped_bit_is_noticed() -> None:
    data = secrets.token_bytes(40)
    file = sealed(data)
    for bit in range(8 * len(file)):
        file[bit // 8] ^= 1 << bit % 8
        assert refused(file, data)
        file[bit // 8] ^= 1 << bit % 8
    assert not refused(file, data)


def test_names_lead_back_with_their_key_alone() -> None:
    names, others = SealedNames(KEY), SealedNames(OTHER_KEY)
    hashes = [secrets.token_hex(32) for _ in range(100)]
    assert names.open_hashes(names.hashes(hashes)) == hashes
    assert [names.hash(each) for each in hashes] == names.hashes(hashes)
    assert set(names.hashes(hashes)).isdisjoint(others.hashes(hashes))
    text = names.text("agent", "huginn's cousin")
    assert names.open_text(f"{text} version 3, {others.text('agent', 'x')}") == (
        f"huginn's cousin version 3, {others.text('agent', 'x')}"
    )
    assert others.open_text(text) == text
    assert names.text("agent", "a") == names.text("agent", "a") != names.text("label", "a")
    assert (names.text("detail", ""), names.open_text("version 3")) == ("", "version 3")
