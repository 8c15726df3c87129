"""Where MLX keeps the code that it compiles for a CPU: in a folder of this user alone."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from inference_svc.kv.kept_files import is_this_users, kept_folder

_GPU = Path("/dev/nvidiactl")  # MLX's import would show it, and takes long; a GPU's code is left where it is


def keep_compiled_code_private() -> None:
    """Before MLX compiles. It runs files that it finds below TMPDIR by names that anybody can know, and fails where
    another user was the first to make that folder.
    """
    folder = kept_folder("mlx")
    if sys.platform != "linux" or _GPU.exists() or folder is None:
        return
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_this_users(folder):
            tempfile.gettempdir()  # stays, for our own files
            os.environ["TMPDIR"] = str(folder)
