"""Parts of files, as a model's weights, that threads read and copy to a device."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import mlx.core as mx

from inference_svc.kv.host_copies.host_copy import begin_pieces, device_addresses

# Each piece takes the interpreter three times, and while they come the service is imported. On an H200 host 16 GB come
# in 0.70 s by pieces of 16 MB, for which a start waits, and in 0.47 by 4 MB, beside which imports took 1.7 s, not 1.0.
_LARGE_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class FilePart:
    file: BinaryIO
    offset: int
    size_bytes: int

    def read(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from `begin` on. Raises OSError for a file that is cut short."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self.file.fileno(), [buffer[done:]], self.offset + begin + done)
            if not count:
                raise OSError(f"{self.file.name} was cut short")
            done += count


def begin_from_files(parts: Sequence[FilePart]) -> "tuple[list[mx.array], list[Future[None]]]":
    """Begin to read parts of files, where `copies_itself`, to an array of uint16 units each. Evaluates. Nothing may
    read the arrays before `wait_for` has returned.
    """
    made = [mx.zeros((part.size_bytes // 2,), dtype=mx.uint16) for part in parts]
    addresses = device_addresses(made)
    # Other work may still read memory that was free when these arrays were made.
    mx.synchronize()
    pieces = [
        (address + begin, partial(part.read, begin), min(_LARGE_PIECE_BYTES, part.size_bytes - begin))
        for address, part in zip(addresses, parts, strict=True)
        for begin in range(0, part.size_bytes, _LARGE_PIECE_BYTES)
    ]
    return made, begin_pieces(pieces, (parts, made), _LARGE_PIECE_BYTES)
