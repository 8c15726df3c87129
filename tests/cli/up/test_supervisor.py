"""The supervisor with real processes: starts together, restarts what crashes, says why it gives up, stops together."""

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvasir.cli.own_services.engine_ahead import EngineAhead, hangups_wait
from kvasir.cli.running.health import STORE_SERVICE, is_ready
from kvasir.cli.running.holding import Patience
from kvasir.cli.running.home import Endpoint
from kvasir.cli.running.logs import GrowingLog, is_important, last_lines, rotate_log
from kvasir.cli.running.plan import ServiceProcess
from kvasir.cli.running.supervisor import RestartPolicy, Service, Supervisor
from kvasir.errors import Unavailable

from tests.cli.running import process_exists

QUICK = RestartPolicy(
    max_crashes=3, within_s=30, first_delay_s=0.01, longest_delay_s=0.05, look_every_s=0.02, silent_after_s=0.3
)
# Says that it is ready by making a file; ends at SIGTERM and writes that it did.
SERVER = """
import pathlib, signal, sys, time
name, place = sys.argv[1], pathlib.Path(sys.argv[2])
def stop(*_):
    with (place / "order").open("a") as file: file.write(f"{name} stopped\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
with (place / "order").open("a") as file: file.write(f"{name} started\\n")
(place / name).write_text("ready")
while True: time.sleep(0.05)
"""
# Begins when the engine has: one that waited for it would never be there.
LATE = f"""
import pathlib, sys, time
while not (pathlib.Path(sys.argv[2]) / "engine").exists(): time.sleep(0.02)
{SERVER}"""
# Ends when the store has begun: it might end before the store says anything.
DIES = """
import pathlib, sys, time
while not (pathlib.Path(sys.argv[2]) / "store").exists(): time.sleep(0.02)
raise SystemExit("the model is not there")
"""
# A service that can be told to reload only after its imports.
HEARS = """
import pathlib, sys, time
place = pathlib.Path(sys.argv[2])
while not (place / "go").exists(): time.sleep(0.02)
import asyncio
from kvasir.server.operating.audit import Audit
from kvasir.server.reloading import Reloading
async def main():
    async def hear(): (place / "heard").touch(); return 0
    reloading = Reloading(Audit("store", None))
    reloading.add("all", hear)
    reloading.on_hangup()
    (place / "store").touch()
    await asyncio.sleep(60)
asyncio.run(main())
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
)


class Group:
    """A supervisor over scripts, and what it said."""

    def __init__(
        self,
        place: Path,
        scripts: dict[str, str],
        *,
        ready_within_s: float = 60,
        grace_s: float = 5,
        say: Callable[[str], None] | None = None,
        has_data: Callable[[], bool] = lambda: True,
    ) -> None:
        self.place = place
        self.said: list[str] = []
        services = [
            Service(
                name,
                (sys.executable, "-c", script, name, str(place)),
                place / f"{name}.log",
                self._readiness(name),
                ready_within_s,
                has_data=has_data,
            )
            for name, script in scripts.items()
        ]
        self.supervisor = Supervisor(services, say=say or self.said.append, policy=QUICK, grace_s=grace_s)
        self.started = asyncio.Event()

    def _readiness(self, name: str):
        async def is_ready() -> bool:
            return (self.place / name).exists()

        return is_ready

    def begin(self, changed: Callable[[], None] = lambda: None) -> asyncio.Task[None]:
        return asyncio.create_task(self.supervisor.run(self.started.set, changed))

    def order(self) -> list[str]:
        return (self.place / "order").read_text().splitlines()


async def eventually(claim, within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.02)


async def test_services_start_together_and_stop_in_reverse(tmp_path: Path) -> None:
    group = Group(tmp_path, {"store": LATE, "engine": SERVER, "http": SERVER})
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    group.supervisor.stop()
    await run
    assert sorted(group.order()[:3]) == ["engine started", "http started", "store started"]
    assert group.order()[3:] == ["http stopped", "engine stopped", "store stopped"]


async def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    group = Group(tmp_path, {"store": SERVER})
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    first = group.supervisor.pid("store")
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: group.supervisor.pid("store") not in (0, first))
    assert any("SIGKILL" in line for line in group.said)
    second = group.supervisor.pid("store")
    group.supervisor.stop()
    await run
    assert not process_exists(second)


async def test_a_service_is_started_again_though_its_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL loads nothing there."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    group = Group(tmp_path, {"engine": f"import os; os.getcwd()\n{SERVER}"})
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    work.rmdir()
    os.kill(group.supervisor.pid("engine"), signal.SIGKILL)
    await eventually(lambda: group.order() == ["engine started"] * 2)
    group.supervisor.stop()
    await run


async def test_a_killed_store_is_not_started_again_in_a_mount_point_that_lost_its_disk(tmp_path: Path) -> None:
    """It would begin an empty store there."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "kvasir.sqlite3").touch()
    store = ServiceProcess("store", Endpoint("unix:/none"), tmp_path / "log", {"data_dir": data}).service()
    group = Group(tmp_path, {"store": SERVER}, has_data=store.has_data)
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    for is_mounted in (True, False):
        first = group.supervisor.pid("store")
        if not is_mounted:
            (data / "kvasir.sqlite3").unlink()
        os.kill(first, signal.SIGKILL)
        if is_mounted:
            await eventually(lambda: len(group.order()) == 2)
    with pytest.raises(Unavailable, match="times within"):
        await asyncio.wait_for(run, 20)
    assert group.order() == ["store started"] * 2
    assert "store is not started: its data are gone; is its disk mounted?" in group.said


