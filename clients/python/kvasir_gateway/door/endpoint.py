"""A route's handler as an application: its place and its body's room are held until the answer is sent."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvasir.call_context import TRACE_KEY
from kvasir.server.operating.traces import Traces
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvasir_gateway.door.bodies import RequestRoom, Rooms


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Answers requests of one route. `answered` admits them to their rooms once it knows whose they are."""

    name: str  # of its spans
    answered: Callable[[Request, RequestRoom], Awaitable[Any]]
    rooms: Rooms
    traces: Traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        room, request = RequestRoom(self.rooms), Request(scope, receive)
        try:
            with self.traces.serving(self.name, request.headers.get(TRACE_KEY, "")):
                answer = await self.answered(request, room)
                await answer(scope, receive, send)
        finally:
            room.release()
