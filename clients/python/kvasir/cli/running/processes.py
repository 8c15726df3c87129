"""The command lines of the services, which are run as programs and never imported."""

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.running.health import ENGINE_SERVICE, STORE_SERVICE, Health, http_health, is_ready
from kvasir.cli.running.home import Endpoint
from kvasir.cli.running.supervisor import Service
from kvasir.options.engine import EngineTable
from kvasir.options.finding import command_line
from kvasir.options.gateway import GatewayTable
from kvasir.options.store import StoreTable
from kvasir.options.table import Table
from kvasir.waits import HANGS_S

# The first start reads a large model from disk and hashes its weights.
ENGINE_READY_WITHIN_S = 600.0


_TABLES: Mapping[str, type[Table]] = {"store": StoreTable, "engine": EngineTable, "http": GatewayTable}
_PROGRAMS = {"store": "cachestore_svc", "engine": "inference_svc", "http": "kvasir_gateway"}


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A service to start: store, engine or http, the gateway before an engine."""

    name: str
    endpoint: Endpoint  # how it is reached from here
    log_file: Path
    options: Mapping[str, object]  # of the service, by name
    program: tuple[str, ...] = ()  # what Python runs instead, and what stands before the service's own words
    words: tuple[str, ...] = ()  # of a command line, behind the options

    @property
    def data_dir(self) -> Path:
        return Path(str(self.options["data_dir"]))

    def argv(self) -> tuple[str, ...]:
        program = (*(self.program or (_PROGRAMS[self.name],)), *(() if self.name == "http" else ("serve",)))
        return (sys.executable, "-m", *program, *command_line(_TABLES[self.name], self.options), *self.words)

    def service(self) -> Service:
        within_s = {"store": HANGS_S, "engine": ENGINE_READY_WITHIN_S, "http": ENGINE_READY_WITHIN_S + HANGS_S}
        state_dir = Path(str(self.options.get("state_dir", "")))
        phases = functools.partial(_phases, state_dir) if self.name == "engine" else str
        return Service(self.name, self.argv(), self.log_file, self._answers, within_s[self.name], phases)

    async def _answers(self) -> bool:
        if self.name == "http":  # it says that it is unwell as long as its engine is away, and lives
            return await http_health(self.endpoint.address) in (Health.READY, Health.NOT_READY)
        return await is_ready(self.endpoint, STORE_SERVICE if self.name == "store" else ENGINE_SERVICE)


def _phases(state_dir: Path) -> str:
    """What the engine's last start spent its time on; empty if it left no report."""
    try:
        seconds: dict[str, float] = json.loads((state_dir / "start.json").read_text())
        return ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return ""
