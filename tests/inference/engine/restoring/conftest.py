"""A memory that comes back, for each engine."""

import pytest

from inference_svc.engine.api import AgentKey, Restored
from tests.inference.engine.driving import Driver

# Tokens that have KV: seven files; beside a stream one is loaded a step, because the engines here have no budget.
LENGTH = 1_700


@pytest.fixture(scope="module")
def memories() -> dict[int, tuple[AgentKey, Restored]]:
    """By engine: an agent, and what a store would give back of it."""
    return {}


@pytest.fixture
def memory(driver: Driver, memories: dict[int, tuple[AgentKey, Restored]]) -> tuple[AgentKey, Restored]:
    if id(driver) not in memories:
        key, _ = driver.remember(LENGTH + 1, seed=8)
        memories[id(driver)] = key, driver.restored(key)
    return memories[id(driver)]
