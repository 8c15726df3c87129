"""Two namespaces on one store, engine and gateway: processes that know their callers, and the memory these take."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from kvasir.credentials import CLIENT, ENGINE, Principal

from tests.gateway.serving import GatewayProcess, running_gateway
from tests.running.guarded_house import guarded
from tests.running.system_fixtures import House

ATTACKERS = ("a0", "a1", "a2", "a3")
"""Credentials of namespace `a`, all of role client: what any tenant has."""
_PRINCIPALS = (
    *(Principal(name, "a", frozenset({CLIENT})) for name in ATTACKERS),
    Principal("b", "b", frozenset({CLIENT})),
    Principal("b-engine", "b", frozenset({ENGINE})),
)
_SAMPLE_EVERY_S = 0.05
# What a service is given when it is started: a store is too slow for a turn after 250 ms, and a miss is told.
_OPTIONS = ("--store-budget-ms", "250", "--memory-gib", "0.25")


@dataclass
class Arena:
    """The house, and the tokens of those who meet in it."""

    house: House
    gateway: GatewayProcess
    tokens: Mapping[str, str]

    @property
    def services(self) -> Mapping[str, psutil.Process]:
        services = {service.name: psutil.Process(service.pid) for service in (self.house.store, self.house.engine)}
        return {**services, "gateway": psutil.Process(self.gateway.pid)}


@contextmanager
def open_arena(directory: Path, engine_options: Sequence[str] = ()) -> Iterator[Arena]:
    """All services, started; gone afterwards whatever happens."""
    house = House(directory / "house", engine_options=[*_OPTIONS, *engine_options])
    tokens = guarded(house, _PRINCIPALS)
    try:
        house.start()
        with running_gateway(house, "--credentials", str(house.root / "credentials.toml")) as gateway:
            yield Arena(house, gateway, tokens)
    finally:
        house.close()


@dataclass
class Memory:
    """The most resident memory of each service while this was sampling, in MiB."""

    most: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def sampled(self, services: Mapping[str, psutil.Process]) -> Iterator[None]:
        over = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(services, over), daemon=True)
        sampler.start()
        try:
            yield
        finally:
            over.set()
            sampler.join()

    def _sample(self, services: Mapping[str, psutil.Process], over: threading.Event) -> None:
        while not over.wait(_SAMPLE_EVERY_S):
            for name, process in services.items():
                mib = process.memory_info().rss >> 20
                self.most[name] = max(self.most.get(name, 0), mib)
