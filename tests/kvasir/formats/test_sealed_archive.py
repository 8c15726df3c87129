"""Sealed archives: what goes in comes out with the right key, and nothing else does."""

import json
from random import Random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from kvasir.errors import InvalidArgument
from kvasir.formats.sealed_archive import (
    MASTER_KEY,
    MAX_HEADER_BYTES,
    PASSPHRASE,
    SEGMENT_BYTES,
    DoesNotUnlock,
    Lock,
    SealedHeader,
    open_,
    read_header,
    seal,
    unlock,
)

RANDOM = Random(1).randbytes
KEY = Lock(MASTER_KEY, b"k" * 32)
PLAIN = RANDOM(2 * SEGMENT_BYTES + 100)


def sealed(plain: bytes, lock: Lock = KEY, piece_bytes: int = 100_000) -> tuple[SealedHeader, bytes]:
    pieces = (plain[at : at + piece_bytes] for at in range(0, len(plain), piece_bytes))
    data = b"".join(seal(pieces, lock, RANDOM))
    header = read_header(data[:MAX_HEADER_BYTES])
    assert header is not None
    return header, data[len(header.line) :]


def opened(header: SealedHeader, body: bytes, piece_bytes: int = 70_001) -> bytes:
    pieces = (body[at : at + piece_bytes] for at in range(0, len(body), piece_bytes))
    return b"".join(open_(pieces, header, unlock(header, KEY)))


@pytest.mark.parametrize("size", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, len(PLAIN)])
@pytest.mark.parametrize("piece_bytes", [1 << 20, 4097])
def test_what_was_sealed_is_opened_whatever_its_pieces(size: int, piece_bytes: int) -> None:
    header, body = sealed(PLAIN[:size], piece_bytes=piece_bytes)
    assert opened(header, body, piece_bytes=piece_bytes) == PLAIN[:size]
    assert len(body) == size + 16 * max(1, -(-size // SEGMENT_BYTES))


@pytest.mark.parametrize("at", [0, SEGMENT_BYTES + 15, SEGMENT_BYTES + 16, -1])
def test_a_changed_bit_is_noticed(at: int) -> None:
    header, body = sealed(PLAIN)
    changed = bytearray(body)
    changed[at] ^= 1
    with pytest.raises(InvalidArgument, match="changed or cut"):
        opened(header, bytes(changed))


def test_segments_cannot_be_cut_off_left_out_moved_or_added() -> None:
    header, body = sealed(PLAIN)
    size = SEGMENT_BYTES + 16
    first, second, last = body[:size], body[size : 2 * size], body[2 * size :]
    for wrong in (b"", first, first + second, second + first + last, first + last, first + second + last + last):
        with pytest.raises(InvalidArgument, match="changed or cut"):
            opened(header, wrong)


def test_another_header_or_key_opens_nothing() -> None:
    header, body = sealed(PLAIN)
    other, _ = sealed(PLAIN)
    with pytest.raises(InvalidArgument):
        opened(other, body)
    for lock in (Lock(MASTER_KEY, b"x" * 32), Lock(PASSPHRASE, b"k" * 32)):
        with pytest.raises(DoesNotUnlock, match=f"this {lock.kind} does not open it"):
            unlock(header, lock)


def test_the_form_is_that_of_its_description_and_says_no_secret() -> None:
    """Opened here by hand, with nothing of ours."""
    lock = Lock(PASSPHRASE, b"correct horse")
    header, body = sealed(PLAIN[:100], lock)
    said = json.loads(header.line)
    assert (said["kvasir_sealed_archive"], said["locked_by"], said["key_id"]) == (1, "passphrase", "")
    key = Scrypt(bytes.fromhex(said["salt"]), 32, 1 << 17, 8, 1).derive(b"correct horse")
    archives_own = aes_key_unwrap(key, bytes.fromhex(said["wrapped"]))
    assert AESGCM(archives_own).decrypt(bytes(11) + b"\1", body, header.line) == PLAIN[:100]
    assert not any(secret in header.line for secret in (b"correct", archives_own.hex().encode()))
    assert "correct" not in repr(lock)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kvasir_sealed_archive":',
        b'{"kvasir_sealed_archive":1}\n',
        b'{"kvasir_sealed_archive":1,"locked_by":"x","key_id":"","salt":"00","wrapped":"00"}\n',
        b'{"kvasir_sealed_archive":2,"locked_by":"passphrase","key_id":"","salt":"00","wrapped":"00"}\n',
        b'{"kvasir_sealed_archive":1,"locked_by":"passphrase","key_id":"","salt":"zz","wrapped":0}\n',
        b'{"kvasir_sealed_archive":' + b"[" * 990,
    ],
)
def test_a_header_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"sealed archive: (its header is damaged|it is of a newer Kvasir)"):
        read_header(line)


def test_other_files_have_no_such_header_and_a_strange_wrapped_key_is_refused() -> None:
    assert read_header(b"kvasir-archive.json") is None
    assert read_header(b"") is None
    header, _ = sealed(b"")
    with pytest.raises(DoesNotUnlock):
        unlock(SealedHeader(header.line, MASTER_KEY, header.key_id, header.salt, b"short"), KEY)
