"""KV policies by name, the gate's arithmetic, and what auto remembers."""

import dataclasses
import json
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats.tensor_layouts import expected_tensors

from inference_svc.config import ConfigError, read_settings
from inference_svc.kv.policy import LADDER, PolicyRequest, Rung, name_of, policy_of
from inference_svc.model.auto_policy import FILE, FORMAT, Choice, Conditions, remember, remembered
from inference_svc.model.quality.findings import (
    RECALL,
    REPEAT,
    TOOL_CALLS,
    Findings,
    Share,
    can_answer,
    cheapest,
    judged,
)

LISTEN = ("--listen", "unix:/nowhere")
LLAMA_3_1_8B = [
    identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=8, key_dim=128, value_dim=128)
] * 32


def found(name: str, *, top1: float = 1.0, positions: int = 1000, **rights: int) -> Findings:
    """Findings with so many right answers of 100 each."""
    shares = {task: Share(right, 100) for task, right in rights.items()}
    return Findings(name, 1, positions=positions, agreed=round(top1 * positions), shares=shares)


def test_each_rung_of_the_ladder_costs_no_less_than_the_one_below() -> None:
    costs = []
    for rung in LADDER:
        identity = identity_pb2.KvIdentity(layers=LLAMA_3_1_8B, policy=policy_of(rung, "bfloat16"))
        costs.append(sum(tensor.size_bytes for tensor in expected_tensors(identity, 1)))
    assert costs == sorted(costs)
    assert [round(cost / costs[-1], 4) for cost in costs] == [0.2812, 0.2812, 0.4062, 0.5312, 1.0]


def test_every_rung_has_one_name_and_one_policy() -> None:
    policies = {name_of(policy_of(rung, "float32")): policy_of(rung, "float32") for rung in LADDER}
    assert list(policies) == ["q4", "q4-rotated", "k8v4", "q8", "fp"]
    assert len({policy.SerializeToString() for policy in policies.values()}) == len(LADDER)
    custom = policy_of(Rung.Q8, "float32")
    custom.key_rotation = identity_pb2.KEY_ROTATION_HADAMARD
    custom.exact_layers.extend([0, 7])
    assert name_of(custom) == "k8v8-rotated, layers 0, 7 exact"


@pytest.mark.parametrize(
    ("given", "layers"), [("", []), ("last", [31]), ("0,last", [0, 31]), ("31, last,2", [2, 31]), ("5", [5])]
)
def test_exact_layers_are_those_that_were_named(given: str, layers: list[int]) -> None:
    assert PolicyRequest.parse("q4", given).policy(Rung.Q4, "float32", 32).exact_layers == layers


