"""Logs of supervised services: rotated when long, quoted when a service dies, followed as they grow."""

import os
import re
import sys
from pathlib import Path

_MAX_BYTES = 16 << 20
_LAST_LINES = 12
_FIRST_READ_BYTES = 8 << 10
_MAX_READ_BYTES = 64 << 10
# Levels as structlog's console and JSON renderers and the gateway write them, and the first line of a traceback.
_IMPORTANT = re.compile(
    r"\[(?:warning|error|critical)\s*\]|\"level\": \"(?:warning|error|critical)\"|^Traceback "
    r"|^[\d-]+ [\d:,]+ (?:WARNING|ERROR|CRITICAL) "
)
_PROBLEM_OF_UP = re.compile(r"^\w+ (?:ended with|did not stop|\(pid \d+\) has not answered) |^kvasir: |^Traceback ")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def rotate_log(path: Path) -> None:
    """Rename a long log, over the log that was renamed before."""
    if path.exists() and path.stat().st_size > _MAX_BYTES:
        path.replace(path.with_suffix(".1.log"))


def rotate_own_log(path: Path) -> None:
    """As `rotate_log`; where launchd opened the log as this process's stderr, that goes to the new file."""
    try:
        is_own = os.path.samestat(os.fstat(sys.stderr.fileno()), path.stat())
    except (OSError, ValueError):
        return
    rotate_log(path)
    if is_own and not path.exists():
        with path.open("ab") as new:
            path.chmod(0o600)
            os.dup2(new.fileno(), sys.stderr.fileno())


def last_lines(path: Path, count: int = _LAST_LINES, since: int = 0) -> list[str]:
    """The last lines of a log, from byte `since` on; none when there is no log."""
    try:
        with path.open("rb") as file:
            start = size = max(since, file.seek(0, os.SEEK_END))
            lines: list[str] = []
            while len(lines) <= count and start > since:  # one line more than wanted: the first may be cut
                start = max(since, size - max(_FIRST_READ_BYTES, 2 * (size - start)))
                file.seek(start)
                text = _COLOURS.sub("", file.read(size - start).decode("utf-8", "replace"))
                lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    except OSError:
        return []
    return lines[-count:]


def is_important(line: str) -> bool:
    """Whether a person should see it: a warning or an error."""
    return _IMPORTANT.search(line) is not None


def is_problem(service: str, line: str) -> bool:
    """Whether a line of this service's log is a problem. In the log of `up` warnings of services are copies."""
    return (_PROBLEM_OF_UP if service == "up" else _IMPORTANT).search(line) is not None


class GrowingLog:
    """Gives each line of a growing log once, without its colours."""

    def __init__(self, path: Path) -> None:
        """Begins at the log's present end."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """The lines since the last call. After a burst, only the newest are read."""
        try:
            size = self._path.stat().st_size
            if size < self._offset:  # rotated
                self._offset, self._rest = 0, b""
            with self._path.open("rb") as file:
                if size - self._offset > _MAX_READ_BYTES:
                    self._offset, self._rest = size - _MAX_READ_BYTES, b""
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [_COLOURS.sub("", line.decode("utf-8", "replace")).rstrip() for line in whole]
