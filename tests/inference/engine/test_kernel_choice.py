"""As on a GPU, by emulated kernels: kernels that fail their check are reported, and the reference serves."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.cli.doctor import kernel_problems
from kvasir.server.operating.audit import Audit
from kvasir.server.operating.durations import RpcCounts
from kvasir.server.operating.wellness import Wellness
from structlog.testing import capture_logs

from inference_svc.config import read_settings
from inference_svc.edge.metrics import numbers_of
from inference_svc.kv.attention.choice import REFERENCE
from inference_svc.kv.attention.fused import Kernel
from inference_svc.kv.attention.kernels import Dialect, KernelSource
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.service_status import ailments_of_model, status_of
from inference_svc.turns.admission import Admission
from tests.inference.engine.driving import Driver, tokens_of
from tests.inference.engine.emulated import emulated_engine
from tests.inference.kv.attention.emulators import EMULATORS, needs_compiler

pytestmark = [needs_compiler, pytest.mark.cpu_only("there the kernels are the device's own")]

BUDGET = 16 << 20
PROMPT = tokens_of(270, 3)


def compiler_that_raises(source: KernelSource, shared_bytes: int) -> Kernel:
    raise RuntimeError("[metal::Device] Unable to build metal library from source")


def one_wrong_number(source: KernelSource, shared_bytes: int) -> Kernel:
    """As the emulator; in pages of 4 bits the kernel that writes rows gets one code of one row wrong by one."""
    emulated = EMULATED(source, shared_bytes)

    def launch(**given: Any) -> list[mx.array]:
        made = emulated(**given)
        if "append" in source.name and dict(given["template"])["KEY_BITS"] == 4:
            pages, table, places = given["inputs"][2:5]
            place = int(places.reshape(-1)[-1].item())
            np.asarray(pages)[table[0, place // 256].item(), place % 256 * 16] ^= 1
        return made

    return launch


EMULATED = EMULATORS[Dialect.CUDA]
FAULTS = {"a compiler that raises": compiler_that_raises, "one wrong number in 4 bits": one_wrong_number}


@pytest.fixture(scope="module")
def expected(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """Replies of the reference."""
    cache_dir = tmp_path_factory.mktemp("digests")
    with emulated_engine(model_dir, cache_dir, memory_budget_bytes=BUDGET, kernels="reference") as driver:
        assert (driver.engine.kernels.attention, driver.engine.kernels.failure) == (REFERENCE, "")
        return replies(driver)


def replies(driver: Driver) -> list[tuple[int, ...]]:
    """Of turns that run together, and of one that goes on."""
    key = driver.key()
    turns = [driver.submit(PROMPT, key=key), driver.submit(PROMPT[:40])]
    return [driver.reply(turn.end()) for turn in turns]


@pytest.fixture(params=FAULTS)
def failed(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Driver, list[Any]]]:
    monkeypatch.setitem(EMULATORS, Dialect.CUDA, FAULTS[request.param])
    options = {"memory_budget_bytes": BUDGET, "takes_pool_at_once": True}
    with capture_logs() as logs, emulated_engine(model_dir, tmp_path, **options) as driver:
        yield driver, logs


def test_kernels_that_fail_their_check_are_reported_and_the_reference_serves(
    failed: tuple[Driver, list[Any]], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    driver, logs = failed
    kernels, pool = driver.engine.kernels, driver.engine._worker._pool
    assert (kernels.attention, kernels.encoding) == (REFERENCE, REFERENCE)
    assert kernels.failure
    errors = [line for line in logs if line["event"] == "kernels.check_failed"]
    assert errors
    assert all(line["log_level"] == "error" and line["why"] in kernels.failure for line in errors)
    raised = [line["error"] for line in logs if line["event"] == "kernels.check_raised"]
    assert not any(text in kernels.failure for text in raised), "a caller reads no text of a compiler"
    assert replies(driver) == expected
    facts = asdict(kernels) | {"policies": {"q8": "scales"}}
    assert [kernels.failure in each for each in kernel_problems(facts, {})] == [True, False], "kvasir doctor"
    host: Any = SimpleNamespace(served=SimpleNamespace(name="m", engine=driver.engine, owed={}), loads=1)
    admission = Admission(read_settings(["--listen", "unix:/engine"]).admission, time.monotonic)
    status = status_of(host, ServiceStats(0), admission, now_s=1)
    numbers = {metric.name: metric.samples for metric in numbers_of(status, RpcCounts(), Audit("engine"))}
    assert [sample.value for sample in numbers["kvasir_kernels_failed"]] == [1]
    [ailment] = ailments_of_model(host)
    assert (ailment.reason, Wellness([ailment]).http_status) == ("KERNELS_FAILED", 200)
    assert kernels.failure in ailment.message
    assert pool.dialect is None
    assert pool.arrays[0].shape[0] < pool.allocator.total, "its pages grow: a write of MLX's may copy all of them"


def test_a_failure_is_not_kept_for_the_next_start(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EMULATORS, Dialect.CUDA, compiler_that_raises)
        with emulated_engine(model_dir, tmp_path, memory_budget_bytes=BUDGET) as driver:
            assert driver.engine.kernels.failure
    with emulated_engine(model_dir, tmp_path, memory_budget_bytes=BUDGET) as driver:
        assert (driver.engine.kernels.attention, driver.engine.kernels.failure) == ("fused (CUDA)", "")


def test_a_closed_engine_lets_go_of_the_graphs_of_its_passes(model_dir: Path, tmp_path: Path) -> None:
    """They hold weights, wherever the engine's thread leaves them to MLX."""
    with emulated_engine(model_dir, tmp_path, memory_budget_bytes=BUDGET) as driver:
        driver.turn(tokens_of(5), max_tokens=2)
        passes = driver.engine._worker._runner._short
        assert passes is not None
        assert passes._kept_graph._compiled is not None
    assert passes._kept_graph._compiled is None
