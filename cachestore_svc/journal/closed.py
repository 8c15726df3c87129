"""A note that a closed store leaves, a hash of files that were compared: it saves the next start from doing that."""

import contextlib
import json
from pathlib import Path

from blake3 import blake3

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.journal import journal
from cachestore_svc.journal.journal_lines import Parsed, Position

NAME = "closed"
_PIECE_BYTES = 1 << 20
_MOST_BYTES = 1000


def write(database: Path, found: Parsed, disk: Disk) -> None:
    """Note the bytes of a database and its journal, which are closed and agree. A failure leaves no note."""
    path, log = database.with_name(NAME), database.with_name(journal.NAME)
    note = {
        "store": found.store,
        **found.position._asdict(),
        "base_bytes": found.base_bytes,
        "size_bytes": found.whole_bytes,
    }
    with contextlib.suppress(OSError):
        note["bytes"] = _bytes_of(database, log, disk)
        disk.remove(path)
        descriptor = disk.open_append(path)
        try:
            disk.write(descriptor, json.dumps(note).encode())
        finally:
            disk.close(descriptor)


def read(database: Path, disk: Disk) -> Parsed | None:
    """The journal as it was at the close, without its state; None unless all files are what they were."""
    if disk.has(Path(f"{database}-wal")):
        return None
    log = database.with_name(journal.NAME)
    try:
        note = json.loads(bytes(disk.read(database.with_name(NAME), _MOST_BYTES)))
        if note.pop("bytes") != _bytes_of(database, log, disk):
            return None
        return Parsed(
            note["store"],
            Position(note["sequence"], note["chain"]),
            base_bytes=note["base_bytes"],
            whole_bytes=note["size_bytes"],
            is_state_whole=True,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _bytes_of(database: Path, log: Path, disk: Disk) -> str:
    hasher = blake3()
    for path in (database, log):
        size_bytes = disk.size_bytes(path)
        if size_bytes is None:
            raise FileNotFoundError(path)
        hasher.update(f"{size_bytes}:".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
    return hasher.hexdigest()
