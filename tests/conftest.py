"""What every test run begins with."""

import asyncio
import contextlib
import gc
import inspect
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # two tests at a time: a second thread of BLAS would wait for the other's
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Whoever wakes a thread of its own goes on, as MLX does for each operation: a tenth less CPU where it is short.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# No test trusts a public authority, and to read all of them takes each HTTP client 30 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# Tests fork, for processes that they kill and for terminals, while gRPC's threads run. gRPC's handlers of a fork cut
# calls of the parent and end the child by a signal, which a test takes for a kill. No child uses what gRPC had here.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import inference_svc  # noqa: F401  it loads an optimized BLAS, which must come before any test imports MLX
from tests import long_tests
from tests.made_models.sampling import sampled
from tests.on_gpu import gpu, keep_kernels_apart, skip_with_reasons
from tests.running import in_memory, own_notes  # noqa: F401

keep_kernels_apart(os.environ)

settings.register_profile(
    "a busy machine is no failure",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=sampled(40, of=100),
)
settings.load_profile("a busy machine is no failure")


def pytest_configure() -> None:
    """Temporary files lie in memory."""
    if (memory := in_memory.directory()) != Path("/tmp"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An async test runs in an event loop of its own, which its fixtures do not see."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# Files with a test that takes longer come first: begun last, it would keep a core waiting for its end.
LONGEST_S = 12
# Each parses all sources: side by side they fall to one worker, which does it once.
READ_ALL = (
    *("tests/test_walls.py", "tests/test_cancellation.py", "tests/kvasir/test_error_reasons.py"),
    "tests/campaigns/fairness/test_shared_resources.py",
)


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
    """Campaigns run when they are asked for: `pytest -m campaign`. On a GPU `cpu_only` is skipped."""
    cpu_only = [item for item in items if item.get_closest_marker("cpu_only")]
    if cpu_only and gpu():
        skip_with_reasons(cpu_only)
    if not config.getoption("-m"):
        leave_out(config, items, [item for item in items if item.get_closest_marker("campaign")])
        leave_out(config, items, [item for item in items if item.get_closest_marker("fleet")])
    take_turns(config, items)


def take_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, and with KVASIR_TURN those of its part alone."""
    long = {item: marker.args[0] for item in items if (marker := item.get_closest_marker("long"))}
    longest = {item.path for item in long if long[item] > LONGEST_S}
    items.sort(key=lambda item: (item.path not in longest, not item.nodeid.startswith(READ_ALL)))
    turn = long_tests.turn()
    if turn is None:
        return
    tests = {item.nodeid.split("[")[0]: (str(item.path), seconds) for item, seconds in long.items()}
    of_turn = long_tests.whose_turn_it_is(tests, turn)
    others = [item for item in long if item.nodeid.split("[")[0] not in of_turn]
    if "PYTEST_XDIST_WORKER" not in os.environ:
        now, last = len(long) - len(others), long_tests.PARTS - 1
        print(f"{now} of {len(long)} long tests run, part {turn} of 0 to {last}: KVASIR_TURN={turn:x}")
    leave_out(config, items, others)


def leave_out(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]
