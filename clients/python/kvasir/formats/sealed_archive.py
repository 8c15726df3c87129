"""Sealed archives: the archive of an agent that a passphrase or a master key opens, as a stream. Pure.

    a line of JSON            {"kvasir_sealed_archive": 1, "locked_by", "key_id", "salt", "wrapped"}
    64 KiB of the archive     sealed (AES-256-GCM, +16), again and again; the last has as many as are left

Each archive has a key of its own, wrapped (RFC 3394) by one that scrypt makes of a passphrase, or HKDF of a master key.
The segments are the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár 2015): a nonce is the segment's number and
whether it is the last, so that none can be cut off, moved or left out. The header is associated data of each."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from blake3 import blake3

from kvasir.errors import InvalidArgument

FORMAT = 1
SEGMENT_BYTES = 64 << 10
BEGINNING = b'{"kvasir_sealed_archive":'
MAX_HEADER_BYTES = 1024
PASSPHRASE, MASTER_KEY = "passphrase", "master key"
_KEY_BYTES, _SALT_BYTES, _TAG_BYTES = 32, 16, 16
# 128 MiB and some tenths of a second for each guess at a passphrase. Part of the format: no file may want more.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 17, 8, 1
_INFO = b"kvasir.sealed_archive.v1"


class DoesNotUnlock(Exception):
    """The archive was sealed with another passphrase or master key."""


@dataclass(frozen=True)
class Lock:
    """What opens an archive: a passphrase, or a master key of 32 bytes."""

    kind: str
    secret: bytes = field(repr=False)

    @property
    def key_id(self) -> str:
        """Identifies the master key, as `kvasir keys ls` does; a passphrase has none."""
        if self.kind == PASSPHRASE:
            return ""
        return blake3(b"kvasir.master_key.v1", key=self.secret).hexdigest()[:16]

    def wrapping_key(self, salt: bytes) -> bytes:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

        if self.kind == PASSPHRASE:
            return Scrypt(salt, _KEY_BYTES, _SCRYPT_N, _SCRYPT_R, _SCRYPT_P).derive(self.secret)
        return HKDF(hashes.SHA256(), _KEY_BYTES, salt, _INFO).derive(self.secret)


@dataclass(frozen=True)
class SealedHeader:
    """The first line of a sealed archive, as it lies there, and its content."""

    line: bytes
    locked_by: str
    key_id: str
    salt: bytes
    wrapped: bytes


def seal(pieces: Iterable[bytes], lock: Lock, random_bytes: Callable[[int], bytes]) -> Iterator[bytes]:
    """The sealed form of an archive's bytes, whatever their pieces. Needs the package cryptography."""
    from cryptography.hazmat.primitives.keywrap import aes_key_wrap

    key, salt = random_bytes(_KEY_BYTES), random_bytes(_SALT_BYTES)
    fields = {
        "kvasir_sealed_archive": FORMAT,
        "locked_by": lock.kind,
        "key_id": lock.key_id,
        "salt": salt.hex(),
        "wrapped": aes_key_wrap(lock.wrapping_key(salt), key).hex(),
    }
    line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    yield line
    for plain, nonce in _segments(pieces, SEGMENT_BYTES):
        yield _aead(key).encrypt(nonce, plain, line)


def read_header(beginning: bytes) -> SealedHeader | None:
    """The header of a file that begins so (with MAX_HEADER_BYTES, or all that it has); None: it is no sealed archive.
    Raises InvalidArgument for a header that is damaged or of a newer Kvasir."""
    if not beginning.startswith(BEGINNING):
        return None
    line, end, _ = beginning.partition(b"\n")
    try:
        said = json.loads(line)
        salt, wrapped = (bytes.fromhex(said[name]) for name in ("salt", "wrapped"))
        header = SealedHeader(line + end, str(said["locked_by"]), str(said["key_id"]), salt, wrapped)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _malformed("its header is damaged") from None
    if not re.fullmatch("[0-9a-f]{0,64}", header.key_id):  # it is shown to people
        raise _malformed("its header is damaged")
    if said["kvasir_sealed_archive"] != FORMAT or header.locked_by not in (PASSPHRASE, MASTER_KEY):
        raise _malformed("it is of a newer Kvasir")
    return header


def unlock(header: SealedHeader, lock: Lock) -> bytes:
    """The archive's key. Raises DoesNotUnlock when the lock is another."""
    from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap

    try:
        return aes_key_unwrap(lock.wrapping_key(header.salt), header.wrapped)
    except (InvalidUnwrap, ValueError):
        raise DoesNotUnlock(f"this {lock.kind} does not open it") from None


def open_(pieces: Iterable[bytes], header: SealedHeader, key: bytes) -> Iterator[bytes]:
    """The plain bytes behind the header. Raises InvalidArgument (ARCHIVE_MALFORMED) for bytes that were changed or cut:
    what came before them is as it was."""
    from cryptography.exceptions import InvalidTag

    for sealed, nonce in _segments(pieces, SEGMENT_BYTES + _TAG_BYTES):
        try:
            yield _aead(key).decrypt(nonce, sealed, header.line)
        except (InvalidTag, ValueError):
            raise _malformed("it was changed or cut") from None


def _segments(pieces: Iterable[bytes], size_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """The bytes in segments, the last of which alone may be shorter; and the nonce of each."""
    waiting, number = bytearray(), 0
    for piece in pieces:
        waiting += piece
        while len(waiting) > size_bytes:  # of as many it is not known yet whether more come
            yield bytes(waiting[:size_bytes]), _nonce(number, is_last=False)
            del waiting[:size_bytes]
            number += 1
    yield bytes(waiting), _nonce(number, is_last=True)


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _aead(key: bytes):  # type: ignore[no-untyped-def]
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _malformed(words: str) -> InvalidArgument:
    return InvalidArgument(f"sealed archive: {words}", reason="ARCHIVE_MALFORMED", field="archive")
