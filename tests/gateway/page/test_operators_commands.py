"""The commands that the operator's page runs: their refusals, their progress, and that none outlives its reader."""

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvasir.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvasir_gateway.page.operating.commands import Ended, HomeCommands
from kvasir_gateway.page.operating.jobs import Jobs

from inference_svc.model import kvasir_tiny
from tests.cli.local_hub import local_hub
from tests.running.waiting import eventually


def _begun(others: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """The programs of this one, and those of theirs."""
    return {*psutil.Process().children(recursive=True)} - {*others}


@pytest.mark.long(7)
def test_no_name_of_a_form_is_an_option_of_a_program(tmp_path: Path) -> None:
    for name in ("--help", "--peers-file=/elsewhere"):
        with pytest.raises(NotFound, match=re.escape(f"no peer {name!r}")):
            asyncio.run(HomeCommands(tmp_path).value("peers", "rm", "--", name))


@pytest.mark.long(7)
def test_a_command_that_hangs_is_ended_with_the_programs_that_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pair` waits ten minutes for another home, in a program of its own."""
    monkeypatch.setattr("kvasir_gateway.page.operating.commands.WORK_S", 5.0)
    others, begun = _begun(), set[psutil.Process]()

    async def done() -> None:
        running = asyncio.create_task(HomeCommands(tmp_path).done("pair"))
        while not running.done():
            begun.update(_begun(others))
            await asyncio.sleep(0.1)
        await running

    with pytest.raises(DeadlineExceeded, match="`kvasir pair` has not ended for 5 s"):
        asyncio.run(done())
    assert len(begun) == 2
    assert not psutil.wait_procs([*begun], timeout=10)[1]


_GATEWAY = """
import asyncio, pathlib, sys
from kvasir_gateway.page.operating.commands import HomeCommands
from kvasir_gateway.page.operating.jobs import Jobs

async def pair():
    jobs = Jobs(HomeCommands(pathlib.Path(sys.argv[1])), lambda: 0.0)
    await jobs.start("pair", "another Mac", ["pair"])
    while "code" not in jobs.of("pair").told:
        await asyncio.sleep(0.1)
    print("it listens", flush=True)
    await asyncio.sleep(600)

asyncio.run(pair())
"""


@pytest.mark.long(3)
def test_no_command_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    """Nobody could stop a pairing, and it would listen for ten minutes."""
    with subprocess.Popen([sys.executable, "-c", _GATEWAY, str(tmp_path)], stdout=subprocess.PIPE) as gateway:
        try:
            assert gateway.stdout is not None
            assert gateway.stdout.readline() == b"it listens\n"
            begun = psutil.Process(gateway.pid).children(recursive=True)
        finally:
            gateway.kill()
    assert len(begun) == 2
    assert not psutil.wait_procs(begun, timeout=20)[1]


def test_a_command_that_is_refused_is_refused_here_in_its_words() -> None:
    told = '{"error": {"reason": "NO_SUCH_TOKEN", "message": "no token", "field": "NAME"}}'
    for code, kind in ((2, InvalidArgument), (3, Unavailable), (4, FailedPrecondition), (5, NotFound)):
        with pytest.raises(kind, match="no token") as refused:
            _ = Ended(code, told, "").value
        assert (refused.value.reason, refused.value.field) == ("NO_SUCH_TOKEN", "NAME")
    assert Ended(1, '{"problems": 3}', "").value == {"problems": 3}
    with pytest.raises(FailedPrecondition, match="No module named"):
        _ = Ended(1, "", "No module named typer").value


class _Printing(HomeCommands):
    """Runs a program that prints a result of one long line, as a backup does that finds many damaged files."""

    async def begin(self, words: Sequence[str]) -> asyncio.subprocess.Process:
        program = f"import json; print(json.dumps({{'damaged': ['{'x' * 90}'] * {words[0]}}}))"
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe, stderr=pipe)


async def test_a_result_of_one_long_line_is_read(tmp_path: Path) -> None:
    jobs = Jobs(_Printing(tmp_path), time.time)
    await jobs.start("backup", "this home", ["5000"])
    await asyncio.wait([jobs._tasks["backup"]], timeout=60)
    job = jobs.of("backup")
    assert (job.problem, len(job.value["damaged"])) == ("", 5000)


@pytest.mark.long(8)
def test_a_model_is_fetched_with_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(kvasir_tiny.path(), tmp_path / "hub" / "kvasir" / "tiny")
    size = sum(file.stat().st_size for file in kvasir_tiny.path().glob("*.safetensors"))

    async def fetched(*names: str) -> list[Any]:
        jobs = Jobs(HomeCommands(tmp_path / "home"), time.time)
        found = []
        for name in names:
            await jobs.start("fetch", name, ["models", "pull", "--progress", "--", name])
            with pytest.raises(FailedPrecondition, match="there is one already"):
                await jobs.start("fetch", name, ["models", "pull", "--", name])
            await jobs._tasks["fetch"]
            found.append(jobs.of("fetch"))
        await jobs.close()
        return found

    with local_hub(tmp_path / "hub", tmp_path / "cache") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        whole, missing = asyncio.run(fetched("kvasir/tiny", "kvasir/nothing"))
    assert whole.problem == ""
    assert (whole.problem, whole.value["name"]) == ("", "kvasir/tiny")
    assert whole.done_bytes == whole.total_bytes > size
    assert "can be fetched" in missing.problem


@pytest.mark.long(6)
def test_a_fetch_from_a_silent_hub_ends_when_it_is_stopped_and_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs end with it."""
    others = _begun()

    async def began(jobs: Jobs, stalls_s: float | None) -> set[psutil.Process]:
        await jobs.start("fetch", "a/model", ["models", "pull", "--progress", "--", "a/model"], stalls_s)
        eventually(lambda: len(_begun(others)) == 2, within_s=60)  # they need nothing of this loop
        return _begun(others)

    async def fetched() -> list[str]:
        jobs, found = Jobs(HomeCommands(tmp_path / "home"), time.time), []
        for stalls_s in (None, 5.0):
            begun = await began(jobs, stalls_s)
            await (jobs.stop("fetch") if stalls_s is None else jobs._tasks["fetch"])
            job = jobs.of("fetch")
            assert job is not None
            found.append(job.problem)
            assert not psutil.wait_procs([*begun], timeout=10)[1]
        return found

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        stopped, stalled = asyncio.run(fetched())
    assert stopped == "it was stopped"
    assert stalled.startswith("nothing arrived for 5 s, so it was ended")
