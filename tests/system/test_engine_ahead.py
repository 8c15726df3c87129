"""The engine of `kvasir up -d`, which begins with the command and gets its command line later, with real processes."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kvasir.cli.own_services.engine_ahead import EngineAhead, begin_engine, begun_engine
from kvasir.cli.running.holding import holders
from kvasir.cli.running.home import Home

from tests.cli.running import process_exists
from tests.running.waiting import eventually

_ARGV = (sys.executable, "-Pm", "inference_svc", "serve")


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def test_an_engine_that_began_gets_its_words_its_log_and_a_lock_that_lasts_as_long_as_it(tmp_path: Path) -> None:
    ahead = EngineAhead()
    with (tmp_path / "log").open("wb") as log, (tmp_path / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = ahead.go_on((*_ARGV, "--unknown", "ünd"), (log.fileno(), lock.fileno()))
    assert process is not None
    assert process.returncode is None
    assert _is_locked(tmp_path / "lock")
    assert await process.wait() == process.returncode == 2
    assert "unrecognized arguments: --unknown ünd" in (tmp_path / "log").read_text()
    assert not _is_locked(tmp_path / "lock")


@pytest.mark.parametrize("argv", [(sys.executable, "-Pm", "cachestore_svc", "serve"), ()], ids=["another", "none"])
async def test_another_program_is_not_begun_so_and_the_engine_that_rests_ends(argv: tuple[str, ...]) -> None:
    ahead = EngineAhead()
    assert ahead.go_on(argv, (0,)) is None
    assert ahead._process.wait(60) != 0


async def test_where_the_engine_that_began_has_ended_another_one_reports_why() -> None:
    ahead = EngineAhead()
    ahead._process.kill()
    ahead._process.wait(60)
    assert ahead.go_on(_ARGV, (0,)) is None


@pytest.mark.parametrize("words", [["up", "--at-login"], ["up", "--help"], ["up", "--remove-at-login"]])
def test_a_command_that_runs_no_engine_begins_none(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_xoptions", {"resting": True})
    monkeypatch.delattr("kvasir.cli.own_services.engine_ahead.EngineAhead")
    begin_engine(words)
    monkeypatch.setattr(sys, "_xoptions", {})
    begin_engine(["up"])
    assert begun_engine() is None


@pytest.mark.long(2)
def test_an_engine_that_rests_ends_with_the_process_that_began_it() -> None:
    program = "from kvasir.cli.own_services.engine_ahead import EngineAhead; print(EngineAhead()._process.pid)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    eventually(lambda: not process_exists(int(ended.stdout)))


@pytest.mark.long(8)
def test_the_engine_of_up_in_the_background_began_ahead_and_the_next_one_as_usual(tmp_path: Path) -> None:
    base = [sys.executable, "-Pm", "kvasir", "--home", str(tmp_path / "home")]

    def pid() -> int:
        return int(json.loads((tmp_path / "home/run/up.json").read_text())["engine_pid"])

    subprocess.run([*base, "up", "-d", "--no-http"], check=True, timeout=120)
    try:
        first = pid()
        assert psutil.Process(first).cmdline()[1:] == ["-X", "resting", "-Pm", "inference_svc", "serve"]
        assert first in holders(Home(tmp_path / "home").services_lock_file)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: pid() not in (0, first))
        assert str(tmp_path / "home") in " ".join(psutil.Process(pid()).cmdline())
    finally:
        subprocess.run([*base, "down"], check=True, timeout=120)
