"""Who reads the operators' page, and goes away before the answer."""

import http.client
import socket
import struct
import sys
import threading
from collections.abc import Iterable

import pytest
from kvasir.server.operating.operator_page import About, OperatorPage
from kvasir.server.operating.wellness import Wellness
from prometheus_client.core import Metric

from tests.running.ports import free_port
from tests.running.waiting import eventually


def test_a_probe_may_ask_for_the_head_alone() -> None:
    port = free_port()
    stop = OperatorPage(About("store", "kvasir.test.v1"), tuple, lambda: Wellness([])).serve(f"127.0.0.1:{port}")
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for path, status in (("/healthz", 200), ("/metrics", 200), ("/nope", 404)):
            connection.request("HEAD", path)
            answer = connection.getresponse()
            assert (answer.status, int(answer.headers["content-length"]) > 0, answer.read()) == (status, True, b"")
        connection.request("GET", "/metrics")
        assert b"process_resident_memory_bytes" in connection.getresponse().read() or sys.platform != "linux"
    finally:
        stop()


def test_a_reader_who_leaves_before_the_answer_writes_nothing_into_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    has_left, asked = threading.Event(), threading.Event()

    def numbers() -> Iterable[Metric]:
        asked.set()
        has_left.wait(60)
        return ()

    port = free_port()
    stop = OperatorPage(About("store", "kvasir.test.v1"), numbers, lambda: Wellness([])).serve(f"127.0.0.1:{port}")
    with socket.create_connection(("127.0.0.1", port)) as reader:
        reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.wait(60)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
    has_left.set()
    answering = [each for each in threading.enumerate() if "process_request_thread" in each.name]
    for thread in answering:
        thread.join(60)
    stop()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("sent", [b"GET /he", b"GET /healthz HTTP/1.0\r\n\r\n"], ids=["a part", "a request"])
def test_a_crowd_takes_a_bounded_part_of_the_service_and_shuts_nobody_out(sent: bytes) -> None:
    """Each connection had a thread and a file of the store's process, for as long as its other end liked."""
    port, let_go = free_port(), threading.Event()

    def wellness() -> Wellness:
        let_go.wait(20)
        return Wellness([])

    def status() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        return connection.getresponse().status

    stop = OperatorPage(About("store", "kvasir.test.v1"), tuple, wellness).serve(f"127.0.0.1:{port}")
    crowd = []
    try:
        for _ in range(120):
            crowd.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            crowd[-1].sendall(sent)
        assert status() in (200, 503)  # all that came before have been accepted
        assert sum("process_request_thread" in each.name for each in threading.enumerate()) < 80
        let_go.set()
        eventually(lambda: status() == 200)
    finally:
        let_go.set()
        for each in crowd:
            each.close()
        stop()
