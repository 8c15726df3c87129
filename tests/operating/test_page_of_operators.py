"""The operators' page itself: it answers this machine, and no site whose name was made to point here."""

import http.client
from collections.abc import Iterator

import pytest
from kvasir.server.operating.operator_page import About, OperatorPage, gauge
from kvasir.server.operating.wellness import Wellness

from tests.running.ports import free_port


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    page = OperatorPage(About("test", "none"), lambda: iter([gauge("kvasir_test", "A number.", 7)]), Wellness)
    stop = page.serve(f"127.0.0.1:{port}")
    yield port
    stop()


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["127.0.0.1:9464"], 200),
        (["LOCALHOST"], 200),
        (["[::1]:9464"], 200),
        ([], 200),
        (["a.example"], 403),
        (["127.0.0.1.a.example:80"], 403),
        (["localhost", "a.example"], 403),
    ],
)
def test_another_name_than_this_machines_is_refused(port: int, hosts: list[str], status: int) -> None:
    for path in ("/metrics", "/healthz"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.putrequest("GET", path, skip_host=True)
        for host in hosts:
            connection.putheader("host", host)
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, b"kvasir" in answer.read()) == (status, status == 200 and path == "/metrics")
        connection.close()
