"""Engines with a tiny sharpened model, shared by the tests of this folder."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from inference_svc.engine import engine as engine_module
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.engine.scheduling.schedulable import DraftRules, Rules
from tests.inference.engine.cells import cells_of, cells_of_new_engines
from tests.inference.engine.drafts.planted_drafts import Told, planted
from tests.inference.engine.driving import Driver
from tests.inference.engine.families import ALL, BUDGET, write_family
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.on_gpu import gpu


@pytest.fixture(scope="session", autouse=bool(gpu()))
def patient() -> Iterator[None]:
    """On a GPU the first pass waits for a compiler, and the next prompt's cells would be cut by what that took."""
    rules = engine_module._rules

    def made(*given: Any) -> Rules:
        return replace(rules(*given), longest_cell_s=1e6)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_rules", made)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), {**LLAMA, "eos_token_id": 0})


@pytest.fixture(scope="session")
def drivers(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, bool], Driver]]:
    """By tokens of a cell, which must be those of new engines, and batch invariance: an engine, opened at the first
    need.
    """
    opened: list[Driver] = []

    @cache
    def driver(cell_tokens: int, batch_invariant: bool) -> Driver:
        engine = Engine.open(
            model_dir,
            cache_dir=tmp_path_factory.mktemp("digests"),
            memory_budget_bytes=256 << 20,
            longest_gap_s=0,
            batch_invariant=batch_invariant,
            drafts=DraftRules(most=16),  # on a GPU, too
        )
        assert engine.model.cell_tokens == cell_tokens
        opened.append(Driver(engine))
        return opened[-1]

    yield driver
    for each in opened:
        leaked = each.engine._thread.post(leaked_pages).result(60)
        each.engine.close()
        assert leaked == 0, "a turn of one of the tests left pages that no memory holds"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driver]]:
    """By name: an engine with a model of the family, opened at the first need."""
    opened: dict[str, Driver] = {}

    def get(name: str) -> Driver:
        if name not in opened:
            directory = write_family(tmp_path_factory.mktemp(name), ALL[name], seed=1)
            engine = Engine.open(directory, cache_dir=tmp_path_factory.mktemp("cache"), memory_budget_bytes=BUDGET)
            opened[name] = Driver(engine)
        return opened[name]

    yield get
    for driver in opened.values():
        driver.engine.close()


def leaked_pages(worker: EngineWorker) -> int:
    """Pages in use that no memory holds, once no turn is open."""
    assert worker._scheduler.turns == []
    return worker.memories.ledger.used_pages - len(worker.memories.pages)


@pytest.fixture(autouse=True)
def cell_tokens(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of engines that the test opens: a block if it is marked `cells_of_a_block`, else the device's own."""
    is_marked = request.node.get_closest_marker("cells_of_a_block") is not None
    with cells_of(1) if is_marked else contextlib.nullcontext():
        yield cells_of_new_engines()


@pytest.fixture
def driver(drivers: Callable[[int, bool], Driver], cell_tokens: int, request: pytest.FixtureRequest) -> Driver:
    """`batch_as_alone` asks for batch invariance where it is an option: a CPU always has it."""
    is_marked = request.node.get_closest_marker("batch_as_alone") is not None
    return drivers(cell_tokens, is_marked and bool(gpu()))


@pytest.fixture
def engine(driver: Driver) -> Engine:
    return driver.engine


@pytest.fixture
def told() -> Iterator[type[Told]]:
    with planted() as drafts:
        yield drafts
