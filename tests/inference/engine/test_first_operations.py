"""Operations before a model is there change nothing for it, and no configuration ends a start by them."""

import contextlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from inference_svc import first_model
from inference_svc.engine import decoding, first_operations
from inference_svc.engine.engine import Engine
from inference_svc.engine.first_operations import run_first_operations
from inference_svc.first_model import FirstModel
from inference_svc.kv.host_copies import host_copy
from inference_svc.kv.host_numbers import carried_over
from inference_svc.model import kvasir_tiny
from inference_svc.model.weights import placing
from tests.inference.engine.driving import Driver
from tests.inference.engine.families import BUDGET
from tests.inference.kv.attention.device.coming_files import play


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_operations, "_TOKENS", 16)


def test_no_state_of_mlx_changes() -> None:
    mx.random.seed(7)
    before = [each.tolist() for each in mx.random.state]
    run_first_operations(kvasir_tiny.path())
    assert [each.tolist() for each in mx.random.state] == before


@pytest.mark.parametrize(
    "config", [{}, [], {"hidden_size": "x"}, {"hidden_size": 64, "num_attention_heads": 0}], ids=str
)
def test_a_start_goes_on_where_they_fail(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = list[Path]()

    def of_another(directory: Path) -> None:
        ran.append(directory)
        run_first_operations(tmp_path)

    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 1024)
    played = play(monkeypatch)
    monkeypatch.setattr(first_model, "run_first_operations", of_another)
    monkeypatch.setattr(placing, "ComingWeights", lambda *_: pytest.fail("the weights were sent again"))
    with FirstModel(["--model", str(kvasir_tiny.path()), "--state-dir", str(tmp_path)]) as first:
        engine = first.open_engine(str(kvasir_tiny.path()), cache_dir=tmp_path, memory_budget_bytes=1 << 24)
        assert "sent" in engine.model.weights_placement or played.copies
        engine.close()
    played.gate.set()
    assert ran == [kvasir_tiny.path()]


def test_a_row_that_ends_beside_others_needs_no_operation_that_was_not_run(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[tuple[mx.Dtype, bool]]()

    def noted(drawn: mx.array, slots: Any, known: Any, numbers: Any) -> mx.array:
        steps.append((drawn.dtype, None in known))
        return carried_over(drawn, slots, known, numbers)

    for module in (first_operations, decoding):
        monkeypatch.setattr(module, "carried_over", noted)
    run_first_operations(kvasir_tiny.path())
    ran = {*steps}
    steps.clear()
    with contextlib.closing(Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=BUDGET)) as engine:
        driver = Driver(engine)
        for each in [driver.submit((5, 6, seed), max_tokens=20 * seed) for seed in (1, 2, 3)]:
            each.end()
    assert steps, "the longer replies went on without the others' rows"
    assert {*steps} <= ran
