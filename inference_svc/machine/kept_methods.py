"""Keeps the code of dataclasses' methods in a module of this user's, which Python compiles once. Else each start
compiles two thousand texts: 0.2 s of the interpreter, a third of its imports.
"""

import dataclasses
import sys
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import FunctionType
from typing import Any

from inference_svc.kv.kept_files import is_this_users, keep_text, kept_folder, named_for

_BEGINS = "def __create_fn__("  # texts that only define this function
_HEAD = "# Methods of dataclasses by their texts, made by Kvasir. Each gets the names of its class's module."


class KeptMethods:
    def __init__(self, folder: Path) -> None:
        self._path = folder / f"m{named_for(sys.version)}.py"
        self._kept: dict[str, FunctionType] = {}
        self._used = dict[str, None]()
        with suppress(Exception):  # each start compiles them, then
            if Path(cache_from_source(str(self._path))).is_file():
                self._kept = self._loaded()

    def execute(self, text: str, names: dict[str, Any], found: dict[str, Any]) -> None:
        """As `exec`, which dataclasses calls with the text of methods."""
        self._used[text] = None
        if (kept := self._kept.get(text)) is None:
            exec(text, names, found)  # noqa: S102
        else:
            found["__create_fn__"] = FunctionType(kept.__code__, names)()

    def keep(self) -> None:
        """Write and compile the texts that were used, if some of them are new."""
        texts = [text for text in [*self._used] if text.startswith(_BEGINS)]
        if self._kept.keys() >= set(texts):
            return
        with suppress(Exception):
            keep_text(self._path, "\n".join([_HEAD, "KEPT = {}", *map(_function, texts)]))
            self._loaded()

    def _loaded(self) -> dict[str, FunctionType]:
        """Runs the module, where nobody else may have written it."""
        if not is_this_users(self._path.parent):
            return {}
        loader, found = SourceFileLoader("kept_methods_of_dataclasses", str(self._path)), dict[str, Any]()
        code: Any = loader.get_code(loader.name)
        exec(code, found)  # noqa: S102
        kept: dict[str, FunctionType] = found["KEPT"]
        return kept


def _function(text: str) -> str:
    lines = ["def _():", *text.splitlines(), "return __create_fn__"]
    return "\n ".join(lines) + f"\nKEPT[{text!r}] = _"


def keep_methods() -> KeptMethods | None:
    """From now on methods' texts are those of kept code; None where Python keeps none, or a user has no home."""
    folder = kept_folder("methods")
    if folder is None or sys.dont_write_bytecode:
        return None
    methods = KeptMethods(folder)
    vars(dataclasses)["exec"] = methods.execute
    return methods