async def test_a_hangup_that_comes_while_a_service_begins_is_heard_when_it_can_be(tmp_path: Path) -> None:
    group = Group(tmp_path, {"store": HEARS})
    run = group.begin()
    await eventually(lambda: group.supervisor.pid("store") != 0)
    os.kill(group.supervisor.pid("store"), signal.SIGHUP)
    (tmp_path / "go").touch()
    await asyncio.wait_for(group.started.wait(), 20)
    await eventually(lambda: (tmp_path / "heard").exists())
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "its own ends the supervisor"
    group.supervisor.stop()
    await run
    assert not any("SIGHUP" in line for line in group.said), group.said


@pytest.mark.parametrize("before", [signal.SIG_BLOCK, signal.SIG_UNBLOCK])
def test_hangups_are_blocked_where_they_were_when_two_services_have_begun(before: int) -> None:
    own = signal.pthread_sigmask(before, {signal.SIGHUP})
    try:
        began = signal.pthread_sigmask(before, ())
        waiting = [hangups_wait(), hangups_wait()]
        for each in waiting:
            each.__enter__()
        for each in waiting:
            assert signal.SIGHUP in signal.pthread_sigmask(before, ())
            each.__exit__(None, None, None)
        assert signal.pthread_sigmask(before, ()) == began
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, own)


async def test_a_crash_while_the_disk_is_full_is_repaired_like_any_other(tmp_path: Path) -> None:
    """Neither the line about it nor the file of the new pids can be written then."""
    is_full = False

    written = []

    def write(*_: object) -> None:
        written.append(group.supervisor.pid("engine"))
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    group = Group(tmp_path, {"store": SERVER, "engine": SERVER}, say=write)
    run = group.begin(write)
    await asyncio.wait_for(group.started.wait(), 20)
    is_full = True
    first = group.supervisor.pid("engine")
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: group.supervisor.pid("engine") not in (0, first) or run.done())
    await asyncio.sleep(0.2)
    assert not run.done()
    is_full = False
    written.clear()
    await eventually(lambda: group.supervisor.pid("engine") in written)
    group.supervisor.stop()
    await run


async def test_a_service_that_cannot_be_begun_again_ends_the_group_in_words(tmp_path: Path) -> None:
    group = Group(tmp_path, {"store": SERVER})
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    log = tmp_path / "store.log"
    log.unlink()
    log.mkdir()  # no process gets it as its log
    os.kill(group.supervisor.pid("store"), signal.SIGKILL)
    with pytest.raises(Unavailable, match="times within"):
        await run


