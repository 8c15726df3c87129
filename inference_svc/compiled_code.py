"""Where MLX keeps the code that it compiles for a CPU: in a folder of this user alone."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from inference_svc.kv.kept_files import is_this_users, kept_folder

_GPU = Path("/dev/nvidiactl")  # MLX's import would show it, and takes long; a GPU's code is left where it is
_ROOM_BYTES = 16 << 20


def keep_compiled_code_private() -> None:
    """Before MLX compiles. It runs files that it finds below TMPDIR by names that anybody can know, and fails where
    another user was the first to make that folder. A home may be no place: shared, full, or without programs.
    """
    if sys.platform != "linux" or _GPU.exists():
        return
    beside = Path(tempfile.gettempdir(), f"kvasir-{os.getuid()}-mlx")  # the call: that folder stays, for our own files
    for folder in filter(None, (kept_folder("mlx"), beside)):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk = os.statvfs(folder)
            has_room = disk.f_bavail * disk.f_frsize >= _ROOM_BYTES
            is_own = is_this_users(folder) and not folder.is_symlink()  # others could lead a link elsewhere
            if is_own and has_room and not disk.f_flag & os.ST_NOEXEC:
                os.environ["TMPDIR"] = str(folder)
                return
