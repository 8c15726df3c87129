"""The reference: a process whose engine does every agent's turns alone, one after the other, with the same reuse.

A turn's tokens depend on what was prefilled and what was decoded, so the reference repeats an agent's turns in order,
cuts included, and reuses as many tokens of its own memory as the engine under test said it reused. Blocks that others
share are what a cold run computes: there the reference runs cold. Text and tokens of every prompt are made anew from
what the caller knows, never taken from the engine under test.

The process is spoken to in lines of JSON. It computes with as many threads as the engine under test, because a BLAS
may round differently with another number of them.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from tests.campaigns.hammer.records import Alone, TurnRecord
from tests.running.system_fixtures import ROOT

_LINE_BYTES = 1 << 24


class Reference:
    """The caller's side of the process. Turns are queued; `alone` waits for its answer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: asyncio.Queue[asyncio.Future[dict[str, Any]]] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, log: Path, model: Path | None = None) -> "Reference":
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.campaigns.hammer.reference_engine", str(model or "")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **threads},
                limit=_LINE_BYTES,
            )
        return cls(process)

    def alone(self, record: TurnRecord) -> Awaitable[Alone]:
        """Ask for the same turn, now, before anything that is asked later; and wait for the answer."""
        answer = self._send({"op": "turn", "record": record.to_json()})

        async def wait() -> Alone:
            return Alone(**await answer)

        return wait()

    def blobs(self, agent: str) -> Awaitable[tuple[list[str], float]]:
        """Hashes of the blobs that hold the agent's memory as it is now: what a store would have of it. And the part
        of their bytes that differs from those of the same tokens prefilled at once, nothing reused, cut or decoded.
        """
        answer = self._send({"op": "blobs", "agent": agent})

        async def wait() -> tuple[list[str], float]:
            found = await answer
            return found["blobs"], found["unlike"]

        return wait()

    def fork(self, source: str, target: str) -> None:
        """`target` remembers what `source` remembers now."""
        self._send({"op": "fork", "source": source, "target": target})

    def undo(self, agent: str) -> None:
        """The agent remembers what it did before its last turn."""
        self._send({"op": "undo", "agent": agent})

    def forget(self, agent: str) -> None:
        self._send({"op": "forget", "agent": agent})

    async def close(self) -> None:
        self._reader.cancel()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def _send(self, order: dict[str, Any]) -> "asyncio.Future[dict[str, Any]]":
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(answer)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.get_nowait()
            if waiting.done():
                continue
            if "error" in answer:
                waiting.set_exception(RuntimeError(f"the reference failed: {answer['error']}"))
            else:
                waiting.set_result(answer)
        while not self._waiting.empty():
            if not (waiting := self._waiting.get_nowait()).done():
                waiting.set_exception(RuntimeError("the reference ended; see its log"))
