"""Where MLX keeps the code that it compiles for a CPU: in a folder of this user alone."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from kvasir.syncing import why_not_own

from inference_svc.kv.kept_files import is_this_users, kept_folder

_GPU = Path("/dev/nvidiactl")  # MLX's import would show it, and takes long; a GPU's code is left where it is
_ROOM_BYTES = 16 << 20


def keep_compiled_code_private() -> None:
    """Before MLX compiles. It runs files that it finds below TMPDIR by names that anybody can know, and fails where
    another user was the first to make that folder. A home may be no place: shared, full, or without programs.
    """
    if sys.platform != "linux" or _GPU.exists():
        return
    beside = tempfile.gettempdir()  # which stays so, for our own files
    with suppress(OSError):
        if (kept := kept_folder("mlx")) is not None and _is_place(kept) and is_this_users(kept):
            os.environ["TMPDIR"] = str(kept)
            return
    with suppress(OSError):
        if _is_place(folder := _folder_in(beside)):
            os.environ["TMPDIR"] = str(folder)


def _folder_in(place: str) -> Path:
    """The same at each start, unless another user was the first to take its name."""
    named = Path(place, f"kvasir-{os.getuid()}-mlx")
    with suppress(OSError):
        named.mkdir(mode=0o700, exist_ok=True)
    return named if _is_own(named) else Path(tempfile.mkdtemp(prefix="kvasir-mlx-", dir=place))


def _is_own(folder: Path) -> bool:
    with suppress(OSError):
        return not why_not_own(folder) and not folder.is_symlink()  # others could lead a link elsewhere
    return False


def _is_place(folder: Path) -> bool:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk = os.statvfs(folder)
    has_room = disk.f_bavail * disk.f_frsize >= _ROOM_BYTES
    return _is_own(folder) and has_room and not disk.f_flag & os.ST_NOEXEC
