"""The sealed form of a blob's file: a header, then segments of AES-256-GCM. Pure.

    magic (8) | salt (32) | nonce (12) | the plain bytes' digest, sealed (48)      the header
    nonce (12) | at most SEGMENT_BYTES, sealed (+16)                               each segment

A file has a key of its own, made of the namespace's key and the salt. Each segment has a random nonce beside it: a
resumed part seals its last segment again, and a counter would then repeat. The number of a segment, and whether it is
the last, is associated data: a file that is cut, or whose segments were moved, does not open. Neither does one that has
another's name, because the header names the bytes that it holds.
"""

import struct
from collections.abc import Callable

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEGMENT_BYTES = 256 << 10
MAGIC = b"kvseal\x00\x01"
_SALT_BYTES, _NONCE_BYTES, _TAG_BYTES, _DIGEST_BYTES = 32, 12, 16, 32
OVERHEAD = _NONCE_BYTES + _TAG_BYTES  # of a segment
_SALT_END = len(MAGIC) + _SALT_BYTES
HEADER_BYTES = _SALT_END + _DIGEST_BYTES + OVERHEAD
SEALED_SEGMENT_BYTES = SEGMENT_BYTES + OVERHEAD

RandomBytes = Callable[[int], bytes]


class DoesNotOpen(Exception):
    """The bytes are not those that were sealed under this key, at this place."""


def sealed_size(plain_bytes: int) -> int:
    segments = max(1, -(-plain_bytes // SEGMENT_BYTES))
    return HEADER_BYTES + segments * OVERHEAD + plain_bytes


def plain_size(sealed_bytes: int) -> int:
    """Plain bytes of a file of so many; 0 for one that is too short. Needs no key."""
    body = sealed_bytes - HEADER_BYTES
    return max(0, body - -(-body // SEALED_SEGMENT_BYTES) * OVERHEAD)


class FileSeal:
    """Seals and opens one file. Used by one thread at a time."""

    def __init__(self, files_key: bytes, salt: bytes) -> None:
        """`files_key`: 32 bytes, of the namespace; `salt`: 32 random bytes, of this file."""
        self._salt = salt
        self._aead = AESGCM(blake3(salt, key=files_key).digest())

    @classmethod
    def begin(cls, files_key: bytes, random_bytes: RandomBytes) -> "FileSeal":
        return cls(files_key, random_bytes(_SALT_BYTES))

    @classmethod
    def of_header(cls, files_key: bytes, header: bytes | memoryview, hash_: str) -> "FileSeal":
        """The seal of a file that begins so. Raises DoesNotOpen, also when it holds the bytes of another digest."""
        if len(header) != HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
            raise DoesNotOpen("it does not begin as a sealed file")
        seal = cls(files_key, bytes(header[len(MAGIC) : _SALT_END]))
        try:
            found = seal._aead.decrypt(
                bytes(header[_SALT_END : _SALT_END + _NONCE_BYTES]),
                header[_SALT_END + _NONCE_BYTES :],
                header[:_SALT_END],
            )
        except InvalidTag:
            raise DoesNotOpen("its header was sealed with another key, or changed") from None
        if found.hex() != hash_:
            raise DoesNotOpen("it holds the bytes of another digest")
        return seal

    def header(self, hash_: str, random_bytes: RandomBytes) -> bytes:
        beginning, nonce = MAGIC + self._salt, random_bytes(_NONCE_BYTES)
        return beginning + nonce + self._aead.encrypt(nonce, bytes.fromhex(hash_), beginning)

    def seal(
        self, plain: bytes | memoryview, number: int, is_last: bool, into: memoryview, random_bytes: RandomBytes
    ) -> None:
        """Write a segment's bytes in the file, OVERHEAD more than `plain`: SEGMENT_BYTES, or fewer in the last."""
        nonce = into[:_NONCE_BYTES] = random_bytes(_NONCE_BYTES)
        self._aead.encrypt_into(nonce, plain, _place(number, is_last), into[_NONCE_BYTES:])

    def open(self, sealed: bytes | memoryview, number: int, is_last: bool, into: memoryview) -> None:
        """Write a segment's plain bytes, which are exactly as many as fit. Raises DoesNotOpen."""
        if len(sealed) - OVERHEAD != len(into):
            raise DoesNotOpen("it is cut")
        view = memoryview(sealed)
        try:
            self._aead.decrypt_into(bytes(view[:_NONCE_BYTES]), view[_NONCE_BYTES:], _place(number, is_last), into)
        except InvalidTag:
            raise DoesNotOpen(f"segment {number} was changed, moved or cut") from None

    def open_piece(self, sealed: bytes, number: int) -> bytes:
        """The plain bytes of a segment that is not the last, of a file that is not whole yet. Raises DoesNotOpen."""
        plain = bytearray(max(0, len(sealed) - OVERHEAD))
        self.open(sealed, number, False, memoryview(plain))
        return bytes(plain)


def open_file(files_key: bytes, sealed: memoryview, hash_: str) -> memoryview:
    """The plain bytes of a whole file, not compared with their digest. Raises DoesNotOpen."""
    seal = FileSeal.of_header(files_key, sealed[:HEADER_BYTES], hash_)
    plain = memoryview(bytearray(plain_size(len(sealed))))
    if sealed_size(len(plain)) != len(sealed):
        raise DoesNotOpen("it is cut")
    segments = max(1, -(-len(plain) // SEGMENT_BYTES))
    for number in range(segments):
        start = HEADER_BYTES + number * SEALED_SEGMENT_BYTES
        into = plain[number * SEGMENT_BYTES : (number + 1) * SEGMENT_BYTES]
        seal.open(sealed[start : start + SEALED_SEGMENT_BYTES], number, number == segments - 1, into)
    return plain.toreadonly()


def _place(number: int, is_last: bool) -> bytes:
    """What a segment is bound to beside its file."""
    return struct.pack("<Q?", number, is_last)
