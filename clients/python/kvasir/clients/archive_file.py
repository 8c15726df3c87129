"""Archives of agents as files on the client's disk: a file that has its final name is whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_PIECE_BYTES = 1 << 20


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file (0600) that gets its name only when it is whole and durable. An error leaves nothing behind."""
    part = path.with_name(f"{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def pieces_of(path: Path) -> Iterator[bytes]:
    """The file's bytes, a mebibyte at a time."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
