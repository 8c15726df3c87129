"""Keeps this process's limit of open files: the import of mlx-lm sets it to 2,048, and 4,096 at most, for good.

A server opens one for each caller. Where the system's limit is less than 4,096 that import fails.
"""

import resource
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from kvasir.server.lean_imports import LoadedBy

_MODULE = "mlx_lm.utils"
_THEIRS = (resource.RLIMIT_NOFILE, (2048, 4096))


def keep_file_limit() -> None:
    """Before the first import of mlx-lm."""
    sys.meta_path.insert(0, LoadedBy(_MODULE, _WithItsLimit))


class _WithItsLimit(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        set_limit = resource.setrlimit

        def all_but_theirs(kind: int, limits: tuple[int, int]) -> None:
            if (kind, limits) != _THEIRS:  # another thread may set limits meanwhile
                set_limit(kind, limits)

        resource.setrlimit = all_but_theirs
        try:
            super().exec_module(module)
        finally:
            resource.setrlimit = set_limit
