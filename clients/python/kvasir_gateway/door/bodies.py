"""A request's place and its body: counted before any of it is parsed, and parsed and translated off the event loop.

Eight megabytes of JSON can become gigabytes of objects, and parsing holds the interpreter while it lasts. So a scan in
C counts what parsing would make, large bodies are read by one thread, in which namespaces take turns, and each body is
billed to its namespace by what it becomes, until its answer is sent."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast

from kvasir.errors import DeadlineExceeded, InvalidArgument, KvasirError, ResourceExhausted
from kvasir.server.fair_shares import QUARTER, Shares
from kvasir.server.shared_room import ModestRoom, Place, SharedRoom
from kvasir.waits import LOOK_S, PAUSE_S
from starlette.requests import Request

from kvasir_gateway.door.connections import receive_rest
from kvasir_gateway.errors import BodyTooLarge

MAX_CONTAINERS = 1 << 15
"""Objects and arrays of one body: a conversation of 10,000 messages has about so many."""
MAX_VALUES = 1 << 18
"""Values of one body: a prompt of 131,072 token ids has half as many."""
MAX_DEPTH = 64
MAX_ANSWERING = 16
"""Requests that the event loop answers at once: each step of one waits for a step of every other, and a page needs six
answers of the engine's loop. One namespace has a quarter, and one place beside others."""
_SENDING_S = 60.0  # for a whole body
_SMALL_BYTES = 16 << 10  # read at once: a thread would cost more
# Memory for a body: the first of it, how much more than has come, and how much the event loop fills: that takes longer
# than to receive it.
_FIRST_BYTES, _AHEAD, _QUICK_BYTES = 64 << 10, 3, 256 << 10
_BYTES_PER_VALUE = 160  # what a value becomes in Python, beside its text
_MORE_COPIES = 3  # of its text, on its way to the engine
# Of a body at once: a longer call into C would keep the interpreter from the event loop.
_PART_BYTES = 16 << 10
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},'))
_Made = TypeVar("_Made")


class Rooms:
    """What all requests share: places, the event loop, bytes of bodies, and the thread that reads large ones."""

    def __init__(self, max_requests: int, max_bodies_bytes: int) -> None:
        self.requests = Shares(max_requests)
        self.answering = ModestRoom(MAX_ANSWERING, 1, QUARTER)
        self.bodies = Shares(max_bodies_bytes)
        self.reading = SharedRoom(1)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")


class LoopTurn:
    """A request's turn of the event loop, from its first step until its answer is known."""

    def __init__(self, answering: SharedRoom) -> None:
        self._answering = answering
        self._place = Place()
        self._ending: asyncio.TimerHandle | None = None

    async def begin(self, namespace: str, *, is_read: bool) -> None:
        """Wait for it, and hold a place. A request that changes something may wait for a lease, and its holder may wait
        here: it keeps the place for its first steps alone. One that reads gives it back when its engine is slow: behind
        reads of an engine that hangs, turns at others would wait. Strangers share the places of one namespace."""
        if self._ending is not None:
            return
        self._place = Place((self._answering, namespace))
        await self._place.enter()
        at_most_s = PAUSE_S if is_read else LOOK_S
        self._ending = asyncio.get_running_loop().call_later(at_most_s, self._place.leave)

    def end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._place.leave()


