"""Joined projections compute what the single ones did, hold their weights once, and leave other layers alone."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from inference_svc.model.joined_projections import join_projections
from tests.inference.engine.tiny_models import LLAMA, write_model


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """As mlx-lm loads it: on a CPU our own loading makes its projections exact, row by row."""
    return load_model(write_model(tmp_path, LLAMA))[0]


def size(model: Any) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def test_joined_projections_compute_what_the_single_ones_do_and_hold_no_weight_twice(model: Any) -> None:
    tokens = mx.array([[3, 9, 27, 81]])
    before, bytes_before = model(tokens), size(model)
    mx.eval(before)
    assert join_projections(model) == 2 * len(model.layers)
    assert mx.allclose(model(tokens), before, rtol=1e-4, atol=1e-4).item()
    assert size(model) == bytes_before


def test_each_input_gets_its_own_product(model: Any) -> None:
    attention = model.layers[0].self_attn
    one, other = mx.random.normal((1, 2, attention.q_proj.weight.shape[1])), mx.random.normal((1, 2, 1)) + 1
    other = one * other
    expected = [
        [project(x) for project in (attention.q_proj, attention.k_proj, attention.v_proj)] for x in (one, other)
    ]
    join_projections(model)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    found = [[project(x) for project in projections] for x in (one, other)]
    alone = [projections[2](other), projections[0](one), projections[1](other)]
    for ours, theirs in zip(
        [*found[0], *found[1], *alone],
        [*expected[0], *expected[1], expected[1][2], expected[0][0], expected[1][1]],
        strict=True,
    ):
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5).item()


def test_projections_of_another_kind_stay_as_they_are(model: Any) -> None:
    import mlx.nn as nn

    nn.quantize(model, group_size=64, bits=4)
    assert join_projections(model) == 0
