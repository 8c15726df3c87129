"""The model that the conformance suite of KV backends runs."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from inference_svc.kv.model_hooks import row_exact
from inference_svc.kv.model_hooks.row_exact import make_row_exact
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.inference.kv.sequences import full, pool_of


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three layers of random, sharpened weights: every token of the context matters."""
    loaded = load(write_model(tmp_path_factory.mktemp("llama"), LLAMA), "float32").model
    make_row_exact(loaded)
    return loaded


@pytest.fixture
def new_kv(model: Any) -> Callable[[], SequenceKV]:
    """Empty sequences of the model in one pool, whose free pages are poisoned."""
    pool = pool_of([full()] * len(model.layers))
    return lambda: SequenceKV(pool)


@pytest.fixture(params=[None, 384])
def attention_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own, and that of one whose kernels cut their sums in blocks. For tests that decode in batches."""
    if request.param is not None:
        monkeypatch.setattr(row_exact, "_attention_step", lambda: request.param)


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    yield
    mx.clear_cache()
