"""Arrays that a model's modules compute for themselves are values once it is loaded: a kept graph computes none."""

import io
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from inference_svc.model.loading import load
from tests.inference.engine.families import ALL, LLAMA31, write_family


def operations(made: mx.array) -> list[str]:
    """What MLX would compute for an array."""
    text = io.StringIO()
    mx.export_to_dot(text, made)  # type: ignore[no-untyped-call]
    return re.findall(r'label ?="?([A-Z]\w+)', text.getvalue())


@pytest.mark.parametrize("family", ALL)
def test_no_array_of_a_loaded_model_waits_to_be_computed(family: str, tmp_path: Path) -> None:
    modules: Any = load(write_family(tmp_path, ALL[family]), None).model
    arrays = [each for module in modules.modules() for each in module.values() if isinstance(each, mx.array)]
    assert arrays
    assert not any(map(operations, arrays))


def test_a_kept_graph_rotates_by_angles_that_are_there(tmp_path: Path) -> None:
    attention = load(write_family(tmp_path, LLAMA31), None).model.layers[0].self_attn  # type: ignore[attr-defined]
    kept = mx.compile(lambda x: x * attention.rope._freqs)
    x = mx.ones(attention.rope._freqs.shape)
    mx.eval(x)
    assert operations(kept(x)) == ["Multiply"]