async def test_a_service_that_hangs_is_told_and_left_alone(tmp_path: Path) -> None:
    group = Group(tmp_path, {"engine": SERVER})
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    pid = group.supervisor.pid("engine")
    (tmp_path / "engine").unlink()  # it is not ready any more
    await eventually(lambda: any(f"kill -9 {pid}" in line for line in group.said))
    (tmp_path / "engine").touch()
    await eventually(lambda: "engine answers again" in group.said)
    assert group.supervisor.pid("engine") == pid
    assert sum("has not answered" in line for line in group.said) == 1, "once, not at every look"
    group.supervisor.stop()
    await run


async def test_a_service_that_cannot_start_ends_the_group_with_its_last_words(tmp_path: Path) -> None:
    group = Group(tmp_path, {"store": SERVER, "engine": DIES})
    with pytest.raises(Unavailable, match="the model is not there") as failed:
        await group.begin()
    assert failed.value.reason == "SERVICE_DID_NOT_START"
    assert group.order() == ["store started", "store stopped"]


async def test_a_service_that_cannot_start_is_told_while_another_is_not_ready(tmp_path: Path) -> None:
    slow, ended = "import time; time.sleep(60)", "raise SystemExit('the model is not there')"
    group = Group(tmp_path, {"store": slow, "engine": ended}, ready_within_s=5)
    with pytest.raises(Unavailable, match=r"engine ended with exit code 1 .* the model is not there"):
        await group.begin()
    assert group.supervisor.pid("store") == 0


async def test_last_words_are_those_of_this_start_and_no_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("what went wrong yesterday\n")
    with pytest.raises(Unavailable, match="today") as failed:
        await Group(tmp_path, {"engine": "raise SystemExit('today')"}).begin()
    assert "yesterday" not in failed.value.message


