"""SwiGLU by powers of 2: nearly as near to the truth as that of MLX, and a row has the same bits beside any others."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations

from inference_svc.kv.model_hooks.quick_swiglu import swiglu, take_quick_swiglu
from inference_svc.model.loading import load
from tests.inference.engine.tiny_models import LLAMA, write_model

pytestmark = pytest.mark.cpu_only("a GPU computes powers of e as fast")


@pytest.mark.parametrize("spread", [1.0, 5.0, 60.0])
def test_results_are_as_near_to_the_truth_as_those_of_mlx(spread: float) -> None:
    gate = mx.random.normal((300, 512), key=mx.random.key(0)) * spread
    up = mx.random.normal((300, 512), key=mx.random.key(1))
    wide = np.array(gate).astype(np.float64)
    truth = wide / (1 + np.exp(-wide)) * np.array(up)
    wrong, usual = (np.abs(np.array(each) - truth) for each in (swiglu(gate, up), activations.swiglu(gate, up)))
    assert wrong.mean() <= 1.3 * usual.mean()
    assert (wrong <= 1e-35 + 4e-6 * np.abs(truth)).all()


def test_extremes_are_those_of_mlx() -> None:
    gate = mx.array([np.inf, -np.inf, np.nan, 3e38, -3e38, -200.0, 0.0])
    up = mx.ones_like(gate)
    assert mx.array_equal(swiglu(gate, up), activations.swiglu(gate, up), equal_nan=True).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_other_types_keep_the_bits_of_mlx(dtype: mx.Dtype) -> None:
    gate, up = (mx.random.normal((5, 64), key=mx.random.key(key)).astype(dtype) for key in (2, 3))
    assert mx.array_equal(swiglu(gate, up), activations.swiglu(gate, up)).item()


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    gate, up = (mx.random.normal((37, 770), key=mx.random.key(key)) for key in (4, 5))
    whole = swiglu(gate, up)
    for first, last in ((0, 1), (1, 4), (3, 36), (36, 37)):
        assert mx.array_equal(swiglu(gate[first:last], up[first:last]), whole[first:last]).item()


def test_a_model_on_a_cpu_has_them(tmp_path: Path) -> None:
    model: Any = load(write_model(tmp_path / "model", LLAMA), "float32").model
    take_quick_swiglu(model)
    mx.export_to_dot(str(tmp_path / "graph"), model(mx.array([[1, 2, 3]])))
    graph = (tmp_path / "graph").read_text()
    assert "Sigmoid" not in graph
    assert "Power" in graph
