"""The models that tests of KV run, on this machine and on a GPU that is emulated."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from inference_svc.kv.attention import choice, in_place
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.model_hooks import attention_hook, row_exact
from inference_svc.kv.model_hooks.row_exact import make_row_exact
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.inference.kv.attention.emulators import EMULATORS
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


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for its compiler."""
    for dialect, emulator in EMULATORS.items():
        monkeypatch.setitem(in_place.COMPILERS, dialect, emulator)
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(mx, "compile", lambda function: function)  # an emulated kernel has no place in a kept graph
    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention_hook.attention)


@pytest.fixture(scope="session")
def windows_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 40,
    }
    return write_model(tmp_path_factory.mktemp("windows"), config)


@pytest.fixture
def runner(windows_directory: Path, emulated: None) -> ModelRunner:
    """Of a model with windows, loaded as on a GPU."""
    made = ModelRunner(load(windows_directory, "float32").model)
    assert made.new_pool(policy_of(Rung.Q4, "float32")).dialect is Dialect.CUDA
    return made
