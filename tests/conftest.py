"""What every test run begins with."""

import gc
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # two tests at a time: a second thread of BLAS would wait for the other's
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import inference_svc  # noqa: F401  it loads an optimized BLAS, which must come before any test imports MLX
from tests.on_gpu import gpu, skip_with_reasons

settings.register_profile("a busy machine is no failure", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("a busy machine is no failure")


MEMORY, ROOM_BYTES = Path("/dev/shm"), 8 << 30


def pytest_configure() -> None:
    """Temporary files lie in memory where there is room: half of what the store's tests take is waiting for a disk.

    What a sync is for, a loss of power, is tested on a recording of all effects; and a kill leaves this memory as it
    leaves the page cache of a disk.
    """
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


# The longest single tests, 15 to 50 s of CPU each: begun last, one would keep a core waiting for another's end.
FIRST = tuple(f"tests/{name}/" for name in ("hammer", "system", "faults", "soak", "orchestrator"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A quarter of a collection was garbage collection; and what is there by its end stays to the last test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first. Campaigns run when they are asked for: `pytest -m campaign`. On a GPU `cpu_only` is skipped."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    cpu_only = [item for item in items if item.get_closest_marker("cpu_only")]
    if cpu_only and gpu():
        skip_with_reasons(cpu_only)
    if not config.getoption("-m"):
        campaigns = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=campaigns)
        items[:] = [item for item in items if item not in campaigns]
