"""Makes `import transformers` small: we take its tokenizers, and it would import all of PyTorch where that is."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from kvasir.lean_imports import hidden


def import_transformers_without_torch() -> None:
    """Before the first import of transformers. It has no setting for this: it looks for PyTorch once, while it is
    imported, and keeps the answer. Everybody else finds PyTorch as before.
    """
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _WithoutTorch(fullname, spec.loader.path)
        return spec


class _WithoutTorch(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with hidden("torch"):
            super().exec_module(module)
