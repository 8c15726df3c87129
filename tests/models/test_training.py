"""The training script, end to end on a CPU, and the network it trains beside mlx-lm's own."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from inference_svc.model.blas import load_optimized_blas

load_optimized_blas()  # before MLX
# Ten steps compute little: nearly all of their time is the compiler's.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
import pytest  # noqa: E402

from inference_svc.model.kvasir_tiny import path  # noqa: E402
from tools.kvasir_tiny import network, train  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What two runs compile alike is compiled once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def small() -> train.Plan:
    shape = network.Shape(
        hidden_size=128, num_hidden_layers=1, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1
    )
    return train.Plan(
        steps=10, warm_up=2, short=(4, 128), mixed=((1, 256),), short_steps=5, rounded_from=0.3, shape=shape
    )


@pytest.fixture(scope="module")
def sizes() -> train.Sizes:
    return train.Sizes(classic=1, everyday=1, names=((300, 1024),), names_each=4, at_once=1)


@pytest.mark.long(12)
def test_ten_steps_on_a_cpu_lower_the_loss_and_leave_a_model_that_loads(
    small: train.Plan, sizes: train.Sizes, tmp_path: Path
) -> None:
    train.prepare(tmp_path)
    train.train(small, tmp_path, processes=0, sizes=sizes)
    log = json.loads((tmp_path / "log.json").read_text())["log"]
    assert [entry["step"] for entry in log] == [0, 9]
    assert log[-1]["loss"] < log[0]["loss"] - 0.5
    assert {"everyday", "name at 300", "q4 name at 300"} <= set(log[-1]["exact"])
    model, tokens = mlx_lm.load(str(tmp_path))[:2]
    assert isinstance(mlx_lm.generate(model, tokens, prompt="Hello.", max_tokens=3), str)


@pytest.mark.long(10)
def test_the_clock_sets_the_course_and_ends_the_run(
    small: train.Plan, sizes: train.Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()  # one for each look at the clock: two in a step
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    train.train(replace(small, steps=10**6, warm_up=1, time_limit_s=10.0), tmp_path, processes=0, sizes=sizes)
    told = json.loads((tmp_path / "log.json").read_text())
    assert [entry["step"] for entry in told["log"]] == [0, 5]  # the first, which is compiled, took no time
    assert [entry["seconds"] for entry in told["log"]] == [1.0, 11.0]
    assert told["log"][0]["rate"] == pytest.approx(small.learning_rate)
    assert told["log"][-1]["rate"] <= 2 * small.learning_rate * small.final_rate


@pytest.mark.long(3)
def test_the_network_is_the_one_that_mlx_lm_runs() -> None:
    weights, shape = network.load(path(), network.Shape)
    ids = np.random.default_rng(0).integers(0, shape.vocab_size, (1, 48))
    ours = np.asarray(network.logits(weights, jnp.asarray(ids), shape))
    model, _ = mlx_lm.load(str(path()))[:2]
    model.set_dtype(mx.float32)
    theirs = np.array(model(mx.array(ids)))
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


@pytest.mark.long(2)
def test_rounding_in_training_is_mlx_s_own_quantization() -> None:
    x = np.random.default_rng(1).normal(size=(1, 5, 2, 64)).astype(np.float32)
    x[0, 0, 0], x[0, 1, 0] = 0.0, np.abs(x[0, 1, 0])
    coded = mx.quantize(mx.array(x.reshape(-1, 64)), group_size=64, bits=4)
    expected = np.array(mx.dequantize(*coded, group_size=64, bits=4)).reshape(x.shape)
    found = np.asarray(network.rounded(jnp.asarray(x), jnp.float32(1.0)))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.long(4)
def test_what_is_saved_is_what_is_loaded(small: train.Plan, tmp_path: Path) -> None:
    weights = network.initial(small.shape, 3)
    network.save(weights, small.shape, tmp_path)
    again, shape = network.load(tmp_path, network.Shape)
    assert shape == small.shape
    for name, array in weights.items():
        np.testing.assert_array_equal(np.asarray(array.astype(jnp.bfloat16), np.float32), np.asarray(again[name]))
