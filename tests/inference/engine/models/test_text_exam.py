"""The exam on a text of one's own: each layer by itself, and a mixture that is what it says."""

import time
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import InvalidArgument
from kvasir_bench.quality.text_exam import Mixture, TextExam, examine_text
from mlx_lm.models.cache import QuantizedKVCache

from inference_svc.kv.policy import PolicyRequest, Rung
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.quality.material import Sheet
from inference_svc.model.quality.measure import peer_ways
from tests.inference.engine.driving import tokens_of
from tests.inference.engine.families import GEMMA3, JAMBA, write_family

SHEETS = [Sheet(tokens_of(24, seed % 15)) for seed in range(16)]  # the last repeats the first, as texts may
RUNGS = (Rung.Q4, Rung.K8V4, Rung.FP)


def examined(runner: ModelRunner, budget_bytes: int | None = None, exact: str = "") -> TextExam:
    request = PolicyRequest.parse("auto", exact)
    policies = {rung.value: request.policy(rung, "float32", len(runner.layers)) for rung in RUNGS}
    mixture = Mixture("q4", budget_bytes)
    return examine_text(runner, SHEETS, policies, mixture, clock=time.monotonic, say=lambda _: None)


@pytest.fixture(scope="module")
def llama(model_dir: Path) -> ModelRunner:
    return ModelRunner(load(model_dir, "float32").model)


@pytest.mark.long(2)
def test_each_layer_is_measured_by_itself_and_the_costly_ones_stay_exact(llama: ModelRunner) -> None:
    """If layers that should be exact were quantized, all would cost what the policy costs, and the mixture as much."""
    exam = examined(llama, budget_bytes=1000)
    q4, costs = exam.rungs[0], {cost.layer: cost.found.kl for cost in exam.layers}
    assert list(costs) == [0, 1, 2]
    assert len(set(costs.values())) == 3
    assert all(0 < cost < q4.kl for cost in costs.values())
    assert {cost.exact_adds for cost in exam.layers} == {2 * 2 * (128 - 36)}
    (kept,) = exam.exact_layers
    assert costs[kept] == max(costs.values())
    assert exam.mixed is not None
    assert exam.mixed.name == f"q4, layer {kept} exact"
    assert exam.mixed.kl < q4.kl
    assert exam.mixed.bytes_per_token == q4.bytes_per_token + 368 <= exam.budget_bytes
    assert [len(each.texts) for each in (exam.exact, q4, exam.mixed)] == [16] * 3
    assert [len(cost.found.texts) for cost in exam.layers] == [8] * 3


@pytest.mark.long(3)
def test_layers_that_were_asked_to_stay_exact_stay_so_in_every_reading(llama: ModelRunner) -> None:
    """And a budget of the policy's own bytes adds none to them."""
    exam = examined(llama, budget_bytes=800, exact="1")
    assert [cost.layer for cost in exam.layers] == [0, 2]
    assert exam.mixed is None
    assert exam.exact_layers == (1,)
    assert exam.suggests == "q4"


def test_a_budget_of_less_than_the_policys_own_bytes_is_refused(llama: ModelRunner) -> None:
    with pytest.raises(InvalidArgument, match="q4 takes 432 bytes") as refused:
        examined(llama, budget_bytes=431)
    assert refused.value.field == "kv_bytes"


def test_a_peer_that_the_device_cannot_compute_is_reported_with_its_reason(
    llama: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MLX on CUDA, which has no product for heads as narrow as these."""

    def no_product(*_: Any) -> None:
        raise RuntimeError("[quantized_matmul] No implementation for problem shape")

    monkeypatch.setattr(QuantizedKVCache, "update_and_fetch", no_product)
    peers, refused = peer_ways(llama)
    assert peers == []
    assert "No implementation" in refused["mlx-lm q4"]


@pytest.mark.long(9)
@pytest.mark.parametrize(("family", "layers"), [(GEMMA3, [0, 1, 2, 3]), (JAMBA, [1])], ids=["windows", "states"])
def test_layers_with_windows_are_measured_and_states_are_exact_anyway(
    family: dict[str, Any], layers: list[int], tmp_path: Path
) -> None:
    runner = ModelRunner(load(write_family(tmp_path, family), "float32").model)
    exam = examined(runner, budget_bytes=10**6)
    assert [cost.layer for cost in exam.layers] == layers
    assert exam.exact_layers == tuple(layers)
    assert exam.mixed is not None
    fp = exam.rungs[-1]
    assert (exam.mixed.kl, exam.mixed.bytes_per_token) == (fp.kl, fp.bytes_per_token), "all layers exact: that is fp"
    assert set(exam.refused) == {"mlx-lm q4", "mlx-lm q8"}
    assert exam.peers == []
    if family is JAMBA:
        with pytest.raises(InvalidArgument, match="0 is a recurrent state") as refused:
            examined(runner, exact="0")
        assert refused.value.field == "kv_exact_layers"
