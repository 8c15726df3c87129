"""Layers that stay exact by number, beside quantized ones: stored so, named so, and exact as every other policy is."""

from collections.abc import Iterator

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import parse_header
from kvasir.formats.block_hash import kv_identity_hash

from inference_svc.engine.api import Hot
from inference_svc.kv.policy import PolicyRequest
from tests.inference.engine.driving import Driver, tokens_of
from tests.inference.engine.families import GEMMA3, write_family
from tests.inference.engine.models.test_models import opened
from tests.inference.engine.models.test_windows import remembered, restored, snapshot

EXACT = "0,3"  # layers 0 and 2 have windows, 1 and 3 keep every token


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    directory = write_family(tmp_path_factory.mktemp("gemma3"), GEMMA3, seed=1)
    with opened(directory, tmp_path_factory.mktemp("cache"), policy=PolicyRequest.parse("q4", EXACT)) as driver:
        yield driver


def test_layers_named_by_number_are_stored_in_sixteen_bits_with_windows_too(windowed: Driver) -> None:
    """(LESSONS 17)"""
    key, _ = remembered(windowed, 300)
    taken = snapshot(windowed, key)
    (window,) = taken.windows
    files = [data for _, data in (*taken.blocks, *window.blocks)]
    assert len(files) == 2
    names = {tensor.name for data in files for tensor in parse_header(data, len(data)).tensors}
    assert {name for name in names if name.endswith("_k")} == {"layer_0_k", "layer_3_k"}
    assert {name for name in names if name.endswith("_k_weights")} == {"layer_1_k_weights", "layer_2_k_weights"}
    assert windowed.engine.model.policy_applied_layers == 4


def test_they_are_part_of_the_identity(windowed: Driver) -> None:
    model = windowed.engine.model
    hashes = {model.kv_identity_hash}
    for layers in ([], [0], [0, 2], [1, 3]):
        other = identity_pb2.KvIdentity()
        other.CopyFrom(model.kv_identity)
        other.policy.exact_layers[:] = layers
        hashes.add(kv_identity_hash(other))
    assert len(hashes) == 5


@pytest.mark.long(2)
@pytest.mark.parametrize("length", [250, 600])
def test_with_exact_layers_a_memory_with_windows_goes_on_as_if_it_had_never_left(length: int, windowed: Driver) -> None:
    key, ended = remembered(windowed, length)
    taken, end = snapshot(windowed, key), length + 5
    for keep in (end, length):
        prompt = (*ended.state.token_ids[:keep], *tokens_of(20, seed=keep))
        stayed = windowed.turn(prompt, Hot(keep), windowed.fork(key), max_tokens=12)
        came_back = windowed.turn(prompt, restored(taken, keep), windowed.key(), max_tokens=12)
        assert stayed.cached_tokens == came_back.cached_tokens == keep
        assert came_back.state == stayed.state


@pytest.mark.long(3)
@pytest.mark.batch_as_alone
def test_with_exact_layers_turns_in_a_batch_are_as_alone(windowed: Driver) -> None:
    prompts = [tokens_of(length, seed) for seed, length in enumerate((40, 255, 257, 330))]
    alone = [windowed.turn(prompt, key=windowed.key(), max_tokens=20).state for prompt in prompts]
    together = [windowed.submit(prompt, key=windowed.key(), max_tokens=20) for prompt in prompts]
    assert [listener.end().state for listener in together] == alone
