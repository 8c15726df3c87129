"""The server as `serve_app` runs it: small answers leave at once."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import Any

from kvasir_gateway.door.connections import ConnectionLimits, Connections
from kvasir_gateway.door.listening import listener_at, serve_app


def test_no_small_answer_waits_until_the_one_before_is_acknowledged() -> None:
    assert seen_by_app(lambda connection: connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def seen_by_app(look: Callable[[socket.socket], object]) -> object:
    """What an application that is served sees at the connection of a request."""
    seen = list[object]()

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

    asyncio.run(serve())
    return seen[0]
