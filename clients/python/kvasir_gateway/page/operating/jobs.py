"""Commands that take longer than a page may: one of a kind at a time, with what each reports on its way."""

import asyncio
import codecs
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvasir.errors import FailedPrecondition, KvasirError

from kvasir_gateway.page.operating.commands import Ended, HomeCommands, ended

_MOST_OUT_BYTES, _PIECE_BYTES = 1 << 20, 1 << 16


class Job:
    """A command that runs, or has run. Times are Unix seconds."""

    def __init__(self, about: str, began_s: float) -> None:
        """`about`: whom it is about, as people read it."""
        self.about = about
        self.began_s = began_s
        self.ended_s: float | None = None
        self.done_bytes = self.total_bytes = 0
        self.value: Any = None  # its result
        self.problem = ""  # why it has none
        self._told: dict[str, Any] = {}  # of a stream's lines that are not kept
        self._out = ""

    @property
    def is_running(self) -> bool:
        return self.ended_s is None

    @property
    def told(self) -> dict[str, Any]:
        """What it has printed: of the objects of a stream, the newest value of each name."""
        return self._told | _newest(self._out)

    def read_out(self, piece: str) -> None:
        """A result is kept whole. Of a stream its last line is: anybody in the network can make it refuse for hours."""
        self._out += piece
        if len(self._out) > _MOST_OUT_BYTES:
            whole, _, rest = self._out.rpartition("\n")
            before, _, last = whole.rpartition("\n")
            if older := _newest(before):
                self._told, self._out = self._told | older, f"{last}\n{rest}"

    def read_progress(self, line: str) -> bool:
        """Whether more is done than before."""
        before = self.done_bytes
        with suppress(ValueError, LookupError, TypeError):
            told = json.loads(line)
            self.done_bytes, self.total_bytes = int(told["done"]), int(told["total"])
        return self.done_bytes > before

    def end(self, code: int, last_line: str, now_s: float) -> None:
        self.ended_s = now_s
        try:
            self.value = Ended(code, self._out, last_line).value
        except KvasirError as error:
            self.problem = error.message


def _newest(out: str) -> dict[str, Any]:
    """Of the objects on the lines of an output, the newest value of each name."""
    return {name: value for line in Ended(0, out, "").lines for name, value in line.items()}


class Jobs:
    """The newest job of each kind. They end with this object."""

    def __init__(self, commands: HomeCommands, now: Callable[[], float]) -> None:
        self._commands = commands
        self._now = now
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def of(self, kind: str) -> Job | None:
        return self._jobs.get(kind)

    async def start(self, kind: str, about: str, words: Sequence[str], stalls_s: float | None = None) -> None:
        """`stalls_s`: it is ended when it reports no more bytes for so long. Raises FailedPrecondition while another of
        the kind runs."""
        job = self._jobs.get(kind)
        if job is not None and job.is_running:
            raise FailedPrecondition(f"there is one already, of {job.about}: wait for its end, or stop it")
        self._jobs[kind] = job = Job(about, self._now())
        try:
            process = await self._commands.begin(words)
        except BaseException:
            del self._jobs[kind]
            raise
        self._tasks[kind] = asyncio.create_task(self._follow(job, process, stalls_s))
        await asyncio.sleep(0)  # it follows now: a task that is cancelled before would not end the program

    async def stop(self, kind: str) -> None:
        """Ends what runs of a kind; nothing if nothing runs."""
        if (task := self._tasks.pop(kind, None)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        for kind in [*self._tasks]:
            await self.stop(kind)

    async def _follow(self, job: Job, process: asyncio.subprocess.Process, stalls_s: float | None) -> None:
        last = ""
        assert process.stdout is not None
        assert process.stderr is not None
        reading = asyncio.create_task(_pieces(process.stdout, job.read_out))
        why = "it was stopped"
        try:
            async with asyncio.timeout(stalls_s) as limit:
                async for line in _decoded(process.stderr):
                    if job.read_progress(line) and stalls_s is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + stalls_s)
                    last = line.strip() or last
                await reading
                job.end(await process.wait(), last, self._now())
        except TimeoutError:
            why = f"nothing arrived for {stalls_s:g} s, so it was ended; start it again to continue from here"
        finally:
            reading.cancel()
            await ended(process)
            if job.is_running:
                job.ended_s, job.problem = self._now(), why


async def _pieces(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """A result is one line, however long: a backup names each file that is damaged."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while piece := await stream.read(_PIECE_BYTES):
        take(decoder.decode(piece))


async def _decoded(stream: asyncio.StreamReader) -> Any:
    async for line in stream:
        yield line.decode(errors="replace")
