"""The `kvasir` commands of one home, as programs: the page does what they do, and nothing of its own."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.cli.running.home import Home
from kvasir.cli.running.program import MODULE
from kvasir.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvasirError,
    NotFound,
    Unavailable,
)
from kvasir.waits import PATIENCE_S, WORK_S

_AT_ONCE = 2  # each is a program, which takes most of a second to begin
_KINDS: Mapping[int, type[KvasirError]] = {
    2: InvalidArgument,
    3: Unavailable,
    5: NotFound,
    6: DataLoss,
    70: Internal,
}
"""By exit code, as `kvasir --help` lists them; others are refusals."""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    last_line: str  # of its stderr

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The objects that it printed, one a line."""
        return [line for text in self.out.splitlines() if (line := _object(text)) is not None]

    def check(self) -> None:
        """Raises its refusal."""
        if self.code:
            _ = self.value

    @property
    def value(self) -> Any:
        """Its result, which some print although they end with problems. Raises its refusal."""
        try:
            answer = json.loads(self.out)
        except ValueError:  # a stream of objects, or none
            answer = self.lines[-1] if self.lines else {}
        if answer == {} and self.code:
            answer = {"error": {"message": self.last_line or f"the command ended with exit code {self.code}"}}
        if isinstance(answer, dict) and (told := answer.get("error")):
            kind = _KINDS.get(self.code, FailedPrecondition)
            raise kind(told["message"], reason=told.get("reason"), field=told.get("field"))
        return answer


def _object(text: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    return None


class HomeCommands:
    """Runs commands of a home, a few at once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._few = asyncio.Semaphore(_AT_ONCE)

    def typed(self, words: str) -> str:
        """A command of this home, as a person types it."""
        return Home(self.home).command(words)

    async def done(self, *words: str) -> Ended:
        """Run a command to its end. Raises DeadlineExceeded for one that takes longer than a person waits."""
        async with self._few:
            process = await self.begin(words)
            try:
                async with asyncio.timeout(WORK_S):
                    out, err = await asyncio.gather(*(each.read() for each in (process.stdout, process.stderr) if each))
                    await process.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"`kvasir {words[0]}` has not ended for {WORK_S:g} s") from None
            finally:
                await ended(process)
        lines = err.decode(errors="replace").strip().splitlines()
        return Ended(process.returncode or 0, out.decode(errors="replace"), lines[-1] if lines else "")

    async def value(self, *words: str) -> Any:
        """A command's result. Raises its refusal."""
        return (await self.done(*words)).value

    async def begin(self, words: Sequence[str]) -> asyncio.subprocess.Process:
        """Start a command; whoever starts it ends it. Raises InvalidArgument for words that no command can have."""
        if any("\0" in word for word in words):
            raise InvalidArgument("a form: expected text without a NUL")
        pipe = asyncio.subprocess.PIPE
        # It ends with its input, and so with this gateway, however that ends.
        argv = (sys.executable, MODULE, "kvasir", "--home", str(self.home), "--json", "--until-eof", *words)
        return await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe)


async def ended(process: asyncio.subprocess.Process) -> None:
    """End a program that runs, as Ctrl-C would; one that does not end by that is killed."""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
