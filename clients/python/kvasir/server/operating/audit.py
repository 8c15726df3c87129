"""The audit: a JSON line for each call that needs a privilege, without texts, and never in a call's way."""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvasir.credentials import OWNER, Principal
from kvasir.errors import KvasirError
from kvasir.waits import SOON_S

_LOG = logging.getLogger("kvasir.audit")
MAX_FILE_BYTES = 8 << 20
KEPT_FILES = 8  # beside the one that is written
_MAX_WAITING = 10_000
_MAX_NAME_CHARS = 256
# How a call ended. Refused: it got nothing. Failed: it was let in, and may have got some of it.
ALLOWED, REFUSED, FAILED = "allowed", "refused", "failed"
_FAILURES = frozenset({"CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
_LACKS_PRIVILEGE = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
# The fields of a request that name its subject, and their names in a line.
_SUBJECTS = {
    "agent_id": "agent",
    "source_agent_id": "source_agent",
    "local_agent_id": "local_agent",
    "peer": "peer",
    "from_peer": "peer",
    "to_peer": "peer",
    "model": "model",
}


@dataclass(slots=True)
class Deed:
    """A call under way, as its line will have it."""

    method: str  # as /package.Service/Rpc
    caller: Principal | None = None  # None: nobody known
    subjects: dict[str, str] = field(default_factory=dict)

    def is_about(self, request: Any) -> None:
        """Note the names that a request has; of a stream, its first message."""
        for message in (request, *(getattr(request, name, None) for name in ("agent", "header"))):
            for name, word in _SUBJECTS.items():
                value = getattr(message, name, "")
                if isinstance(value, str) and value:
                    self.subjects[word] = value[:_MAX_NAME_CHARS]


_deed: ContextVar[Deed | None] = ContextVar("kvasir_deed", default=None)


def current_deed() -> Deed:
    """The call under way; outside of one, a deed without a line."""
    return _deed.get() or Deed("")


@dataclass(frozen=True, slots=True)
class Audit:
    """The lines of one service. Without a file nothing is written."""

    service: str = ""
    file: "AuditFile | None" = None
    privileged: Collection[str] = ()  # methods, as /package.Service/Rpc
    now: Callable[[], float] = time.time  # Unix seconds

    @property
    def counts(self) -> dict[str, int]:
        """Lines since the start: written and lost."""
        return {"written": self.file.written, "lost": self.file.lost} if self.file is not None else {}

    def begin(self, method: str) -> Deed:
        """A call begins. Its handler finds it by `current_deed`."""
        deed = Deed(method)
        _deed.set(deed)
        return deed

    def ended(self, deed: Deed, status: str, reason: str, request_id: str, left_out: int = 0) -> None:
        """Write the line of a call that needed a privilege, or lacked one. `status`: gRPC's word. `left_out`: so many
        strangers got no line before this one."""
        caller = deed.caller
        is_peer = caller is not None and caller.is_peer
        if not (deed.method in self.privileged or is_peer or status in _LACKS_PRIVILEGE):
            return
        outcome = ALLOWED if status == "OK" else FAILED if status in _FAILURES else REFUSED
        what = deed.method.rpartition(".")[2]
        self.tell(caller, what, outcome, reason, deed.subjects, request_id, left_out=left_out)

    def tell(
        self,
        caller: Principal | None,
        what: str,
        outcome: str,
        reason: str = "",
        subjects: Mapping[str, str] | None = None,
        request_id: str = "",
        *,
        left_out: int = 0,
    ) -> None:
        """One line. `what`: an RPC without its package, or a word for what is none."""
        if self.file is None:
            return
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(self.now(), UTC).isoformat(timespec="milliseconds"),
            "service": self.service,
            "who": caller.name if caller is not None else "",
            "roles": sorted(caller.roles) if caller is not None else [],
            "namespace": caller.namespace if caller is not None else "",
            "what": what,
            **(subjects or {}),
            "outcome": outcome,
            "reason": reason,
            "request_id": request_id,
        }
        self.file.put(line | ({"left_out": left_out} if left_out else {}))

    def close(self) -> None:
        """Write what waits, for a moment at most."""
        if self.file is not None:
            self.file.close()


@contextlib.contextmanager
def owners_deed(service: str, file: Path | None, what: str, subjects: dict[str, str]) -> Iterator[Audit]:
    """Report a program's deed for the owner beside a service: one line at its end. `subjects` may grow until then."""
    audit = Audit(service, None if file is None else AuditFile(file, max_bytes=sys.maxsize))
    outcome, reason = FAILED, ""
    try:
        yield audit
        outcome = ALLOWED
    except KvasirError as error:
        outcome, reason = REFUSED, error.reason
        raise
    finally:
        audit.tell(OWNER, what, outcome, reason, subjects)
        audit.close()


class AuditFile:
    """Lines on disk (0600) with `KEPT_FILES` older files, by a thread of its own. `written` and `lost` count lines."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES, kept: int = KEPT_FILES) -> None:
        self.written = self.lost = 0
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._is_failing = False
        self._descriptor: int | None = None
        self._size_bytes = 0
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    def put(self, line: Mapping[str, object]) -> None:
        """Never waits for the disk, and never raises."""
        data = json.dumps(line, ensure_ascii=True).encode() + b"\n"
        with self._changed:
            if len(self._waiting) < _MAX_WAITING and not self._is_closing:
                self._waiting.append(data)
                self._changed.notify()
            else:
                self.lost += 1

    def close(self) -> None:
        """Write what waits, for a moment at most. Lines that come later are lost."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(SOON_S)

    def _write_all(self) -> None:
        while (line := self._next()) is not None:
            try:
                self._write(line)
            except OSError as error:
                self._fail(error)
            else:
                self.written += 1
                self._is_failing = False
        self._leave()

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._waiting:
                if self._is_closing:
                    return None
                self._changed.wait()
            return self._waiting.popleft()

    def _write(self, line: bytes) -> None:
        if self._descriptor is None:
            self._open()
        if self._size_bytes and self._size_bytes + len(line) > self._max_bytes:
            self._rotate()
        assert self._descriptor is not None
        if (count := os.write(self._descriptor, line)) < len(line):
            self._size_bytes += count
            raise OSError(f"{count} of {len(line)} bytes were written")
        self._size_bytes += len(line)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(self._path, flags, 0o600)
        os.fchmod(self._descriptor, 0o600)
        self._size_bytes = os.fstat(self._descriptor).st_size
        # A crash or a full disk may have cut the last line: the next one begins on a line of its own.
        if self._size_bytes and os.pread(self._descriptor, 1, self._size_bytes - 1) != b"\n":
            self._size_bytes += os.write(self._descriptor, b"\n")

    def _rotate(self) -> None:
        self._leave()
        for number in range(self._kept, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._open()

    def _leave(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _fail(self, error: OSError) -> None:
        self.lost += 1
        self._leave()
        if not self._is_failing:
            _LOG.error("audit.lost error=%s: lines are lost until the disk takes them again", error.strerror or error)
        self._is_failing = True
