"""Receives large bodies on a thread of its own: to copy 8 MiB from the system keeps an event loop for 7 ms."""

import asyncio
import socket
import threading
from concurrent.futures import Future

AT_ONCE_BYTES = 256 << 10  # of a connection; then the next one's are received


class Receiving:
    """Fills memory from connections, all of them side by side."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = set[Filling]()
        self._thread = threading.Thread(target=self._run, name="receiving", daemon=True)
        self._thread.start()

    def begin(self, connection: socket.socket, place: memoryview) -> "Filling":
        """Fill `place` with the next bytes of a connection from which nobody else reads meanwhile. Raises OSError if it
        cannot be opened once more."""
        own = connection.dup()
        filling = Filling(self._loop, own, place)
        self._open.add(filling)
        filling.ended.add_done_callback(lambda _: self._open.discard(filling))
        self._loop.call_soon_threadsafe(self._loop.add_reader, own, filling.receive)
        return filling

    def close(self) -> None:
        """Stop all fillings, and the thread."""
        for filling in [*self._open]:
            filling.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()


class Filling:
    """Memory that a connection's next bytes fill. `received_bytes` is final once it has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket, place: memoryview) -> None:
        """Belongs to `loop`, and so does the connection, which is one of its own."""
        self._loop = loop
        self._connection = connection
        self._place = place
        self.ended = Future[None]()
        self.received_bytes = 0

    async def end(self) -> None:
        """Return when the memory is full, the connection has ended, or `stop` was called. A cancel stops it."""
        ended = asyncio.wrap_future(self.ended)
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait([ended])
            raise

    def stop(self) -> None:
        if not self.ended.done():  # else the loop may be closed
            self._loop.call_soon_threadsafe(self._end)

    def receive(self) -> None:
        """Take what has come, on the loop that it belongs to."""
        begin = self.received_bytes
        try:
            count = self._connection.recv_into(self._place[begin : begin + AT_ONCE_BYTES])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        self.received_bytes += count
        if not count or self.received_bytes == len(self._place):
            self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._connection)
            self._connection.close()
            self.ended.set_result(None)
