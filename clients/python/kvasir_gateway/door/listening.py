"""The address that the gateway listens at, and the server of connections that come there."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial

import uvicorn
from kvasir.address import TCP_FORMS, AddressTaken, parse_address
from kvasir.errors import InvalidArgument
from kvasir.waits import ANSWER_S, SWITCH_S

from kvasir_gateway.door.connections import Connection, Connections

# That the kernel keeps until they are accepted.
_MOST_WAITING = 2048


class _Server(uvicorn.Server):
    """uvicorn, without its own handling of signals, which would end the process by them."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """uvicorn's own wakes ten times a second, for the date, which is not sent, and for limits that are not set."""
        await self.on_tick(0)
        await self._stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_MOST_WAITING)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_app(app: object, listener: socket.socket, connections: Connections) -> None:
    """Serve until SIGINT or SIGTERM."""
    # A small request takes about ten steps of the loop. Threads that read large bodies let it wait at each.
    sys.setswitchinterval(SWITCH_S)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        # asyncio accepts so many before it closes one. Without a file left it accepts none for a second.
        backlog=connections.limits.at_once,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=round(ANSWER_S),
        http=partial(Connection, connections=connections),  # type: ignore[arg-type]
    )
    server = _Server(config)
    host, port = listener.getsockname()[:2]
    with contextlib.suppress(OSError):  # a full disk takes no line of its log
        print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    await server.serve([listener])


def listener_at(address: str) -> socket.socket:
    """Raises InvalidArgument for an address that other machines reach, and AddressError."""
    host, port = _loopback(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: asyncio sets TCP_NODELAY by it
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise AddressTaken(f"--listen {address}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _loopback(text: str) -> tuple[str, int]:
    address = parse_address(text, TCP_FORMS)
    if not address.is_loopback or address.socket_path is not None:
        raise InvalidArgument.of(
            "--listen", f"expected a loopback HOST:PORT, got {text}: put a proxy with TLS before it"
        )
    return address.host, address.port
