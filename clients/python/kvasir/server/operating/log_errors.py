"""How services log an error: its type and places only, as its text and locals may hold a prompt; and how often."""

import copy
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_STRANGERS_LINES_PER_S = 10
_ASYNCIO = "asyncio"


class StrangersLines:
    """How many lines those get who may not call: anybody could fill the disk with more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._second = 0
        self._lines = self._left_out = 0

    def left_out(self) -> int | None:
        """How many got no line before the one that may be written now; None: none may."""
        if (second := int(self._clock())) != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > _STRANGERS_LINES_PER_S:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out


def places(error: BaseException) -> str:
    """Where the error was raised, innermost frame first: function, file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.name} {Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


def without_payload(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: an error becomes `error` and `at`, without the locals of every frame."""
    carried = event.pop("exc_info", None)
    if carried is True:
        carried = sys.exc_info()
    error = carried[1] if isinstance(carried, tuple) else carried
    if isinstance(error, BaseException):
        event["error"], event["at"] = type(error).__name__, places(error)
    if event.get("logger") == _ASYNCIO:
        event["event"] = _without_reprs(str(event["event"]))
    return event


class LineWithoutPayload(logging.Formatter):
    """The same for a program without structlog."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        error = record.exc_info[1] if record.exc_info else None
        told = "" if error is None else f" error={type(error).__name__} at={places(error)}"
        record.msg, record.args, record.exc_info, record.exc_text = _event(record) + told, (), None, None
        return super().format(record)


class JsonWithoutPayload(logging.Formatter):
    """The same as an object, with the fields that structlog gives it."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        about = {} if error is None else {"error": type(error).__name__, "at": places(error)}
        at = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        line = {"event": _event(record), "level": record.levelname.lower(), "logger": record.name, "timestamp": at}
        return json.dumps(line | about)


def _event(record: logging.LogRecord) -> str:
    return _without_reprs(record.getMessage()) if record.name == _ASYNCIO else record.getMessage()


def _without_reprs(words: str) -> str:
    """asyncio's message without its reprs of tasks and callbacks, which show errors' texts and arguments."""
    return re.split(r"[(\n]", words, maxsplit=1)[0]
