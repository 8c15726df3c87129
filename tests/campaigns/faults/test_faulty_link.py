"""A link that was disarmed passes everything, whoever was slow to read what came before the fault."""

import socket
import threading
import time

import pytest

from tests.campaigns.faults.faulty_link import Fault, FaultyLink

_BYTES = bytes(100_000)


class _FullLink(FaultyLink):
    """Whose receiver has no room for what comes before the fault, as a frozen one."""

    def __init__(self, port: int) -> None:
        self.has_room = threading.Event()
        super().__init__(None, port)

    def _send(self, data: bytes, sink: socket.socket) -> None:
        if self.was_met:
            self.has_room.wait()
        super()._send(data, sink)


@pytest.mark.parametrize("kind", ["hang", "outage", "busy", "slow"])
def test_a_fault_that_waits_until_it_is_disarmed_does_not_begin(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = _FullLink(server.getsockname()[1])
        near = socket.create_connection(("127.0.0.1", link.port))
        far, _ = server.accept()
        far.settimeout(10)
        try:
            link.arm(Fault(kind, is_answer=False, after_bytes=4000))
            near.sendall(_BYTES)
            while not link.was_met:
                time.sleep(0.01)
            link.disarm()
            link.has_room.set()
            began, left = time.monotonic(), len(_BYTES)
            while left:
                data = far.recv(left)
                assert data, "nobody would have ended it"
                left -= len(data)
            assert time.monotonic() - began < 0.5
            with socket.create_connection(("127.0.0.1", link.port)) as another:
                another.sendall(b"x")
                server.settimeout(10)
                assert server.accept()[0].recv(1) == b"x"
        finally:
            for each in (near, far, link):
                each.close()
