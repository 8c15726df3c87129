"""Services that a command starts for itself and ends: the demo, the self-test and benches. Nobody restarts them."""

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.cli.running.logs import last_lines
from kvasir.cli.running.supervisor import Service, ending
from kvasir.errors import Unavailable
from kvasir.waits import LOOK_S, SILENCE_S


@dataclass
class OwnProcesses:
    """Processes by their service's name, in the order of their first starts."""

    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, services: Sequence[Service]) -> dict[str, float]:
        """Start them together; seconds until each was ready. Raises Unavailable with last log lines."""
        began = time.monotonic()
        starts = [(service, _begun(service)) for service in services]
        self._processes |= {service.name: process for service, (process, _) in starts}
        return {service.name: self._until_ready(service, log_start, began) for service, (_, log_start) in starts}

    def kill(self, names: Sequence[str]) -> list[int]:
        """`kill -9`, now; returns the exit statuses."""
        killed = [self._processes[name] for name in names]
        for process in killed:
            process.send_signal(signal.SIGKILL)
        return [_gone(process) for process in killed]

    def is_running(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def end(self) -> None:
        """End all, the last one started first, whatever comes between: an engine may still have something to store."""
        with contextlib.ExitStack() as stack:
            for process in self._processes.values():
                stack.callback(_end, process)

    def _until_ready(self, service: Service, log_start: int, began: float) -> float:
        process = self._processes[service.name]
        while not asyncio.run(service.is_ready()):
            elapsed_s = time.monotonic() - began
            if process.poll() is not None or elapsed_s > service.ready_within_s:
                what = "is not ready" if process.poll() is None else f"ended with {ending(process.returncode)}"
                words = " | ".join(last_lines(service.log_file, since=log_start))
                raise Unavailable(f"{service.name} {what}: {words}", reason="SERVICE_DID_NOT_START")
            time.sleep(LOOK_S)
        return time.monotonic() - began


def _begun(service: Service) -> tuple[subprocess.Popen[bytes], int]:
    """Its process, and where that begins in the log."""
    with service.log_file.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            held(service.argv), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, umask=0o077
        )
    return process, log_start


def held(argv: Sequence[str]) -> list[str]:
    """`python -m MODULE …`, which ends with its input."""
    python, option, *words = argv
    return [python, option, "kvasir.cli.own_services.held", *words]


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SILENCE_S)
    finally:
        process.kill()
        _gone(process)


def _gone(process: "subprocess.Popen[bytes]") -> int:
    """Its exit status, once it has ended."""
    if process.stdin is not None:
        process.stdin.close()
    return process.wait()
