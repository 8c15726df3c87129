"""Rows of KV: what is written is what is read, what is cut is never seen, and nothing is written through."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_file import FileIdentity
from kvasir.formats.block_hash import chain_hashes, kv_identity_hash
from kvasir.formats.token_files import file_identities

from inference_svc.engine.api import Hot
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.engine.mlx_thread import MlxThread
from inference_svc.kv.layer_kv import LayerKV
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import check_files
from tests.inference.engine.driving import Driver, tokens_of
from tests.inference.kv.sequences import empty_rows, four_bits

ResultT = TypeVar("ResultT")


def on_mlx(engine: Engine, work: Callable[[EngineWorker], ResultT]) -> ResultT:
    return engine._thread.post(work).result(60)


def rows(count: int, seed: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.key(seed)
    return mx.random.normal((1, 2, count, 64), key=keys), mx.random.normal((1, 2, count, 64), key=keys + 1)


def sequence(counts: list[int], seed: int = 0, policy: identity_pb2.KvPolicy | None = None) -> SequenceKV:
    """Two layers, fed in pieces."""
    kv = empty_rows(policy or four_bits(), 2)
    for piece, count in enumerate(counts):
        for index, layer in enumerate(kv.layers):
            layer.update_and_fetch(*rows(count, 1000 * seed + 10 * piece + index))
        mx.eval(kv.state)
    return kv


def values(kv: SequenceKV) -> list[np.ndarray]:
    """What attention would see; of an empty sequence, nothing."""
    if kv.length == 0:
        return [np.zeros((1, 2, 0, 64), np.float32) for layer in kv.layers for _ in layer.buffers]
    return [np.array(b.decoded(layer.offset, mx.float32)) for layer in kv.layers for b in layer.buffers]


def same(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return len(one) == len(two) and all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def poison(kv: SequenceKV) -> None:
    """Make every row that is not valid not-a-number, as a freed row may well be."""
    for layer in kv.layers:
        for buffer in layer.buffers:
            poisoned = []
            for part in buffer.parts:
                wrong = mx.array(math.nan if part.dtype != mx.uint32 else 0xFFFFFFFF).astype(part.dtype)
                is_valid = (mx.arange(part.shape[2]) < layer.offset)[None, None, :, None]
                poisoned.append(mx.where(is_valid, part, wrong))
            buffer.parts = tuple(poisoned)
    mx.eval(kv.state)


def test_attention_sees_the_stored_rows_and_nothing_else(engine: Engine) -> None:
    def work(_: EngineWorker) -> None:
        kv = empty_rows(four_bits(), 1)
        seen: list[np.ndarray] = []
        for piece, count in enumerate((5, 300, 1, 700)):
            given = rows(count, piece)
            keys, _values = kv.layers[0].update_and_fetch(*given)
            seen.append(np.array(keys))
            assert keys.shape[2] == kv.length
            assert float(mx.abs(keys[:, :, -count:] - given[0]).max()) < 0.4, "four bits of a normal value"
        for earlier, later in pairwise(seen):
            assert np.array_equal(later[:, :, : earlier.shape[2]], earlier), "a row never changes"

    on_mlx(engine, work)


def test_cutting_feeding_and_growing_leave_what_was_kept(engine: Engine) -> None:
    def work(_: EngineWorker) -> None:
        for keep in (0, 1, 255, 256, 257, 511, 512, 520):
            kv = sequence([520])
            before = values(kv)
            kv.trim_to(keep)
            assert same(values(kv), [value[:, :, :keep] for value in before])
            poison(kv)
            for index, layer in enumerate(kv.layers):
                layer.update_and_fetch(*rows(600, 50 + index))
            after = values(kv)
            assert same([value[:, :, :keep] for value in after], [value[:, :, :keep] for value in before])
            assert all(np.isfinite(value).all() for value in after), "a freed row was seen"
            fresh = sequence([520])
            fresh.trim_to(keep)
            for index, layer in enumerate(fresh.layers):
                layer.update_and_fetch(*rows(600, 50 + index))
            assert same(values(fresh), after)

    on_mlx(engine, work)


def test_saved_rows_put_a_sequence_back_to_the_bit(engine: Engine) -> None:
    def work(_: EngineWorker) -> None:
        for keep in (0, 100, 256, 519):
            kv = sequence([520])
            before = values(kv)
            saved = kv.saved_rows(keep)
            kv.trim_to(keep)
            for index, layer in enumerate(kv.layers):
                layer.update_and_fetch(*rows(900, 70 + index))
            mx.eval(kv.state)
            kv.put_back(saved)
            poison(kv)
            assert kv.length == 520
            assert same(values(kv), before)

    on_mlx(engine, work)


def test_a_fork_shares_memory_until_somebody_writes(engine: Engine) -> None:
    def work(_: EngineWorker) -> None:
        kv = sequence([300])
        before = values(kv)
        forks = [kv.fork(), kv.fork()]
        for number, one in enumerate((kv, *forks)):
            one.trim_to(200 + number)
            for layer in one.layers:
                layer.update_and_fetch(*rows(40, 90 + number))
            mx.eval(one.state)
        for number, one in enumerate((kv, *forks)):
            kept = 200 + number
            assert same([value[:, :, :kept] for value in values(one)], [value[:, :, :kept] for value in before])
            expected = np.array(
                one.layers[0].keys.codec.decode(one.layers[0].keys.codec.encode(rows(40, 90 + number)[0]), mx.float32)
            )
            assert np.array_equal(values(one)[0][:, :, kept:], expected)

    on_mlx(engine, work)


def test_bytes_taken_off_do_not_change_when_the_sequence_goes_on(engine: Engine) -> None:
    def work(_: EngineWorker) -> None:
        kv = sequence([300])
        taken = [data for layer in kv.layers for buffer in layer.buffers for data in buffer.to_bytes(256, 300)]
        copies = [bytes(bytearray(data)) for data in taken]
        kv.trim_to(256)
        for layer in kv.layers:
            layer.update_and_fetch(*rows(40, 5))
        mx.eval(kv.state)
        assert taken == copies

    on_mlx(engine, work)


@pytest.mark.parametrize("scale_type", [identity_pb2.SCALE_TYPE_FLOAT16, identity_pb2.SCALE_TYPE_BFLOAT16])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_files_and_live_rows_are_the_same_bytes(engine: Engine, scale_type: identity_pb2.ScaleType, bits: int) -> None:
    def work(_: EngineWorker) -> None:
        policy = four_bits()
        policy.key_bits, policy.scale_type = bits, scale_type
        layout = identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=2, key_dim=64, value_dim=64)
        identity = identity_pb2.KvIdentity(weights_digest="0" * 64, layers=[layout] * 2, policy=policy)
        name, tokens = kv_identity_hash(identity), tokens_of(600)
        kv = sequence([500, 100], policy=policy)
        chain = chain_hashes(name, tokens)
        files = [kv.to_file(identity, file) for file in file_identities(name, tokens, chain)]
        for keep in (600, 512, 511, 3):
            back = SequenceKV.from_files(identity, check_files(identity, name, files, tokens), keep)
            poison(back)
            assert same(values(back), [value[:, :, :keep] for value in values(kv)])
        whole = SequenceKV.from_files(identity, check_files(identity, name, files, tokens), 600)
        assert [whole.to_file(identity, file) for file in file_identities(name, tokens, chain)] == files

    on_mlx(engine, work)


def test_a_file_read_by_any_safetensors_library_holds_each_layers_keys_and_values(engine: Engine) -> None:
    def work(_: EngineWorker) -> None:
        kv = sequence([300])
        layout = identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=2, key_dim=64, value_dim=64)
        identity = identity_pb2.KvIdentity(weights_digest="0" * 64, layers=[layout] * 2, policy=four_bits())
        tensors = safetensors.numpy.load(kv.to_file(identity, FileIdentity("tail", "0" * 64, 256, 44, "0" * 64)))
        for index in range(2):
            for letter, given in zip("kv", rows(300, index), strict=True):
                parts = [tensors[f"layer_{index}_{letter}_{part}"] for part in ("weights", "scales", "biases")]
                expected = mx.quantize(given[0, :, 256:], group_size=64, bits=4)
                for found, made in zip(parts, expected, strict=True):
                    assert np.array_equal(found, np.array(made).astype(found.dtype))

    on_mlx(engine, work)


def test_freed_rows_full_of_poison_change_no_reply(driver: Driver) -> None:
    """LESSONS 1: a trim that leaves old rows where attention reads them."""
    key, state = driver.remember(700)
    clean = driver.fork(key)
    prompt = (*state.token_ids[:300], *tokens_of(30))

    def poison_memory(worker: EngineWorker) -> None:
        memory = worker.memories.get(key)
        assert memory is not None
        memory.kv.trim_to(300)
        poison(memory.kv)

    expected = driver.turn(prompt, driver.restored(clean, 300), driver.key())
    on_mlx(driver.engine, poison_memory)
    assert driver.turn(prompt, Hot(300), key).state == expected.state


def test_a_layer_that_keeps_all_tokens_refuses_to_be_a_window(engine: Engine) -> None:
    codec = empty_rows(four_bits(), 1).layers[0].keys.codec
    with pytest.raises(ValueError, match="window"):
        LayerKV(codec, codec).make_mask(5, window_size=3)


def test_a_thread_that_ended_cancels_what_comes_late() -> None:
    class Idle:
        def step(self, take_mail: object) -> bool:
            return False

        def close(self) -> None:
            return None

    thread = MlxThread(Idle)
    assert thread.post(lambda _worker: 7).result(10) == 7
    with pytest.raises(ZeroDivisionError):
        thread.post(lambda _worker: 1 / 0).result(10)
    thread.close()
    late: Future[int] = thread.post(lambda _worker: 7)
    assert late.cancelled()


def test_a_worker_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    def fail() -> EngineWorker:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        MlxThread(fail)
