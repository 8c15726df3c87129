"""Archives of agents as files on the client's disk: a file that has its final name is whole."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvasir.errors import AlreadyExists, InvalidArgument, NotFound
from kvasir.syncing import sync, sync_directory

_PIECE_BYTES = 1 << 20


@contextmanager
def new_file(path: Path, *, replace: bool = True) -> Iterator[BinaryIO]:
    """A file (0600) that gets its name only when it is whole and durable. An error leaves nothing behind.

    Raises InvalidArgument where something other than a regular file has the name (a device, a link, a directory), and
    AlreadyExists where a file has it and `replace` is not set, and NotFound without its directory."""
    _check_target(path, replace)
    if not path.parent.is_dir():
        raise NotFound(f"{path.parent}: there is no such directory", field="file", reason="FILE_NOT_FOUND")
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        _check_target(path, replace)  # again: the transfer took its time
        part.replace(path)
        sync_directory(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _check_target(path: Path, replace: bool) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InvalidArgument(
            f"{path}: is not a regular file, and is left as it is", field="file", reason="FILE_REFUSED"
        )
    if path.exists() and not replace:
        raise AlreadyExists(f"{path}: exists already", field="file", reason="FILE_EXISTS")


def pieces_of(path: Path) -> Iterator[bytes]:
    """The file's bytes, a mebibyte at a time."""
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
