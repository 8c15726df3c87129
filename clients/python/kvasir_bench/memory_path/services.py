"""What `kvasir bench memory-path` measures: a store and an engine in a home of their own, as `kvasir up` has them."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvasir.cli.own_services.own_processes import OwnProcesses
from kvasir.cli.running.home import Home
from kvasir.cli.running.own_credentials import make_credentials
from kvasir.cli.running.plan import Plan, plan_of
from kvasir.cli.settings.asked import Asked
from kvasir.clients import InferenceClient
from kvasir.options.up import UpTable
from kvasir.syncing import Scratch
from kvasir.waits import HANGS_S

_PLAYED_ENGINE = "kvasir_bench.played"
_READY = "engine.ready"
# The log's own fields, and those of the model that the results have.
_NOT_OF_STARTS = {"event", "level", "logger", "timestamp", "address", "model", "device"}
_GIB = 1 << 30
_LEAST_GIB = 1.0
_ROOM = 1.5  # for the longest memory, beside what of others is hot
_SHAPE_BYTES_PER_TOKEN = 36_864  # of Llama 3.1 8B, whose shape is the largest that is played


class MeasuredServices:
    """A store on a disk and an engine, as processes that are started and killed."""

    def __init__(self, root: Path, plan: Plan, *, is_played: bool) -> None:
        self.directory = root
        self.is_played = is_played  # the engine fills pages, and computes nothing
        self._plan = plan
        self._processes = OwnProcesses()

    def read_nothing_ahead(self) -> None:
        """From the store's next start on its files come from the disk when an engine wants them."""
        store = replace(self._plan.store, options={**self._plan.store.options, "read_ahead_bytes": 0})
        self._plan = replace(self._plan, store=store)

    def start(self) -> dict[str, Any]:
        """Start what does not run. Seconds until each was ready, and what the engine logs of its start."""
        services = [self._plan.store.service(), self._plan.engine.service()]
        missing = [service for service in services if not self._processes.is_running(service.name)]
        seconds = self._processes.start(missing)
        return {f"{name}_s": round(value, 3) for name, value in seconds.items()} | self._logged()

    def start_gateway(self) -> tuple[str, str]:
        """Start it with the other services. Its URL, and the key of its callers."""
        self.start()
        assert self._plan.gateway is not None
        if not self._processes.is_running("http"):
            self._processes.start([self._plan.gateway.service()])
        token_file = self.directory / "h" / "tokens" / "client.token"
        return f"http://{self._plan.gateway.endpoint.address}", token_file.read_text().strip()

    def kill(self, *names: str) -> None:
        self._processes.kill(names)

    def client(self) -> InferenceClient:
        return InferenceClient.connect(self.address, timeout_s=HANGS_S)

    @property
    def address(self) -> str:
        return self._plan.engine.endpoint.address

    def files(self) -> list[Path]:
        return [path for path in self._plan.store.data_dir.rglob("*") if path.is_file()]

    def end(self) -> None:
        self._processes.end()

    def _logged(self) -> dict[str, Any]:
        """Numbers that the engine's last start logged with its "ready"."""
        lines = (line for line in self._plan.engine.log_file.read_text(encoding="utf-8").splitlines() if _READY in line)
        last: dict[str, Any] = {}
        for line in lines:
            try:
                last = json.loads(line)
            except ValueError:
                continue
        return {key: value for key, value in last.items() if key not in _NOT_OF_STARTS and type(value) in (int, float)}


def memory_gib_for(longest_tokens: int) -> float:
    """The engine's memory where nobody sets it: the longest memory of a played shape, and half as much."""
    return max(_LEAST_GIB, round(_ROOM * longest_tokens * _SHAPE_BYTES_PER_TOKEN / _GIB, 1))


@contextmanager
def measured_services(
    home: Path,
    *,
    model: str,
    played: Sequence[str],
    memory_gib: float,
    options: Sequence[str] = (),
    logs_to: Path | None = None,
    http: str = "",
) -> Iterator[MeasuredServices]:
    """The services, in a directory below `home` until the block's end. `played`: the played engine's options."""
    with Scratch("kv-bench-", home) as root:
        own = Home(root / "h")
        own.make()
        own.audit_file("store").parent.mkdir(mode=0o700)
        if http:
            make_credentials(own)
        plan = plan_of(Asked(own, UpTable(http=http)))
        given = {"model": model, "memory_gib": memory_gib, "log_format": "json"}
        engine = replace(plan.engine, options={**plan.engine.options, **given}, words=tuple(options))
        if played:
            engine = replace(engine, program=(_PLAYED_ENGINE, *played))
        plan = replace(plan, engine=engine)
        services = MeasuredServices(root, plan, is_played=bool(played))
        try:
            yield services
        finally:
            services.end()
            for log in own.logs.glob("*.log") if logs_to is not None else ():
                shutil.copyfile(log, f"{logs_to}.{log.name}")
