"""Operations before a model is there change nothing for it, and no configuration ends a start by them."""

import contextlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvasir.cachestore.v1 import identity_pb2

from inference_svc import first_model
from inference_svc.engine import decoding, first_operations
from inference_svc.engine.engine import Engine
from inference_svc.engine.first_operations import run_first_operations
from inference_svc.first_model import FirstModel
from inference_svc.kv.attention import choice
from inference_svc.kv.attention.choice import KernelChoice
from inference_svc.kv.attention.kept_checks import KeptChecks
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.host_copies import host_copy
from inference_svc.kv.host_numbers import carried_over
from inference_svc.kv.page import PageFormat
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.model import kvasir_tiny
from inference_svc.model.probing import first_pages
from inference_svc.model.probing.first_pages import write_first_pages
from inference_svc.model.weights import placing
from tests.inference.engine.driving import Driver
from tests.inference.engine.families import BUDGET
from tests.inference.kv.attention.device.coming_files import play

_PLAIN: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3}


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


def test_pages_of_a_models_sizes_are_written_before_it_is_there_and_change_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_pages, "are_known", lambda *_: True)  # on a GPU an earlier start would have checked them
    config, before = {**_PLAIN, "torch_dtype": "bfloat16"}, [each.tolist() for each in mx.random.state]
    assert write_first_pages(config, "auto", None) == _PLAIN["num_hidden_layers"]
    assert [each.tolist() for each in mx.random.state] == before


@pytest.mark.parametrize(
    "config", [{}, _PLAIN, {**_PLAIN, "dtype": "float8"}, {"dtype": "bfloat16", "hidden_size": None}], ids=str
)
def test_a_model_of_other_sizes_is_opened_without_pages_before_it(config: dict[str, Any]) -> None:
    assert write_first_pages(config, "auto", None) == 0


def test_kernels_that_no_start_has_found_right_write_no_pages_before_a_model_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choice, "device_dialect", lambda: Dialect.CUDA)
    monkeypatch.setattr(KernelChoice, "dialect_of", lambda *_: None)  # here are none
    monkeypatch.setattr(choice, "why_wrong", lambda *_: "")
    config, kept = {**_PLAIN, "dtype": "bfloat16"}, KeptChecks(tmp_path / "checks", ["here"])
    assert write_first_pages(config, "auto", kept) == 0
    page_format = PageFormat.of(_identity(config), 0)
    KernelChoice("auto", kept)._failure(page_format, mx.bfloat16, Dialect.CUDA)
    assert write_first_pages(config, "auto", kept) == _PLAIN["num_hidden_layers"]


def _identity(config: dict[str, Any]) -> identity_pb2.KvIdentity:
    heads = config["num_attention_heads"]
    width = config["hidden_size"] // heads
    kind = identity_pb2.LAYER_KIND_FULL
    layer = identity_pb2.LayerLayout(kind=kind, kv_heads=heads, key_dim=width, value_dim=width)
    return identity_pb2.KvIdentity(layers=[layer], policy=policy_of(Rung.Q4, config["dtype"]))
