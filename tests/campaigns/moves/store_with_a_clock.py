"""The store with a clock that a test may set while it runs: as many seconds ahead as a file beside its data says.

Only the store's own clock moves. gRPC reads the system's in Python and in C, and on a machine both jump together.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from cachestore_svc import __main__ as store

CLOCK = "clock"


def main() -> int:
    """As `cachestore_svc.__main__.main`."""
    file = Path(sys.argv[sys.argv.index("--data-dir") + 1]).parent / CLOCK

    def set_by_somebody() -> float:
        return time.time() + (float(file.read_text()) if file.exists() else 0.0)

    store.time = SimpleNamespace(**{**vars(time), "time": set_by_somebody})  # type: ignore[assignment]
    return store.main()
