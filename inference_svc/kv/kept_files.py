"""Files of this user's cache, which save work and are made again where they are not whole. Each is named for all that
its content depends on, and written whole, so processes share them.
"""

import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvasir.syncing import why_not_own
from kvasir.waits import WORK_S

_DIGEST_BYTES = 16
_FOR_ALL = stat.S_IWOTH | stat.S_ISVTX  # with the second bit, as /tmp has it, each renames only what is theirs


@dataclass(frozen=True, slots=True)
class KeptDirs:
    """Where an engine keeps its findings: of one home, and of all of a user's homes, if it may."""

    home: Path
    user: Path | None = None


def kept_folder(*of_kind: str) -> Path | None:
    """Where all files lie, or those of a kind; None for a user without a home."""
    try:
        return Path.home().joinpath(".cache", "kvasir", *of_kind)
    except RuntimeError:
        return None


def named_for(*conditions: str) -> str:
    """A name that no other conditions give."""
    return _digest("\0".join(conditions).encode()).hex()


def kept_bytes(path: Path) -> bytes | None:
    """The bytes of a whole file in a folder that this user alone writes: they are believed."""
    try:
        if not is_this_users(path.parent):
            return None
        content = path.read_bytes()
    except OSError:
        return None
    digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return kept if _digest(kept) == digest else None


def keep_bytes(path: Path, kept: bytes) -> None:
    """Where the disk takes no file, each process does the work for itself."""
    _keep(path, _digest(kept) + kept)


def keep_text(path: Path, text: str) -> None:
    """As `keep_bytes`, of a file that others than `kept_bytes` read."""
    _keep(path, text.encode())


def _keep(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_this_users(path.parent):
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # mode 0600
            temp = Path(file.name)
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                remove_left(temp)
                temp.replace(path)
            except OSError:
                temp.unlink(missing_ok=True)
    except OSError:
        return


def remove_left(temp: Path) -> None:
    """Remove what killed writers left beside a file that was just written. None takes an hour."""
    now_s = temp.stat().st_mtime
    for path in temp.parent.glob(f"{tempfile.gettempprefix()}*"):
        with suppress(OSError):  # others remove them, too
            if path.stat().st_mtime < now_s - 30 * WORK_S:
                path.unlink()


def is_this_users(folder: Path) -> bool:
    """Whether the folder is this user's, nobody else writes to it, and not everybody may put another in its place.
    Groups may: some systems let a user's own group write to all of a home.
    """
    above = {*folder.absolute().parents, *folder.resolve().parents}  # a link's, too
    return not why_not_own(folder) and not any(each.stat().st_mode & _FOR_ALL == stat.S_IWOTH for each in above)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
