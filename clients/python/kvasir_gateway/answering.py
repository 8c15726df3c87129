"""Runs turns: finds the memory, streams the events, and ends the turn when its reader goes away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from kvasir.clients import Reply
from kvasir.errors import Cancelled, Internal, KvasirError
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.log_errors import places
from starlette.types import Receive, Scope, Send

from kvasir_gateway.conversations import Conversations
from kvasir_gateway.engine import CallerAtEngine
from kvasir_gateway.turn import Chunks, Said, ToolUse, Turn

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
Events = AsyncGenerator[pb.GenerateResponse, None]


class ClientLeft(Cancelled):
    """The reader of an answer has closed its connection."""


class Turns:
    """Turns of all callers."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._tidying: set[asyncio.Task[int]] = set()

    async def events(
        self, turn: Turn, caller: CallerAtEngine, namespace: str, agent_id: str, request_id: str
    ) -> Events:
        """A turn's events. Without an agent_id, the conversation's own memory is found and extended."""
        if agent_id or not turn.messages or turn.sampling.get("n", 1) > 1:
            async with aclosing(caller.generate(turn, agent_id, request_id)) as events:
                async for event in events:
                    yield event
            return
        memory = self._conversations
        found = await memory.agent_for(namespace, turn.messages, turn.hint, caller)
        reply = Reply()
        try:
            async with aclosing(caller.generate(turn, found, request_id)) as events:
                async for event in events:
                    reply.add(event)
                    if event.HasField("finished"):
                        # Before the reader sees the end: its next turn may come at once.
                        version = event.finished.snapshot.version
                        memory.answered(namespace, found, turn.messages, said(reply), turn.hint, version)
                        memory.left(namespace, found)
                    yield event
        finally:
            memory.left(namespace, found)
        self._tidy(namespace, caller)

    def _tidy(self, namespace: str, caller: CallerAtEngine) -> None:
        task = asyncio.create_task(self._conversations.tidy(namespace, caller))
        self._tidying.add(task)
        task.add_done_callback(self._tidied)

    def _tidied(self, task: "asyncio.Task[int]") -> None:
        self._tidying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("conversations.not_tidied error=%s", getattr(error, "reason", type(error).__name__))


def said(reply: Reply) -> Said:
    """The reply as a client repeats it in its next request."""
    calls = tuple(ToolUse(call.id, call.name, call.arguments_json) for call in reply.finished.tool_calls)
    return Said("assistant", reply.text, tool_calls=calls)


async def unless_left(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """The result of `work`, which is cancelled when the client closes its connection: raises ClientLeft then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft("the client closed its connection")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def gather(events: Events) -> Reply:
    """A turn to its end."""
    reply = Reply()
    async with aclosing(events):
        async for event in events:
            reply.add(event)
    return reply


class EventStream:
    """A turn's answer as server-sent events, once its first event has come. It ends the turn when its reader leaves."""

    def __init__(
        self,
        first: pb.GenerateResponse,
        events: Events,
        chunks: Chunks,
        *,
        error_event: Callable[[KvasirError], str],
        headers: Mapping[str, str],
    ) -> None:
        self._first = first
        self._events = events
        self._chunks = chunks
        self._error_event = error_event
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await unless_left(receive, self._write(send))
            except ClientLeft:
                return
            await send({"type": "http.response.body", "body": b""})

    async def _write(self, send: Send) -> None:
        chunks = self._chunks
        try:
            await _piece(send, chunks.frames(self._first))
            async for event in self._events:
                if text := chunks.frames(event):
                    await _piece(send, text)
            await _piece(send, chunks.end())
        except KvasirError as error:
            await _piece(send, self._error_event(error))
        except OSError:
            raise ClientLeft("the client closed its connection") from None
        except Exception as error:  # noqa: BLE001 - a bug of ours; the status line is sent already
            _log.error("answer.failed error=%s at=%s", type(error).__name__, places(error))
            await _piece(send, self._error_event(Internal("the answer ended by a bug of the gateway")))


async def _piece(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
