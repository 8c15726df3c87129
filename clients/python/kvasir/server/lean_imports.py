"""Imports without the large packages that a library looks for and we do not use of it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """As if these modules were not installed, meanwhile. Those that are imported already stay."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: as Python documents it
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@dataclass(frozen=True, slots=True)
class LoadedBy(MetaPathFinder):
    """Finds one module, whose source another loader executes. Others are not its own."""

    module: str
    loader: type[SourceFileLoader]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = self.loader(fullname, spec.loader.path)
        return spec
