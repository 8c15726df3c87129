"""Keeps this process's limit of open files: the import of mlx-lm sets it to 2,048, and 4,096 at most, for good.

A server opens one for each caller. Where the system's limit is less than 4,096 that import fails.
"""

import resource
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_MODULE = "mlx_lm.utils"
_THEIRS = (resource.RLIMIT_NOFILE, (2048, 4096))


def keep_file_limit() -> None:
    """Before the first import of mlx-lm."""
    sys.meta_path.insert(0, _FinderOfMlxLm())


class _FinderOfMlxLm(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _WithItsLimit(fullname, spec.loader.path)
        return spec


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
