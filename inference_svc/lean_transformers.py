"""Makes `import transformers` small: without PyTorch, and without its search through five hundred models' files."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from kvasir.server.lean_imports import LoadedBy, hidden


def import_transformers_without_torch() -> None:
    """Before the first import of transformers, which looks for PyTorch once and keeps the answer."""
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, LoadedBy("transformers", _WithoutTorch))


class _WithoutTorch(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        # httpx's own command line would come, with rich, pygments and click: 0.04 s.
        with hidden("torch", "httpx._main"), _packages_when_needed():
            # Its utilities want it, and we import them first.
            vars(module)["__version__"] = metadata.version("transformers")
            _look_through_models_when_needed(Path(self.path).parent / "models")
            super().exec_module(module)


class _Packages(Mapping[str, list[str]]):
    """Distributions by the names of their packages, found when somebody needs one."""

    def __init__(self, find: Callable[[], Mapping[str, list[str]]]) -> None:
        self._find = cache(find)

    def __getitem__(self, name: str) -> list[str]:
        return self._find()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())


@contextmanager
def _packages_when_needed() -> Iterator[None]:
    """Earlier versions look through all installed files as they are imported: 0.6 s beside a large installation."""
    find = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Packages(find)
    try:
        yield
    finally:
        metadata.packages_distributions = find


def _look_through_models_when_needed(models: Path) -> None:
    """Until somebody needs a name that is not found, only the names of `models.auto` are known."""
    utilities: Any = import_module("transformers.utils.import_utils")
    names_in, lazy = utilities.define_import_structure, utilities._LazyModule
    known: dict[str, tuple[str, dict[Any, Any]]] = {}  # by module that lacks names: a prefix of them, and those it has

    def define(path: str | Path, prefix: str | None = None) -> dict[Any, Any]:
        if Path(path) not in (models, models / "__init__.py"):
            return dict(names_in(path, prefix))
        found = {backends: {**each} for backends, each in names_in(models / "auto", _below(prefix, "auto")).items()}
        found.setdefault(frozenset(), {})
        known["transformers" if prefix else "transformers.models"] = prefix or "", found
        return found

    def complete(module: Any) -> None:
        prefix, has = known.pop(module.__name__)
        whole = {backends: {**each} for backends, each in names_in(models, prefix or None).items()}
        for backends, each in has.items():
            whole.setdefault(backends, {}).update(each)
        spec, objects = module.__spec__, module._objects
        lazy.__init__(module, module.__name__, module.__file__, whole, module_spec=spec, extra_objects=objects)

    ask, list_all = lazy.__getattr__, lazy.__dir__

    def found(module: Any, name: str) -> Any:
        try:
            return ask(module, name)
        except AttributeError:
            if module.__name__ not in known or name.startswith("__"):
                raise
            complete(module)
            return ask(module, name)

    def listed(module: Any) -> list[str]:
        if module.__name__ in known:
            complete(module)
        return list(list_all(module))

    utilities.define_import_structure, lazy.__getattr__, lazy.__dir__ = define, found, listed


def _below(prefix: str | None, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
