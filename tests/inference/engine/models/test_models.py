"""Which models are served, which are refused by name, and what tells one model's KV from another's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats.block_hash import differing_field

from inference_svc.engine.api import Hot
from inference_svc.engine.engine import Engine
from inference_svc.model import kvasir_tiny
from inference_svc.model.model_identity import weights_digest
from tests.inference.engine.driving import Driver, tokens_of
from tests.inference.engine.families import GEMMA3, write_family
from tests.inference.engine.restoring.test_restore import goes_on_equally
from tests.inference.engine.tiny_models import LLAMA, NARROW_HEADS, QWEN2, QWEN3, write_model
from tests.inference.kv.sequences import four_bits

BUDGET = 64 << 20


@contextmanager
def opened(directory: Path, cache_dir: Path, **options: Any) -> Iterator[Driver]:
    engine = Engine.open(directory, cache_dir=cache_dir, memory_budget_bytes=BUDGET, **options)
    try:
        yield Driver(engine)
    finally:
        engine.close()


@pytest.mark.long(6)
@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda config: config["model_type"])
def test_families_whose_layers_keep_all_tokens_are_restored(config: dict[str, Any], tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", {**config, "eos_token_id": 0}, seed=3)
    with opened(directory, tmp_path) as driver:
        assert driver.engine.model.policy_applied_layers == 3
        for length, keep in ((259, 259), (600, 300)):
            key, _ = driver.remember(length)
            goes_on_equally(driver, key, keep, tokens_of(20))


@pytest.mark.long(5)
def test_the_model_that_ships_is_restored(tmp_path: Path) -> None:
    with opened(kvasir_tiny.path(), tmp_path) as driver:
        assert driver.engine.model.name == "kvasir-tiny"
        for length, keep in ((700, 700), (513, 300)):
            prompt = tokens_of(length)
            key = driver.key()
            driver.turn(prompt, key=key, max_tokens=1)
            goes_on_equally(driver, key, keep, tokens_of(30, seed=1))


def test_a_context_that_only_the_language_part_of_a_model_names_is_found(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {**GEMMA3, "max_position_embeddings": 777}}
    outer = {"vocab_size": GEMMA3["vocab_size"], "tie_word_embeddings": False, "eos_token_id": 0}
    with opened(write_family(tmp_path / "model", {**config, **outer}), tmp_path) as driver:
        assert driver.engine.model.context_tokens == 777


@pytest.mark.long(5)
@pytest.mark.parametrize(
    "changes",
    [
        {"key_bits": 8},
        {"key_bits": 8, "value_bits": 8},
        {"key_bits": 16, "value_bits": 16, "group_size": 0},
        {"exact_layers": [2]},
        {"group_size": 32},
        {"scale_type": identity_pb2.SCALE_TYPE_BFLOAT16},
        {"key_rotation": identity_pb2.KEY_ROTATION_HADAMARD},
        {"key_rotation": identity_pb2.KEY_ROTATION_HADAMARD, "exact_layers": [0, 2]},
    ],
    ids=str,
)
def test_every_policy_that_is_offered_is_applied_and_restored(
    changes: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    policy = four_bits()
    exact = changes.pop("exact_layers", [])
    policy.MergeFrom(identity_pb2.KvPolicy(exact_layers=exact))
    for name, value in changes.items():
        setattr(policy, name, value)
    with opened(model_dir, tmp_path, policy=policy) as driver:
        assert driver.engine.model.policy_applied_layers == 3
        assert driver.engine.model.kv_identity.policy == policy
        key, _ = driver.remember(300)
        goes_on_equally(driver, key, 280, tokens_of(20))


def test_another_policy_gives_other_replies(driver: Driver, model_dir: Path, tmp_path: Path) -> None:
    """A flag that is accepted is applied (LESSONS 17)."""
    policy = four_bits()
    policy.key_bits = policy.value_bits = 16
    with opened(model_dir, tmp_path, policy=policy) as exact:
        prompt = tokens_of(600)
        assert exact.reply(exact.turn(prompt)) != driver.reply(driver.turn(prompt))
        assert exact.engine.model.kv_bytes_per_token == exact.engine.model.kv_bytes_per_token_fp16


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key_bits": 3}, "policy.key_bits"),
        ({"group_size": 48}, "policy.group_size"),
        ({"scale_type": identity_pb2.SCALE_TYPE_UNSPECIFIED}, "policy.scale_type"),
        ({"key_rotation": identity_pb2.KEY_ROTATION_UNSPECIFIED}, "policy.key_rotation"),
        ({"key_rotation": identity_pb2.KEY_ROTATION_HADAMARD, "key_bits": 16}, "policy.key_rotation"),
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_applied_is_refused(
    changes: dict[str, Any], field: str, model_dir: Path, tmp_path: Path
) -> None:
    policy = four_bits()
    for name, value in changes.items():
        setattr(policy, name, value)
    with pytest.raises(InvalidArgument) as refused:
        Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=BUDGET, policy=policy)
    assert refused.value.field == field


def test_a_model_that_cannot_be_kept_is_refused_by_layer(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", NARROW_HEADS)
    with pytest.raises(FailedPrecondition, match=r"layer 0 .*48 is no multiple of the group size 64") as refused:
        Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    assert refused.value.reason == "LAYER_NOT_KEPT"
    assert refused.value.metadata == {"layer": "0", "class": "TransformerBlock"}


def test_a_sliding_layer_of_a_llama_is_kept_among_full_ones(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    directory = write_model(tmp_path / "model", {**LLAMA, "layer_types": kinds, "sliding_window": 64})
    with opened(directory, tmp_path) as driver:
        model = driver.engine.model
        assert [layer.window for layer in model.kv_identity.layers] == [0, 64, 0]
        assert model.has_rewind_points
        assert not model.has_states
        assert model.window_bytes_per_token == {64: model.kv_bytes_per_token // 2}  # one layer, beside two
        assert model.policy_applied_layers == model.layer_count == 3


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Engine.open(tmp_path, cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    directory = write_model(tmp_path / "model", LLAMA)
    (directory / "config.json").write_text('{"model_type": "never heard of"}')
    with pytest.raises(FailedPrecondition) as refused:
        Engine.open(directory, cache_dir=tmp_path, memory_budget_bytes=BUDGET)
    assert refused.value.reason == "MODEL_NOT_LOADABLE"


def test_kv_of_other_weights_of_the_same_shapes_is_refused(driver: Driver, tmp_path: Path) -> None:
    key, state = driver.remember(300)
    restored = driver.restored(key)
    directory = write_model(tmp_path / "model", {**LLAMA, "eos_token_id": 0}, seed=1)
    with opened(directory, tmp_path) as other:
        assert other.engine.model.kv_identity_hash != driver.engine.model.kv_identity_hash
        difference = differing_field(other.engine.model.kv_identity, driver.engine.model.kv_identity)
        assert difference is not None
        assert difference.startswith("weights_digest")
        with pytest.raises(DataLoss, match="kv_identity_hash: expected"):
            other.turn((*state.token_ids, 9), restored, other.key())


def test_one_engines_memory_goes_on_in_another(driver: Driver, model_dir: Path, tmp_path: Path) -> None:
    key, state = driver.remember(600)
    prompt = (*state.token_ids, *tokens_of(20))
    restored = driver.restored(key)
    stayed = driver.turn(prompt, Hot(600), key)
    with opened(model_dir, tmp_path) as other:
        assert other.turn(prompt, restored, other.key()).state == stayed.state


def test_the_weights_digest_covers_every_weight_and_how_they_compute(model_dir: Path, tmp_path: Path) -> None:
    base = weights_digest(model_dir, tmp_path)
    same = write_model(tmp_path / "same", {**LLAMA, "eos_token_id": 2, "transformers_version": "9"})
    assert weights_digest(same, tmp_path) == base, "neither name nor end token changes KV"
    other_rope = write_model(tmp_path / "rope", {**LLAMA, "rope_theta": 20000.0})
    assert weights_digest(other_rope, tmp_path) != base
    weights = same / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights_digest(same, tmp_path) != base


def test_the_weights_digest_is_remembered_by_the_files_identity(model_dir: Path, tmp_path: Path) -> None:
    first = weights_digest(model_dir, tmp_path / "cache")
    cache = next((tmp_path / "cache").iterdir())
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), "0" * 64)))
    assert weights_digest(model_dir, tmp_path / "cache") != first, "the remembered digest was not used"
    for damaged in ("broken", json.dumps(dict.fromkeys(json.loads(cache.read_text()), "0" * 63 + "p"))):
        cache.write_text(damaged)
        assert weights_digest(model_dir, tmp_path / "cache") == first


def test_a_context_may_be_cut_but_not_stretched(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model_dir, tmp_path, context_tokens=100) as driver:
        assert driver.engine.model.context_tokens == 100
    assert "context.shorter" not in caplog.text
    with opened(model_dir, tmp_path, context_tokens=1 << 20) as driver:
        assert driver.engine.model.context_tokens == 4096
    assert "context.shorter context_tokens=1048576 model=4096" in caplog.text


@pytest.mark.long(3)
def test_a_model_computing_in_sixteen_bits_keeps_scales_of_its_own_type(model_dir: Path, tmp_path: Path) -> None:
    with opened(model_dir, tmp_path, compute_type="bfloat16") as driver:
        assert driver.engine.model.compute_type == "bfloat16"
        assert driver.engine.model.kv_identity.policy.scale_type == identity_pb2.SCALE_TYPE_BFLOAT16
        key, _ = driver.remember(260)
        goes_on_equally(driver, key, 260, tokens_of(3))
