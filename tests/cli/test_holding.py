"""Which processes hold a home's lock: also one that opens and closes files all the time, as a program that starts."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from kvasir.cli.running.holding import holders

BUSY = "while True:\n    for file in [open('/dev/null') for _ in range(20)]: file.close()"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere `lsof` tells")
def test_a_holder_is_found_whatever_else_it_opens_and_closes(tmp_path: Path) -> None:
    lock_file = tmp_path / "lock"
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "-c", BUSY], pass_fds=[lock.fileno()])
    try:
        assert [holders(lock_file) for _ in range(100)] == [[process.pid]] * 100
    finally:
        process.kill()
        process.wait()
