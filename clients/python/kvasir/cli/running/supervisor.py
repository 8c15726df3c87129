"""Services as one group: started together, restarted when they crash, but not too often, stopped in reverse order."""

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.cli.own_services.engine_ahead import Adopted, EngineAhead, hangups_wait
from kvasir.cli.running.holding import GRACE_S, Patience
from kvasir.cli.running.logs import GrowingLog, is_important, last_lines, rotate_log
from kvasir.errors import Unavailable
from kvasir.waits import LOOK_S, PAUSE_S


@dataclass(frozen=True, slots=True)
class Service:
    """One process to keep running."""

    name: str
    argv: tuple[str, ...]
    log_file: Path
    is_ready: Callable[[], Coroutine[Any, Any, bool]]
    ready_within_s: float
    start_in_words: Callable[[], str] = lambda: ""
    """Facts of its start, read once it is ready."""
    has_data: Callable[[], bool] = lambda: True
    """Whether its data are where they were: a store begins an empty one where its disk is not mounted."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a service may crash. Delays double from the first to the longest."""

    max_crashes: int = 5
    within_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 8.0
    look_every_s: float = 5.0
    silent_after_s: float = 30.0

    def delay_s(self, crashes: int) -> float:
        """How long to wait before the restart after this many recent crashes (1 or more)."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (crashes - 1))


@dataclass
class _Child:
    service: Service
    process: asyncio.subprocess.Process | Adopted | None = None
    is_starting: bool = True
    began: float = 0.0  # when this process was started
    log_start: int = 0  # where this process began in its log: earlier lines are of other processes
    crashes: deque[float] = field(default_factory=deque)


class NotStartedError(Unavailable):
    """A service of a group that begins did not get ready."""


class Supervisor:
    """Runs a group of services. `say` gets one line for people at each event."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        say: Callable[[str], None],
        policy: RestartPolicy | None = None,
        grace_s: float = GRACE_S,
        keep_descriptor: int | None = None,
        ahead: EngineAhead | None = None,
    ) -> None:
        """`keep_descriptor` is inherited by the services: a lock on it lasts as long as any of the group lives.
        `ahead`: has begun, and becomes the engine's first process."""
        self._children = [_Child(service) for service in services]
        self._tell = say
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._keep = () if keep_descriptor is None else (keep_descriptor,)
        self._ahead = ahead
        self._stopping = asyncio.Event()
        self._changed: Callable[[], None] = lambda: None
        self._is_change_reported = True
        self.killed: list[str] = []  # services that did not stop

    def pid(self, name: str) -> int:
        """The process of a service; 0 when it does not run."""
        child = next(child for child in self._children if child.service.name == name)
        return child.process.pid if child.process is not None and child.process.returncode is None else 0

    def stop(self) -> None:
        """Begin an orderly stop. Safe to repeat."""
        self._stopping.set()

    async def run(self, started: Callable[[], None], changed: Callable[[], None]) -> None:
        """Start all services, call `started` when all are ready, and keep them running until stop().

        `changed` is called after each start of a process, which has a new pid, and again while it raises OSError. If a
        service does not start or crashes too often, the others are stopped, and run() raises Unavailable with the last
        lines of that service's log."""
        self._changed = changed
        watching = asyncio.create_task(self._watch_logs())
        try:
            await self._until_stopped(self._start_together())
            if self._stopping.is_set():  # perhaps before each had its process
                return
            started()
            async with asyncio.TaskGroup() as watchers:
                for child in self._children:
                    watchers.create_task(self._until_stopped(self._keep_running(child)))
                    watchers.create_task(self._until_stopped(self._watch_answers(child)))
        except ExceptionGroup as group:  # not `except*`, which wraps what it raises before Python 3.11.4
            refused, others = group.split(Unavailable)
            if refused is None or others is not None:
                raise
            raise refused.exceptions[0] from None
        finally:
            watching.cancel()
            for child in reversed(self._children):  # the engine may still have something to store
                await self._stop(child)

    async def _watch_logs(self) -> None:
        """Show the warnings and errors of the services' logs."""
        logs = [(child.service.name, GrowingLog(child.service.log_file)) for child in self._children]
        while True:
            await asyncio.sleep(PAUSE_S)
            if not self._is_change_reported:
                self._report_change()
            for name, log in logs:
                for line in filter(is_important, log.new_lines()):
                    self._say(f"{name}: {line}")

    async def _watch_answers(self, child: _Child) -> None:
        """Report that a service hangs. It is not killed for it: what it computes may only be slow."""
        answered, is_silent = time.monotonic(), False
        while True:
            await asyncio.sleep(self._policy.look_every_s)
            if child.is_starting or await child.service.is_ready():
                answered = time.monotonic()
                if is_silent:
                    self._say(f"{child.service.name} answers again")
                is_silent = False
            elif not is_silent and time.monotonic() - answered > self._policy.silent_after_s:
                is_silent = True
                pid = child.process.pid if child.process is not None else 0
                self._say(
                    f"{child.service.name} (pid {pid}) has not answered for {self._policy.silent_after_s:g} s; "
                    f"if it stays so, kill -9 {pid}: it is started again"
                )

    async def _until_stopped(self, work: Awaitable[None]) -> None:
        """Do the work, unless a stop comes first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)  # waits for their ends, not for our own cancel

    async def _start_together(self) -> None:
        """Each imports for a second or more; one that needs another waits for it."""
        for child in self._children:
            if self._stopping.is_set():
                return
            await self._begin(child)
        async with asyncio.TaskGroup() as waiting:  # the first that cannot start is reported before slow ones start
            for child in self._children:
                waiting.create_task(self._until_ready(child))

    async def _begin(self, child: _Child) -> None:
        service = child.service
        child.is_starting, child.began = True, time.monotonic()
        rotate_log(service.log_file)
        with service.log_file.open("ab") as log, hangups_wait():
            service.log_file.chmod(0o600)
            child.log_start = log.tell()
            child.process = self._begun_ahead(service, log.fileno())
            if child.process is None:
                # A session of its own: the terminal's Ctrl-C comes here only, and the group ends in order.
                child.process = await asyncio.create_subprocess_exec(
                    *service.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=self._keep,
                    umask=0o077,
                    cwd=None if _has_place() else service.log_file.parent,
                )
        self._report_change()

    def _begun_ahead(self, service: Service, log: int) -> Adopted | None:
        if self._ahead is None or service.name != "engine":
            return None
        ahead, self._ahead = self._ahead, None
        return ahead.go_on(service.argv if _has_place() else (), (log, *self._keep))

    def _report_change(self) -> None:
        """A full disk ends no group: the change is reported when there is room."""
        try:
            self._changed()
        except OSError:
            self._is_change_reported = False
        else:
            self._is_change_reported = True

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk takes no line of a log
            self._tell(line)

    async def _until_ready(self, child: _Child) -> None:
        service, process = child.service, child.process
        assert process is not None
        while not await service.is_ready():
            if process.returncode is not None:
                what = f"{service.name} ended with {ending(process.returncode)} at its start"
                raise self._failed(child, what, NotStartedError)
            if time.monotonic() - child.began > service.ready_within_s:
                process.kill()
                await process.wait()
                what = f"{service.name} was not ready within {service.ready_within_s:g} s"
                raise self._failed(child, what, NotStartedError)
            await asyncio.sleep(LOOK_S)
        child.is_starting = False
        phases = service.start_in_words()
        took = f"{time.monotonic() - child.began:.1f} s{': ' if phases else ''}{phases}"
        self._say(f"{service.name} is ready (pid {process.pid}, {took})")

    async def _keep_running(self, child: _Child) -> None:
        while True:
            assert child.process is not None
            code = await child.process.wait()
            child.is_starting = True
            delay_s = self._next_delay_s(child, f"{child.service.name} ended with {ending(code)}")
            self._say(f"{child.service.name} ended with {ending(code)}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            if not child.service.has_data():
                self._say(f"{child.service.name} is not started: its data are gone; is its disk mounted?")
                continue
            with contextlib.suppress(Unavailable, OSError):  # counted as one more crash when the loop comes round
                await self._begin(child)
                await self._until_ready(child)

    def _next_delay_s(self, child: _Child, what: str) -> float:
        """How long to wait before a restart. Raises Unavailable when there were too many."""
        now = time.monotonic()
        child.crashes.append(now)
        while child.crashes[0] < now - self._policy.within_s:
            child.crashes.popleft()
        if len(child.crashes) > self._policy.max_crashes:
            raise self._failed(child, f"{what}, {len(child.crashes)} times within {self._policy.within_s:g} s")
        return self._policy.delay_s(len(child.crashes))

    def _failed(self, child: _Child, what: str, kind: type[Unavailable] = Unavailable) -> Unavailable:
        lines = last_lines(child.service.log_file, since=child.log_start)
        shown = "; its last words: " + " | ".join(lines) if lines else ""
        return kind(f"{what}{shown} (log: {child.service.log_file})", reason="SERVICE_DID_NOT_START")

    async def _stop(self, child: _Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        patience = Patience(self._grace_s, child.service.log_file)
        ended = asyncio.ensure_future(process.wait())
        while not ended.done() and not patience.is_over:
            await asyncio.wait({ended}, timeout=LOOK_S)
        if not ended.done():
            self.killed.append(child.service.name)
            self._say(f"{child.service.name} did not stop {patience.in_words} and is killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await ended


def _has_place() -> bool:
    """Whether our working directory is there: in one that is gone MKL loads nothing."""
    with contextlib.suppress(FileNotFoundError):
        return bool(Path.cwd())
    return False


def ending(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
