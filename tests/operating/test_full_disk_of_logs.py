"""A disk that takes no more lines of a log keeps no service from starting."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvasir.cli.running.health import STORE_SERVICE, Health, http_health, is_ready
from kvasir.cli.running.home import Endpoint, Home

from tests.running.ports import free_port
from tests.running.programs import Program

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no file is always full")


@contextmanager
def running(name: str, words: Sequence[str], is_up: Callable[[], bool]) -> Iterator[None]:
    program = Program(name, words, out=FULL, err=FULL)
    try:
        give_up = time.monotonic() + 60
        while not is_up():
            assert program.poll() is None, "it ended"
            assert time.monotonic() < give_up
            time.sleep(0.05)
        yield
    finally:
        program.kill()
        program.wait(20)


def test_a_store_starts_though_its_log_takes_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    address = f"unix:{tmp_path}/s"
    words = ["serve", "--data-dir", str(tmp_path / "data"), "--listen", address]
    with running("cachestore_svc", words, lambda: asyncio.run(is_ready(Endpoint(address), STORE_SERVICE))):
        pass


def test_a_gateway_starts_though_its_log_takes_nothing(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = [
        "--listen",
        address,
        "--engine",
        f"unix:{tmp_path}/none",
        "--state-dir",
        str(tmp_path / "state"),
        "--no-keys",
    ]

    def is_up() -> bool:
        return asyncio.run(http_health(Home(tmp_path), address)) is Health.FOREIGN  # it has no home

    with running("kvasir_gateway", words, is_up):
        pass
