"""Tries a reply format in a process of its own before the service takes it: what takes too long there is refused.

The process is kept for the next one, and replaced when it had to be killed or ended itself for want of memory.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from kvasir.errors import InvalidArgument

from inference_svc.formats.constraint import Constraint
from inference_svc.formats.grammar_trial_process import Trial

_SCRIPT = Path(__file__).with_name("grammar_trial_process.py")
_MAX_TOLD_CHARS = 300
# A step of a small model takes this long on a CPU. What is below it and still much is bounded by `mask_budget`.
MAX_STEP_S = 0.01


class GrammarTrial:
    """One process, asked by one caller at a time, on one event loop. Starts with the first format."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def check(self, constraint: Constraint) -> None:
        """Raise InvalidArgument, the field named, for a format that is none, or takes too much to compile or follow."""
        async with self._asking:
            await self._ask(constraint)

    async def close(self) -> None:
        """End the process, and wait until it is gone. Idempotent."""
        self._end()
        await asyncio.gather(*self._ending)

    def _end(self) -> None:
        if self._process is not None:
            ending = asyncio.create_task(_ended(self._process))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        self._process = None

    async def _ask(self, constraint: Constraint) -> None:
        is_new = self._process is None
        answer = await self._answer(constraint)
        if not answer and not is_new:  # what was asked before may have ended it
            answer = await self._answer(constraint)
        if not answer:
            raise too_complex(constraint)
        check(constraint, Trial(**json.loads(answer)))

    async def _answer(self, constraint: Constraint) -> bytes:
        """A line; empty if the process ended instead."""
        process = self._process = self._process or await _start()
        assert process.stdin is not None
        assert process.stdout is not None
        question = json.dumps({"kind": constraint.kind.value, "text": constraint.text}) + "\n"
        try:
            process.stdin.write(question.encode())
            answer = await asyncio.wait_for(process.stdout.readline(), self._timeout_s)
        except BaseException as error:
            # Also when the caller goes away meanwhile: the next one must not read this one's answer.
            self._end()
            if isinstance(error, ConnectionError):
                return b""
            if isinstance(error, TimeoutError | ValueError):
                raise too_complex(constraint) from None
            raise
        if not answer:
            self._end()
        return answer


def check(constraint: Constraint, trial: Trial) -> None:
    """Raise InvalidArgument, the field named, for what a trial found unfit."""
    if trial.gave_up:
        raise too_complex(constraint, f"a reply cannot be followed ({_told(trial.error)})")
    if trial.error:
        raise refused(constraint, trial.error)
    if trial.step_s > MAX_STEP_S:
        step_us, most_us = round(trial.step_s * 1e6), round(MAX_STEP_S * 1e6)
        raise too_complex(
            constraint,
            f"each token of a reply takes {step_us} µs to constrain, at most {most_us} may be taken",
            step_us=step_us,
            max_step_us=most_us,
        )


def too_complex(
    constraint: Constraint, why: str = "it takes too much time or memory to compile", **numbers: int
) -> InvalidArgument:
    field = constraint.kind.value
    metadata = {name: str(number) for name, number in numbers.items()}
    return InvalidArgument(f"{field}: {why}", reason="FORMAT_TOO_COMPLEX", field=field, metadata=metadata)


def refused(constraint: Constraint, problem: str) -> InvalidArgument:
    """`problem` is llguidance's own, without what it quotes of a regex."""
    field = constraint.kind.value
    return InvalidArgument(f"{field}: {_told(problem)}", reason="FORMAT_INVALID", field=field)


def _told(problem: str) -> str:
    told = problem[problem.rfind("error: ") :].splitlines()[0] if "error: " in problem else problem
    return told[:_MAX_TOLD_CHARS].replace("\n<non-verbose/>", "")


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    # To the end of its pipes, too: what is left open would be closed when nobody expects it.
    await process.communicate()


async def _start() -> asyncio.subprocess.Process:
    # Isolated: nothing of the working directory or the environment can change what it runs.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        str(_SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