@pytest.mark.parametrize("given", ["-1", "32", "first", "1;2", "٣", ",", "1,"])
def test_exact_layers_that_are_none_are_refused_by_name(given: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        PolicyRequest.parse("q4", given).policy(Rung.Q4, "float32", 32)
    assert refused.value.field == "kv_exact_layers"


def test_scales_are_of_the_models_own_type() -> None:
    for rung in LADDER:
        assert policy_of(rung, "bfloat16").scale_type == identity_pb2.SCALE_TYPE_BFLOAT16
        assert policy_of(rung, "float32").scale_type == identity_pb2.SCALE_TYPE_FLOAT16


@pytest.mark.parametrize("name", [*(rung.value for rung in LADDER), "auto"])
def test_the_option_kv_policy_requests_what_it_names(name: str) -> None:
    settings = read_settings([*LISTEN, "--kv-policy", name])
    request = PolicyRequest.parse(settings.kv_policy, settings.kv_exact_layers)
    assert request == PolicyRequest(None if name == "auto" else Rung(name))


def test_the_default_is_four_bits_with_no_exact_layer() -> None:
    settings = read_settings(LISTEN)
    assert PolicyRequest.parse(settings.kv_policy, settings.kv_exact_layers) == PolicyRequest(Rung.Q4, ())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--kv-policy", "q5"), "--kv-policy"),
        (("--kv-policy", "Q4"), "--kv-policy"),
        (("--kv-exact-layers", "all"), "--kv-exact-layers"),
        (("--kv-policy", "fp", "--kv-exact-layers", "last"), "--kv-exact-layers"),
    ],
    ids=" ".join,
)
def test_a_policy_that_cannot_be_applied_is_refused_by_its_options_name(options: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_settings([*LISTEN, *options])


@pytest.mark.parametrize("gone", ["--kv-bits", "--kv-exact-tail", "--kv-exact-first-tokens"])
def test_an_option_that_nothing_applies_is_not_accepted(gone: str) -> None:
    """(LESSONS 17) What is exact at the tail or the beginning is not offered, so it must not be taken."""
    with pytest.raises(SystemExit):
        read_settings([*LISTEN, gone, "4"])


def test_a_rung_may_lose_one_answer_in_a_hundred_and_no_more() -> None:
    exact = found("exact", recall=100, tool_calls=100)
    assert judged(found("q4", recall=99, tool_calls=99), exact).passes
    assert not judged(found("q4", recall=98, tool_calls=100), exact).passes
    assert not judged(found("q4", recall=100, tool_calls=98), exact).passes
    # What exact KV does not know itself is nobody's loss.
    assert judged(found("q4", recall=60, tool_calls=70), found("exact", recall=60, tool_calls=70)).passes


def test_answers_are_judged_by_answers_and_not_by_agreement() -> None:
    exact = found("exact", recall=100, tool_calls=100)
    assert judged(found("q4", top1=0.5, recall=100, tool_calls=100), exact).passes


def test_the_canary_is_judged_by_what_it_repeats_and_by_agreement() -> None:
    exact = found("exact", repeat=90)
    assert judged(found("q4", top1=0.99, repeat=90), exact).passes
    assert not judged(found("q4", top1=0.98, repeat=90), exact).passes
    assert not judged(found("q4", top1=1.0, repeat=80), exact).passes
    # A model that repeats nothing by itself has nothing to lose there.
    assert judged(found("q4", repeat=0), found("exact", repeat=3)).passes
    assert not judged(found("q4", top1=0.9, repeat=0), found("exact", repeat=3)).passes


def test_the_cheapest_that_passes_is_taken_and_none_where_none_does() -> None:
    exact = found("exact", recall=100, tool_calls=100)
    good, bad = (found(name, recall=right, tool_calls=right) for name, right in (("good", 100), ("bad", 50)))
    assert cheapest([bad, good, good], exact)[0] is good
    assert cheapest([good, bad], exact)[0] is good
    none, why = cheapest([bad], exact)
    assert none is None
    assert why == "bad does not (recall 50 of 100, exact KV 100, tool calls 50 of 100, exact KV 100)"


def test_a_model_that_answers_less_than_half_is_not_asked() -> None:
    assert can_answer(found("exact", recall=50, tool_calls=50))
    assert not can_answer(found("exact", recall=49, tool_calls=100))
    assert not can_answer(found("exact"))


def test_findings_as_json_name_every_task_and_hold_no_sum() -> None:
    one = found("q4", recall=7)
    one.kl_sum, one.surprise_sum = 2.0, 1000.0
    facts = one.as_json()
    assert facts["kl"] == 0.002
    assert facts["perplexity"] == pytest.approx(2.71828, abs=1e-4)
    assert facts[RECALL] == {"share": 0.07, "right": 7, "n": 100}
    assert TOOL_CALLS not in facts
    assert REPEAT not in facts


CONDITIONS = Conditions("a" * 64, "float32", (7,))


def test_a_choice_is_remembered_under_all_its_conditions(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    assert remembered(directory, CONDITIONS) is None
    remember(directory, CONDITIONS, Choice(Rung.K8V4, "because"))
    assert remembered(directory, CONDITIONS) == Choice(Rung.K8V4, "because")
    for change in ({"weights_digest": "b" * 64}, {"compute_type": "bfloat16"}, {"exact_layers": ()}):
        assert remembered(directory, dataclasses.replace(CONDITIONS, **change)) is None  # type: ignore[arg-type]
    other = dataclasses.replace(CONDITIONS, exact_layers=())
    remember(directory, other, Choice(Rung.Q4, "also"))
    assert remembered(directory, CONDITIONS) == Choice(Rung.K8V4, "because")
    assert [path.name for path in directory.iterdir()] == [FILE], "nothing half-written is left"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        json.dumps({"format": FORMAT - 1, "choices": {CONDITIONS.key: {"rung": "q4", "why": ""}}}),
        json.dumps({"format": FORMAT, "choices": 3}),
        json.dumps({"format": FORMAT, "choices": {CONDITIONS.key: "q4"}}),
        json.dumps({"format": FORMAT, "choices": {CONDITIONS.key: {"rung": "q5", "why": ""}}}),
        json.dumps({"format": FORMAT, "choices": {CONDITIONS.key: {"rung": "q4"}}}),
        json.dumps({"format": FORMAT, "choices": {CONDITIONS.key: {"rung": ["q4"], "why": ""}}}),
    ],
)
def test_a_memory_of_another_format_is_no_memory_and_is_written_again(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert remembered(tmp_path, CONDITIONS) is None
    remember(tmp_path, CONDITIONS, Choice(Rung.Q8, "because"))
    assert remembered(tmp_path, CONDITIONS) == Choice(Rung.Q8, "because")