class RequestRoom:
    """One request's share of the rooms, until its answer is sent."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._held_bytes = self._text_bytes = 0
        self._is_large = False
        self._is_admitted = False
        self._made: list[object] = []
        self.loop_turn = LoopTurn(rooms.answering)
        self.namespace = ""

    def admit(self, namespace: str) -> None:
        """The request showed a key of this namespace. Raises ResourceExhausted."""
        if not self._rooms.requests.take(namespace, 1):
            text = (
                f"too many requests are under way: {self._rooms.requests.held_by_all} of {self._rooms.requests.total}"
            )
            raise ResourceExhausted(text, reason="TOO_MANY_CALLS", retry_after_s=1)
        self.namespace = namespace
        self._is_admitted = True

    async def read(self, request: Request, max_bytes: int) -> bytearray:
        """The body. Raises BodyTooLarge as soon as that is known, ResourceExhausted without room for it, and
        DeadlineExceeded."""
        declared = request.headers.get("content-length", "")
        length = int(declared) if declared.isdecimal() and "transfer-encoding" not in request.headers else 0
        if length > max_bytes:
            raise _too_large(max_bytes)
        if not self._rooms.bodies.has_room(self.namespace, length):
            raise self._no_room()
        data = bytearray()
        try:
            async with asyncio.timeout(_SENDING_S):
                await self._receive(request, data, length, max_bytes)
        except TimeoutError:
            text = f"the body did not come within {_SENDING_S:.0f} s"
            raise DeadlineExceeded(text, reason="SENDER_STALLED") from None
        self._text_bytes, self._is_large = len(data), len(data) > _SMALL_BYTES
        return data

    async def _receive(self, request: Request, data: bytearray, length: int, max_bytes: int) -> None:
        """Fill `data`. Of a large body of a declared length the first piece comes here, and the rest goes in place."""
        async for piece in request.stream():
            if len(data) + len(piece) > max_bytes:
                raise _too_large(max_bytes)
            self._take(len(piece))
            data += piece
            if length - len(data) > _SMALL_BYTES:
                await receive_rest(request.scope, length - len(data), partial(self._grown, data, length))

    async def _grown(self, data: bytearray, length: int) -> memoryview:
        """Memory for some times as much as has come: a sender who sends nothing more holds no more room."""
        begin = len(data)
        size = min(length - begin, max(_AHEAD * begin, _FIRST_BYTES))
        self._take(size)
        if size > _QUICK_BYTES:
            await self.beside(lambda: data.extend(bytes(size)))
        else:
            data.extend(bytes(size))
        return memoryview(data)[begin:]

    async def parsed(self, data: bytearray, parse: Callable[[bytearray], _Made]) -> _Made:
        """The result of `parse` for a body that is not too much; the body is empty then. Raises InvalidArgument,
        ResourceExhausted."""
        values = await self.made(lambda: count_values(data))
        self._take(_MORE_COPIES * len(data) + _BYTES_PER_VALUE * values)

        def parse_and_free() -> _Made:
            try:
                return parse(data)
            finally:
                data.clear()

        return await self.made(parse_and_free)

    async def made(self, make: Callable[[], _Made]) -> _Made:
        """What is made of the body that was read, where it holds nobody up."""
        if not self._is_large:
            return make()
        self._made.append(await self.beside(partial(_without_frames, make)))
        return cast("_Made", self._made[-1])

    def bill_earlier(self, size_bytes: int) -> None:
        """Texts that the body refers to, which a request to the engine repeats. Raises ResourceExhausted."""
        self._take(_MORE_COPIES * size_bytes)
        self._text_bytes += size_bytes
        self._is_large = self._text_bytes > _SMALL_BYTES

    async def written(self, make: Callable[[], bytes]) -> bytes:
        """A request to the engine. It can be longer than its body: by what is remembered. That is billed as a body is.
        Raises ResourceExhausted."""
        written = await self.made(make)
        self._take(_MORE_COPIES * max(0, len(written) - self._text_bytes))
        self._text_bytes = max(self._text_bytes, len(written))  # it may be made again
        return written

    def answered(self) -> None:
        """The answer is known: the next request may begin. Drop the objects made of the body: they may be many, so the
        thread frees them."""
        self.loop_turn.end()
        if self._made:
            made, self._made = self._made, []
            self._rooms.thread.submit(made.clear)

    async def beside(self, make: Callable[[], _Made]) -> _Made:
        """What is made of more than the body, for its namespace's turn of the thread."""
        async with self._rooms.reading.held_for(self.namespace, 1):
            return await asyncio.get_running_loop().run_in_executor(self._rooms.thread, make)

    async def rendered(self, make: Callable[[], _Made], size_bytes: int) -> _Made:
        """What is made of an answer, which takes so many bytes then. Raises ResourceExhausted."""
        self._take(size_bytes)
        return await self.beside(make) if size_bytes > _SMALL_BYTES else make()

    def release(self) -> None:
        self._rooms.bodies.give_back(self.namespace, self._held_bytes)
        self._held_bytes = 0
        if self._is_admitted:
            self._rooms.requests.give_back(self.namespace, 1)
            self._is_admitted = False

    def _take(self, count: int) -> None:
        if count and not self._rooms.bodies.take(self.namespace, count):
            raise self._no_room()
        self._held_bytes += count

    def _no_room(self) -> ResourceExhausted:
        bodies = self._rooms.bodies
        text = f"bodies of open requests take all their room: {bodies.held_by_all} of {bodies.total} bytes"
        return ResourceExhausted(text, reason="PROMPTS_TOO_LARGE", retry_after_s=1)


def _without_frames(make: Callable[[], _Made]) -> _Made:
    """Drop a refusal's frames: they hold the parsed body, which the event loop would free."""
    try:
        return make()
    except KvasirError as error:
        raise error.with_traceback(None) from None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {max_bytes} bytes")


def count_values(data: bytes | bytearray) -> int:
    """About how many values a body's JSON has; it need not be JSON. Raises InvalidArgument for too many, and for
    brackets that nest too deep."""
    containers = commas = depth = 0
    for structure in _structure(data):
        brackets = structure.translate(None, b",")
        containers += brackets.count(b"{") + brackets.count(b"[")
        commas += len(structure) - len(brackets)
        if containers > MAX_CONTAINERS:
            raise InvalidArgument.of("body", f"expected at most {MAX_CONTAINERS} objects and arrays")
        if containers + commas > MAX_VALUES:
            raise InvalidArgument.of("body", f"expected at most {MAX_VALUES} values")
        for bracket in brackets:
            depth += 1 if bracket in b"{[" else -1
            if depth < 0:  # no JSON: parsing ends here
                return containers + commas
            if depth > MAX_DEPTH:
                raise InvalidArgument.of("body", f"expected at most {MAX_DEPTH} levels of nesting")
    return containers + commas


def _structure(data: bytes | bytearray) -> Iterator[bytes]:
    """The brackets and commas of its parts, without those in strings."""
    at, is_inside = 0, False
    while at < len(data):
        part = data[at : at + _PART_BYTES].replace(b"\\\\", b"")
        at += _PART_BYTES + part.endswith(b"\\")  # the byte that it escapes is the first of the next part
        texts = part.replace(b'\\"', b"").translate(None, _NOT_STRUCTURE).split(b'"')
        yield b"".join(texts[is_inside::2])
        is_inside ^= len(texts) % 2 == 0
