"""A house of two namespaces with a gateway before it, each with its operators' page, shared by the tests here."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.gateway.conftest import Front, running_front
from tests.running.ports import free_port
from tests.running.scraping import Scraped, health, scrape


@dataclass(frozen=True)
class Watched:
    """Services, and the ports of their operators' pages by name."""

    front: Front
    ports: dict[str, int]

    def scrape(self, service: str) -> Scraped:
        return scrape(self.ports[service])

    def problems(self, service: str) -> tuple[int, list[str]]:
        """The status of /healthz, and the reasons that it gives."""
        status, body = health(self.ports[service])
        assert body["status"] == ("ok" if status == 200 else "unwell")
        return status, [each["reason"] for each in body["problems"]]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    ports = {name: free_port() for name in ("store", "engine", "gateway")}
    options = {name: ("--metrics-listen", f"127.0.0.1:{port}") for name, port in ports.items()}
    with running_front(
        tmp_path_factory.mktemp("watched"),
        store_options=options["store"],
        engine_options=(*options["engine"], "--log-format", "json"),
        gateway_options=options["gateway"],
    ) as front:
        yield Watched(front, ports)
