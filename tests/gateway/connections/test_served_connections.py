"""The server as `serve_app` runs it: small answers leave at once, and the event loop gets the interpreter soon."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from kvasir_gateway.door.connections import ConnectionLimits, Connections
from kvasir_gateway.door.listening import listener_at, serve_app


def test_no_small_answer_waits_until_the_one_before_is_acknowledged() -> None:
    assert seen_by_app(lambda connection: connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def test_the_event_loop_waits_less_than_usual_for_a_thread_that_reads_a_body() -> None:
    usual_s = sys.getswitchinterval()
    assert seen_by_app(lambda _: sys.getswitchinterval() < usual_s / 4)


def seen_by_app(look: Callable[[socket.socket], object]) -> object:
    """What an application that is served sees at the connection of a request."""
    seen, usual_s = list[object](), sys.getswitchinterval()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        seen.append(look(scope["kvasir.connection"].transport.get_extra_info("socket")))
        await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body"})

    async def serve() -> None:
        with (
            contextlib.closing(listener_at("127.0.0.1:0")) as listener,
            contextlib.closing(Connections(ConnectionLimits())) as connections,
        ):
            serving = asyncio.create_task(serve_app(app, listener, connections))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.read()
            writer.close()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(serving, 10)

    try:
        asyncio.run(serve())
    finally:
        sys.setswitchinterval(usual_s)
    return seen[0]
