"""How both services log an error: its type and its places only, because its text and locals may hold a prompt."""

import sys
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any


def places(error: BaseException) -> str:
    """Where the error was raised, innermost frame first: function, file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.name} {Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


def without_payload(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: the error that a record carries becomes `error` and `at`.

    A renderer for consoles would print its traceback with the locals of every frame.
    """
    carried = event.pop("exc_info", None)
    if carried is True:
        carried = sys.exc_info()
    error = carried[1] if isinstance(carried, tuple) else carried
    if isinstance(error, BaseException):
        event["error"], event["at"] = type(error).__name__, places(error)
    return event
