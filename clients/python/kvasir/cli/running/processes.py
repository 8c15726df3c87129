"""The command lines of the services, as the supervisor, the demo and the self-test start them.

The command line runs the services as programs and never imports them: `python -m cachestore_svc …` and so on.
"""

import functools
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.running.health import ENGINE_SERVICE, STORE_SERVICE, Health, http_health, is_ready
from kvasir.cli.running.home import Endpoint
from kvasir.cli.running.supervisor import Service
from kvasir.options.engine import EngineTable
from kvasir.options.finding import command_line
from kvasir.options.gateway import GatewayTable
from kvasir.options.store import StoreTable
from kvasir.waits import HANGS_S

# The first start reads a large model from disk and hashes its weights.
ENGINE_READY_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class StoreProcess:
    """A cache store to start."""

    endpoint: Endpoint  # how it is reached from here
    log_file: Path
    options: Mapping[str, object]  # of the service, by name

    @property
    def data_dir(self) -> Path:
        return Path(str(self.options["data_dir"]))

    def argv(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "cachestore_svc", "serve", *command_line(StoreTable, self.options))

    def service(self) -> Service:
        return Service("store", self.argv(), self.log_file, _health(self.endpoint, STORE_SERVICE), HANGS_S)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An inference service to start, with the store that it publishes to."""

    endpoint: Endpoint  # how it is reached from here
    log_file: Path
    options: Mapping[str, object]  # of the service, by name
    program: tuple[str, ...] = ("inference_svc",)  # what Python runs, and what stands before the service's own words
    words: tuple[str, ...] = ()  # of a command line, behind the options

    def argv(self) -> tuple[str, ...]:
        options = command_line(EngineTable, self.options)
        return (sys.executable, "-m", *self.program, "serve", *options, *self.words)

    def service(self) -> Service:
        return Service(
            "engine",
            self.argv(),
            self.log_file,
            _health(self.endpoint, ENGINE_SERVICE),
            ENGINE_READY_WITHIN_S,
            start_in_words=functools.partial(_phases, Path(str(self.options["state_dir"]))),
        )


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """An HTTP gateway to start, before an engine. Callers' keys are the tokens of the credentials."""

    listen: str  # HOST:PORT of loopback
    log_file: Path
    options: Mapping[str, object]  # of the service, by name

    def argv(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "kvasir_gateway", *command_line(GatewayTable, self.options))

    def service(self) -> Service:
        async def answers() -> bool:
            # It says that it is unwell as long as its engine is away, and lives.
            return await http_health(self.listen) in (Health.READY, Health.NOT_READY)

        return Service("http", self.argv(), self.log_file, answers, ENGINE_READY_WITHIN_S + HANGS_S)


def _phases(state_dir: Path) -> str:
    """What the engine's last start spent its time on; empty if it left no report."""
    try:
        seconds: dict[str, float] = json.loads((state_dir / "start.json").read_text())
        return ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return ""


def _health(endpoint: Endpoint, service: str) -> Callable[[], Awaitable[bool]]:
    return functools.partial(is_ready, endpoint, service)