async def test_a_service_that_crashes_again_and_again_ends_the_group(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("ready before it runs, so that each start counts as one")
    group = Group(tmp_path, {"store": "print('out of luck', flush=True)"})
    with pytest.raises(Unavailable, match=r"4 times within 30 s.*out of luck"):
        await asyncio.wait_for(group.begin(), 30)


async def test_a_service_that_never_gets_ready_is_killed(tmp_path: Path) -> None:
    group = Group(tmp_path, {"engine": STUBBORN}, ready_within_s=0.5)
    run = group.begin()
    await eventually(lambda: group.supervisor.pid("engine") != 0)
    pid = group.supervisor.pid("engine")
    with pytest.raises(Unavailable, match=r"not ready within 0\.5 s"):
        await run
    assert not process_exists(pid)


async def test_a_service_that_ignores_the_stop_is_killed_after_its_grace(tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("ready")
    group = Group(tmp_path, {"engine": STUBBORN}, grace_s=0.3)
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    pid = group.supervisor.pid("engine")
    await eventually(lambda: last_lines(tmp_path / "engine.log") == ["here"])
    group.supervisor.stop()
    await run
    assert not process_exists(pid)
    assert any("is killed" in line for line in group.said)
    assert group.supervisor.killed == ["engine"]


BUSY = (
    "import signal, time\n"
    "stops = []; signal.signal(signal.SIGTERM, lambda *_: stops.append(1)); print('here', flush=True)\n"
    "while not stops: time.sleep(0.02)\n"
    "for left in range(20): print('storing', left, flush=True); time.sleep(0.15)\n"
    "print('stored', flush=True)"
)


@pytest.mark.long(3)
async def test_a_service_that_says_it_goes_on_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("ready")
    group = Group(tmp_path, {"engine": BUSY}, grace_s=1.5)  # half of what it takes
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    await eventually(lambda: last_lines(tmp_path / "engine.log") == ["here"])
    group.supervisor.stop()
    await run
    assert last_lines(tmp_path / "engine.log")[-1] == "stored"
    assert not any("is killed" in line for line in group.said)


def test_patience_has_an_end_though_the_log_grows(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    patience = Patience(0.2, log, longest_s=0.5)
    began = time.monotonic()
    while not patience.is_over:
        with log.open("a") as lines:
            lines.write("storing\n")
        time.sleep(0.02)
    assert 0.5 <= time.monotonic() - began < 5


async def test_a_stop_during_the_start_ends_what_had_started(tmp_path: Path) -> None:
    group = Group(tmp_path, {"store": SERVER, "engine": "import time; time.sleep(60)"})
    run = group.begin()
    await eventually(lambda: group.supervisor.pid("engine") != 0 and (tmp_path / "store").exists())
    pid = group.supervisor.pid("engine")
    group.supervisor.stop()
    await run
    assert not group.started.is_set()
    assert not process_exists(pid)
    assert group.order() == ["store started", "store stopped"]


async def test_a_stop_before_each_has_its_process_ends_the_group_without_an_error(tmp_path: Path) -> None:
    group = Group(tmp_path, {"store": SERVER, "engine": SERVER})
    await group.begin(changed=group.supervisor.stop)
    assert (group.supervisor.pid("store"), group.supervisor.pid("engine"), group.started.is_set()) == (0, 0, False)


async def test_a_service_whose_certificate_is_replaced_is_not_ready_and_no_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        endpoint = Endpoint(f"127.0.0.1:{service.getsockname()[1]}", ca_file=tmp_path / "gone.crt")
        assert not await is_ready(endpoint, STORE_SERVICE)


def test_delays_double_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.5, longest_delay_s=3)
    assert [policy.delay_s(crashes) for crashes in (1, 2, 3, 4, 100)] == [0.5, 1, 2, 3, 3]


def test_a_log_that_has_grown_long_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "store.log"
    with log.open("wb") as file:
        file.truncate(17 << 20)
    rotate_log(log)
    assert not log.exists()
    assert (tmp_path / "store.1.log").stat().st_size == 17 << 20


def test_as_many_last_lines_are_given_as_are_requested(tmp_path: Path) -> None:
    log = tmp_path / "store.log"
    lines = [f"  line {number} {'x' * 100}" for number in range(500)]
    log.write_text("".join(f"\x1b[1m{line}\x1b[0m\n\n" for line in lines))
    for count in (1, 70, 499, 500, 501):
        assert last_lines(log, count) == lines[-count:]
    assert last_lines(log, 9, since=log.stat().st_size) == []


WARNER = """
import sys, time
print("2026-01-01T00:00:00Z [info     ] nothing.happened", flush=True)
print("2026-01-01T00:00:00Z [\x1b[33mwarning  \x1b[0m] disk.nearly_full free_bytes=7", flush=True)
time.sleep(60)
"""


async def test_warnings_of_a_service_are_reported(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("ready")
    group = Group(tmp_path, {"store": WARNER})
    run = group.begin()
    await eventually(lambda: any("disk.nearly_full free_bytes=7" in line for line in group.said))
    group.supervisor.stop()
    await run
    assert not any("nothing.happened" in line for line in group.said)


def test_a_watched_log_gives_each_line_once_and_survives_being_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "store.log"
    log.write_text("[error    ] before it was watched\n")
    growing = GrowingLog(log)

    def important_lines() -> list[str]:
        return list(filter(is_important, growing.new_lines()))

    with log.open("a") as file:
        file.write("[error    ] one\n[error    ] tw")
    assert important_lines() == ["[error    ] one"]
    with log.open("a") as file:
        file.write("o\n[info     ] three\n")
    assert important_lines() == ["[error    ] two"]
    log.write_text("[error    ] four\n")
    assert important_lines() == ["[error    ] four"]
    assert important_lines() == []


async def test_an_engine_that_began_where_there_is_no_directory_any_more_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    group, ahead = Group(tmp_path, {"engine": SERVER}), EngineAhead()
    group.supervisor._ahead = ahead
    work.rmdir()
    run = group.begin()
    await asyncio.wait_for(group.started.wait(), 20)
    assert group.supervisor.pid("engine") != ahead._process.pid
    await eventually(lambda: ahead._process.poll() is not None)
    group.supervisor.stop()
    await run
