"""A KV policy that is accepted is applied: seen in live rows and in files, not in what is reported (LESSONS 17)."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.kv.applied import applied_layers
from inference_svc.kv.codec import EncodedRows, QuantizedCodec, RotatedCodec
from inference_svc.kv.policy import LADDER, PolicyRequest, Rung, policy_of
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.driving import Driver, tokens_of
from tests.inference.engine.models.test_kv import on_mlx
from tests.inference.engine.models.test_models import opened
from tests.running.system_fixtures import running_house

PROMPT = tokens_of(300)
LAYERS = 3


def live_parts(driver: Driver, key: AgentKey, layer: int) -> tuple[EncodedRows, EncodedRows]:
    """Rows of K and of V as the engine's memory of an agent holds them."""

    def work(worker: EngineWorker) -> tuple[EncodedRows, EncodedRows]:
        memory = worker.memories.get(key)
        assert memory is not None
        rows, split = memory.kv.rows(layer, 0, len(PROMPT)), memory.kv.pool.codecs[layer][0].part_count
        assert rows is not None
        return rows[:split], rows[split:]

    return on_mlx(driver.engine, work)


def told(driver: Driver) -> AgentKey:
    key = driver.key()
    driver.turn(PROMPT, key=key, max_tokens=1)
    return key


def bits_of(parts: EncodedRows, dim: int = 64) -> int:
    return 16 if len(parts) == 1 else parts[0].shape[-1] * 32 // dim


@pytest.fixture(scope="module")
def exact_keys(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Layer 0's keys of the prompt. They follow from token ids and positions alone, whatever the policy."""
    with opened(model_dir, tmp_path_factory.mktemp("digests"), policy=PolicyRequest.parse("fp")) as driver:
        ((keys,), _) = live_parts(driver, told(driver), 0)
        return on_mlx(driver.engine, lambda _: np.array(keys.astype(mx.float32)))


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.value)
def test_the_option_kv_policy_is_applied_in_the_live_cache(
    rung: Rung, exact_keys: np.ndarray, model_dir: Path, tmp_path: Path
) -> None:
    """(LESSONS 17)"""
    policy = policy_of(rung, "float32")
    with opened(model_dir, tmp_path, policy=PolicyRequest.parse(rung.value)) as driver:
        key = told(driver)
        for layer in range(LAYERS):
            keys, values = live_parts(driver, key, layer)
            assert (bits_of(keys), bits_of(values)) == (policy.key_bits, policy.value_bits)
        keys, _ = live_parts(driver, key, 0)
        if rung is not Rung.FP:
            codes, *others = keys

            def distances(_: EngineWorker) -> list[float]:
                scales, biases = (part.astype(mx.float32) for part in others)
                raw = mx.dequantize(codes, scales, biases, group_size=64, bits=policy.key_bits)
                plain = mx.array(exact_keys)
                return [
                    float((mx.abs(raw - each).mean() / mx.abs(plain).mean()).item())  # type: ignore[arg-type]
                    for each in (plain, mx.hadamard_transform(plain))
                ]

            from_plain, from_rotated = on_mlx(driver.engine, distances)
            near, far = (from_rotated, from_plain) if rung is Rung.Q4_ROTATED else (from_plain, from_rotated)
            assert near < (0.12 if policy.key_bits == 4 else 0.01)
            assert far > 0.5
        model = driver.engine.model
        assert (model.policy_name, model.policy_why) == (rung.value, "asked for")
        assert model.policy_applied_layers == model.layer_count == LAYERS


@pytest.mark.parametrize(("given", "exact"), [("last", {2}), ("0", {0}), ("0,last", {0, 2})])
def test_the_option_kv_exact_layers_is_applied_in_the_live_cache(
    given: str, exact: set[int], model_dir: Path, tmp_path: Path
) -> None:
    """(LESSONS 17)"""
    with opened(model_dir, tmp_path, policy=PolicyRequest.parse("q4-rotated", given)) as driver:
        key = told(driver)
        for layer in range(LAYERS):
            assert {bits_of(parts) for parts in live_parts(driver, key, layer)} == {16 if layer in exact else 4}
        model = driver.engine.model
        assert set(model.kv_identity.policy.exact_layers) == exact
        assert model.policy_applied_layers == LAYERS
        assert model.policy_name.startswith("q4-rotated, layer")


@pytest.mark.long(2)
def test_the_options_reach_the_files_of_an_engine_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    """From the command line of a process to the bytes that its store keeps (LESSONS 17)."""
    options = ("--kv-policy", "q4-rotated", "--kv-exact-layers", "last")
    with running_house(tmp_path, model_dir, engine_options=options) as house:
        with house.client() as client:
            model = client.get_model()
            client.reply(agent_id="a", prompt="Hello there, whoever you are.", sampling={"max_tokens": 4})
        assert model.kv_policy == "q4-rotated, layer 2 exact"
        assert model.kv_policy_why == "asked for"
        assert (model.policy_applied_layers, model.layer_count) == (LAYERS, LAYERS)
        assert model.kv_identity.policy.key_rotation == 2
        files = [path.read_bytes() for path in house.data_dir.glob("namespaces/*/blobs/*/*")]
    tails = [safetensors.numpy.load(data) for data in files if b'"layer_0_k_weights"' in data[:4096]]
    assert tails
    for tensors in tails:
        assert {name for name in tensors if name.startswith("layer_2")} == {"layer_2_k", "layer_2_v"}
        assert tensors["layer_0_k_weights"].shape[-1] == 8


def applied(runner: ModelRunner, identity: identity_pb2.KvIdentity) -> int:
    return applied_layers(runner.layout, identity, runner.new_pool(identity.policy), runner.compute_type)


ENCODES = pytest.mark.cpu_only("on a GPU a kernel encodes; tests/inference/kv/attention/test_in_place.py is about it")


@pytest.mark.parametrize("liar", [pytest.param("encode", marks=ENCODES), "decode", "both"])
def test_a_rotation_that_is_said_and_not_done_is_not_reported_as_applied(
    liar: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes and types are those of rotated keys, and so are the codec's own words (LESSONS 17)."""
    runner = ModelRunner(load(model_dir, "float32").model)
    identity = identity_pb2.KvIdentity(layers=runner.layers, policy=policy_of(Rung.Q4_ROTATED, "float32"))
    assert applied(runner, identity) == LAYERS

    def encode(self: RotatedCodec, rows: mx.array) -> EncodedRows:
        return QuantizedCodec.encode(self.inner, rows)

    def decode(self: RotatedCodec, parts: EncodedRows, dtype: mx.Dtype) -> mx.array:
        return QuantizedCodec.decode(self.inner, parts, dtype)

    for name, lie in (("encode", encode), ("decode", decode)):
        if liar in (name, "both"):
            monkeypatch.setattr(RotatedCodec, name, lie)
    assert applied(runner, identity) == 0


def test_a_policy_that_is_said_and_not_stored_is_not_reported_as_applied(model_dir: Path) -> None:
    """What is applied is read from live rows: an identity that says otherwise finds no layer."""
    runner = ModelRunner(load(model_dir, "float32").model)
    policies = {rung: policy_of(rung, "float32") for rung in LADDER}
    for said in LADDER:
        identity = identity_pb2.KvIdentity(layers=runner.layers, policy=policies[said])
        for stored in LADDER:
            pool = runner.new_pool(policies[stored])
            found = applied_layers(runner.layout, identity, pool, runner.compute_type)
            assert found == (LAYERS if said is stored else 0), (said, stored)
