"""A clock that tests set while a service runs: as many seconds ahead as the file says that this variable names.

Only the service's own clock moves. gRPC reads the system's in Python and in C, and on a machine both jump together.
"""

import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

VARIABLE = "KVASIR_TEST_CLOCK"


def follow(service: ModuleType, file: Path) -> None:
    """Let a service's program, which passes the clock to all else, read the clock that is set."""

    def ahead_s() -> float:
        return float(file.read_text()) if file.exists() else 0.0

    def now() -> float:
        return time.time() + ahead_s()

    def now_ns() -> int:
        return time.time_ns() + int(ahead_s() * 1e9)

    service.time = SimpleNamespace(**{**vars(time), "time": now, "time_ns": now_ns})  # type: ignore[attr-defined]


def set_ahead(file: Path, seconds: float) -> None:
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.rename(file)
