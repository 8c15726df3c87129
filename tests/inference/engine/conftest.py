"""An engine with a tiny sharpened model, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from inference_svc.engine.engine import Engine
from tests.inference.engine.driving import Driver
from tests.inference.engine.tiny_models import LLAMA, write_model

# A busy machine is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), {**LLAMA, "eos_token_id": 0})


@pytest.fixture(scope="session")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine.open(
        model_dir, cache_dir=tmp_path_factory.mktemp("digests"), memory_budget_bytes=256 << 20, step_budget_s=0
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def driver(engine: Engine) -> Driver:
    return Driver(engine)
