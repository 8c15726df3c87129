"""A house with a sharpened random model, shared by the tests of this folder that kill nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvasir.clients import InferenceClient

from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.running.system_fixtures import House, running_house


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("model") / "sharpened", LLAMA)
    # Without a temperature it stays greedy.
    (directory / "generation_config.json").write_text('{"bos_token_id": 1, "top_k": 20, "top_p": "much"}')
    return directory


@pytest.fixture(scope="session")
def house(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("house"), model) as house:
        yield house


@pytest.fixture
def client(house: House) -> Iterator[InferenceClient]:
    with house.client() as client:
        yield client


@pytest.fixture
def own_house(model: Path, tmp_path: Path) -> Iterator[House]:
    """For tests that kill."""
    with running_house(tmp_path, model) as house:
        yield house


@pytest.fixture(scope="session")
def new_agent() -> Callable[[], str]:
    """Names that nobody used before."""
    numbers = iter(range(1_000_000))
    return lambda: f"agent {next(numbers)}"
