"""Tries a reply format in a process of its own, kept for the next one, and refuses one that takes too long there."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from kvasir.errors import InvalidArgument, Unavailable
from kvasir.waits import HANGS_S

from inference_svc.formats.constraint import Constraint
from inference_svc.formats.grammar_trial_process import Trial

_SCRIPT = Path(__file__).with_name("grammar_trial_process.py")
_MAX_SHOWN_CHARS = 300
# A step of a small model takes this long on a CPU. `mask_budget` bounds formats that cost less, but still much.
MAX_STEP_S = 0.01


class GrammarTrial:
    """One process, which serves one caller at a time, on one event loop. Starts with the first format."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def check(self, constraint: Constraint) -> None:
        """Raise InvalidArgument with the field if a format is invalid, or costs too much to compile or to follow."""
        async with self._asking:
            await self._ask(constraint)

    async def close(self) -> None:
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
        if not answer and not is_new:  # the format before may have ended it
            answer = await self._answer(constraint)
        if not answer:
            raise too_complex(constraint)
        check(constraint, Trial(**json.loads(answer)))

    async def _answer(self, constraint: Constraint) -> bytes:
        is_new = self._process is None
        process = self._process = self._process or await _start()
        assert process.stdin is not None
        assert process.stdout is not None
        question = json.dumps({"kind": constraint.kind.value, "text": constraint.text}) + "\n"
        try:
            if is_new:
                await _ready(process)
            process.stdin.write(question.encode())
            answer = await asyncio.wait_for(process.stdout.readline(), self._timeout_s)
        except BaseException as error:
            # Also if the caller goes away meanwhile: the next caller must not read this answer.
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
    if trial.gave_up:
        raise too_complex(constraint, f"a reply cannot be followed ({_shortened(trial.error)})")
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
    """`problem` is llguidance's own text; the parts of a regex that it quotes are left out."""
    field = constraint.kind.value
    return InvalidArgument.of(field, f"{_shortened(problem)}", reason="FORMAT_INVALID")


def _shortened(problem: str) -> str:
    if problem.startswith("NoExtensionBias"):  # llguidance's word for it
        return "no reply fits it: it has no end, or it refers to itself alone"
    short = problem[problem.rfind("error: ") :].splitlines()[0] if "error: " in problem else problem
    return short[:_MAX_SHOWN_CHARS].replace("\n<non-verbose/>", "")


async def _ready(process: asyncio.subprocess.Process) -> None:
    """Wait for the process's first line: on a busy machine the import alone takes longer than a format may. Raises
    Unavailable."""
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        if await asyncio.wait_for(process.stdout.readline(), HANGS_S):
            return
    raise Unavailable("the process that tries reply formats does not start")


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    # Its pipes are read to their end: otherwise the garbage collector would close them at some later time.
    await process.communicate()


async def _start() -> asyncio.subprocess.Process:
    # Isolated: neither the working directory nor the environment can change the code that it runs.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        str(_SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
