"""A database's image, and the pages by which one differs from the one before it, as bytes of an object. Pure."""

import struct
import zlib
from collections.abc import Iterator

from blake3 import blake3

_FORM = struct.Struct(">II")  # the size of a page, and how many the new image has
_NUMBER = struct.Struct(">I")
_LEVEL = 1  # zlib's: pages are mostly hashes and numbers
DIGEST_BYTES = 32


class WrongPages(ValueError):
    """The bytes are damaged, or follow another image."""


def delta(before: bytes, after: bytes) -> bytes:
    """The pages of an image that the one before it lacks."""
    size = _page_bytes(after)
    changed = b"".join(
        _NUMBER.pack(start // size) + after[start : start + size]
        for start in range(0, len(after), size)
        if before[start : start + size] != after[start : start + size]
    )
    return zlib.compress(_FORM.pack(size, len(after) // size) + changed, _LEVEL)


def followed(before: bytes, data: bytes) -> bytes:
    """The image behind a delta. Raises WrongPages."""
    try:
        text = zlib.decompress(data)
        size, count = _FORM.unpack_from(text)
        image = bytearray(before[: size * count].ljust(size * count, b"\0"))
        for number, page in _pages(text[_FORM.size :], size):
            image[number * size : (number + 1) * size] = page
    except (zlib.error, struct.error) as error:
        raise WrongPages(str(error)) from None
    return bytes(image)


def signed(chain: bytes, data: bytes) -> bytes:
    """The bytes of an object that follows the one with this digest; they begin with its own."""
    return blake3(chain + data).digest() + data


def opened(chain: bytes, signed_data: bytes) -> tuple[bytes, bytes]:
    """The data of an object, and its digest. Raises WrongPages: it is damaged, or follows another one."""
    digest, data = signed_data[:DIGEST_BYTES], signed_data[DIGEST_BYTES:]
    if blake3(chain + data).digest() != digest:
        raise WrongPages("its digest is another one")
    return data, digest


def _page_bytes(image: bytes) -> int:
    size = int.from_bytes(image[16:18], "big")
    return 65536 if size == 1 else size


def _pages(text: bytes, size: int) -> Iterator[tuple[int, bytes]]:
    step = _NUMBER.size + size
    for start in range(0, len(text), step):
        yield _NUMBER.unpack_from(text, start)[0], text[start + _NUMBER.size : start + step]
