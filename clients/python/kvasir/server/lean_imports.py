"""Imports without the large packages that a library looks for and we do not use of it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
