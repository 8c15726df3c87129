"""A Mac stays awake while a service has work. `caffeinate` is played."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from kvasir.server.operating import awake
from kvasir.server.operating.awake import Awake
from kvasir.server.operating.durations import RpcCounts

from cachestore_svc import __main__ as store
from cachestore_svc.edge.roles import ALLOWED_ROLES
from tests.running.system_fixtures import running_house


def play(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `caffeinate` on the PATH, and return the file that has its words while it runs."""
    runs, program = folder / "runs", folder / "bin" / "caffeinate"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ntrap "rm {runs}; exit" TERM\necho $$ > {folder}/pid\necho "$@" > {runs}\n'
        "while :; do sleep 0.02; done\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return runs


def wait_until(file: Path, *, exists: bool) -> None:
    give_up = time.monotonic() + 20
    while file.exists() is not exists:
        assert time.monotonic() < give_up, f"{exists=}"
        time.sleep(0.01)


async def test_a_child_holds_it_awake_from_the_first_work_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = play(tmp_path, monkeypatch)
    monkeypatch.setattr(awake, "SOON_S", 0.01)
    has_work = False
    task = asyncio.create_task(Awake(lambda: has_work).run())
    await asyncio.sleep(0.1)
    assert not runs.exists()
    for _ in range(2):
        has_work = True
        await asyncio.to_thread(wait_until, runs, exists=True)
        assert runs.read_text() == f"-i -w {os.getpid()}\n"
        has_work = False
        await asyncio.to_thread(wait_until, runs, exists=False)
    has_work = True
    await asyncio.to_thread(wait_until, runs, exists=True)
    task.cancel()
    await asyncio.wait({task})
    program = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(program, 0)


def test_where_there_is_no_such_program_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asyncio.run(Awake(lambda: True).run())


def test_calls_of_the_store_that_keep_it_awake_are_calls_that_it_serves() -> None:
    served = {method.rpartition(".")[2] for method in ALLOWED_ROLES}
    assert set(store._KEEP_AWAKE) <= served
    counts = RpcCounts()
    counts.began("AgentService/PullAgent")
    assert counts.open["AgentService/PullAgent"] == 1
    counts.ended("AgentService/PullAgent", "OK", 0.0)
    assert not any(counts.open.values())


@pytest.mark.long(6)
def test_an_engine_holds_it_awake_while_it_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = play(tmp_path, monkeypatch)
    with running_house(tmp_path / "house") as house, house.client() as client:
        give_up = time.monotonic() + 20
        while not runs.exists() and time.monotonic() < give_up:
            client.reply(prompt="Tell me a long story.", sampling={"max_tokens": 400})
        assert runs.exists()
        wait_until(runs, exists=False)
