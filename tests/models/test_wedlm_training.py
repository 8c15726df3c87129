"""kvasir-tiny-wedlm's trainer on a CPU: windows, the second stream beside WeDLM's reference, a run that goes on."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from inference_svc.model.blas import load_optimized_blas

load_optimized_blas()  # before MLX
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import mlx.core as mx  # noqa: E402
import pytest  # noqa: E402

from inference_svc.kv.policy import Rung, policy_of  # noqa: E402
from inference_svc.model.kvasir_tiny import path  # noqa: E402
from inference_svc.model.wedlm import MaskWindow  # noqa: E402
from tests.inference.engine.wedlm.reference import Reference  # noqa: E402
from tests.inference.engine.wedlm.tiny_wedlm import plain_model  # noqa: E402
from tools.kvasir_tiny import network, rows  # noqa: E402
from tools.kvasir_tiny import train as plain_train  # noqa: E402
from tools.kvasir_tiny.rows import Batch  # noqa: E402
from tools.kvasir_tiny.wedlm import network as wedlm  # noqa: E402
from tools.kvasir_tiny.wedlm import train  # noqa: E402
from tools.kvasir_tiny.wedlm.evaluate import WindowReader  # noqa: E402
from tools.kvasir_tiny.wedlm.network import MASK, WedlmShape, Windows  # noqa: E402
from tools.kvasir_tiny.wedlm.windows import BEHIND, Maker, Plan, reply_from  # noqa: E402

END = 2
SMALL = network.Shape(
    hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1
)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What two runs compile alike is compiled once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of kvasir-tiny's kind, far smaller, to start from."""
    folder = tmp_path_factory.mktemp("tiny")
    network.save(network.initial(SMALL, 1), SMALL, folder)
    plain_train.prepare(folder)
    return folder


def test_a_reply_ends_with_end_tokens_and_forced_tokens_weigh_nothing() -> None:
    ids = np.array([7, 8, 9, END, 5, 6], np.uint16)
    learned = np.array([False, True, False, True, False, False])
    tokens, weights = reply_from(1, 5, ids, learned, END)
    assert tokens.tolist() == [8, 9, END, END, END]
    assert weights.tolist() == [1, 0, 1, np.float32(BEHIND), np.float32(BEHIND)]


def test_windows_stand_in_replies_with_observed_tokens_first_and_their_own_positions() -> None:
    ids, learned, (asked, targets, weights) = Maker(Plan(16, 32))(Batch(5 * 10**6, 4, 256), path())
    kinds = set()
    for row, number in np.ndindex(asked.starts.shape):
        start, order = asked.starts[row, number], asked.positions[row, number]
        masked = asked.ids[row, number] == MASK
        assert learned[row, start - 1 : start + 1].all()  # the prompt gives a reply's first token
        first = 1 if masked.all() else 0  # the last committed token gives the next one where nothing is kept
        assert sorted(order) == list(range(start + first, start + first + 16))
        assert masked[order == start].all()
        assert not np.diff(masked.astype(int)).min() < 0  # observed tokens first
        assert (np.diff(order[masked]) > 0).all()
        assert (np.diff(order[~masked]) > 0).all()
        tokens, plain_weights = reply_from(start, 17, ids[row], learned[row], END)
        ends = order[~masked & (tokens[order - start] == END)]
        assert not (order[~masked] > ends.min(initial=start + 17)).any()  # nothing is kept behind a kept end
        assert (targets[row, number] == tokens[order - start]).all()
        assert (asked.ids[row, number][~masked] == targets[row, number][~masked]).all()
        assert (
            weights[row, number] == (plain_weights[order - start] * masked / masked.mean()).astype(np.float32)
        ).all()
        kinds.add(bool(masked.all()))
    assert kinds == {True, False}


def test_half_of_the_tokens_of_recitals_are_of_long_replies_and_each_step_has_its_own_rows() -> None:
    steps = list(itertools.islice(train.batches(train.Plan()), 3))
    assert [len(group) for group in steps] == [4, 4, 4]
    seeds = [range(each.first_seed, each.first_seed + each.count) for group in steps for each in group]
    assert len({seed for each in seeds for seed in each}) == sum(map(len, seeds))
    shares = []
    for batch in (steps[0][-1], steps[0][-2]):
        assert batch.recites == (not shares)
        _, learned = rows.make(replace(batch, count=32), path())
        replies = [len(reply) for row in learned for reply in np.split(row, _edges(row)) if reply[0]]
        shares.append(sum(length for length in replies if length > 50) / sum(replies))
    assert shares[0] > 0.45
    assert shares[1] < 0.2


def _edges(row: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(row.astype(np.int8))) + 1


@pytest.mark.long(4)
def test_the_reordered_stream_is_the_reference_s_window(tiny: Path, tmp_path: Path) -> None:
    """Both streams beside the model as mlx-lm computes it, decoded window by window."""
    weights, shape = network.load(tiny, network.Shape)
    ids = np.random.default_rng(0).integers(3, shape.vocab_size, (1, 40))
    weights, wide = wedlm.started_from(weights, shape, jnp.asarray(ids), 3)
    weights = {name: jnp.asarray(jnp.asarray(array, jnp.bfloat16), jnp.float32) for name, array in weights.items()}
    network.save(weights, wide, tmp_path)
    asked = Windows(
        np.array([[[11, 12, MASK, MASK], [13, MASK, MASK, MASK], [MASK] * 4]]),
        np.array([[[21, 23, 20, 22], [38, 36, 37, 39], [31, 32, 33, 34]]]),
        np.array([[20, 36, 30]]),
    )  # of the last one, the row of the last committed token gives the place that no mask has
    clean, masked = wedlm.logits(weights, ids, asked, wide)
    model = plain_model(tmp_path)
    model.set_dtype(mx.float32)
    for number, start in enumerate(asked.starts[0].tolist()):
        reference = Reference(model, MaskWindow(MASK), policy_of(Rung.FP, "float32"))
        reference.extend(ids[0, :start].tolist())
        window = asked.ids[0, number].tolist(), asked.positions[0, number].tolist()
        theirs = np.array(reference.decode_window_reordered(*window))
        assert np.abs(np.asarray(masked[0, number]) - theirs).max() < 1e-3 * np.abs(theirs).max()
        assert reference.following is not None
        following = np.array(reference.following)[0]
        assert np.abs(np.asarray(clean[0, start - 1]) - following).max() < 1e-3 * np.abs(following).max()


@pytest.mark.long(6)
@pytest.mark.parametrize("rules", [(False, False), (True, False), (True, True)])
def test_the_evaluation_decodes_the_reference_s_tokens(tiny: Path, tmp_path: Path, rules: tuple[bool, bool]) -> None:
    """Random weights with loud logits, so that entropies lie on both sides of the threshold, and with long queries and
    keys, so that positions matter."""
    weights, shape = network.load(tiny, network.Shape)
    weights, wide = wedlm.started_from(weights, shape, jnp.arange(3, 67)[None], 3)
    weights["norm"] = 30 * weights["norm"]
    weights |= {name: jnp.full_like(weights[name], 2.0) for name in ("q_norm", "k_norm")}
    network.save(weights, wide, tmp_path)
    plain_train.prepare(tmp_path)
    window = MaskWindow(MASK, 8, 3.0, 0.05, *rules)
    reader = WindowReader(tmp_path, window=window)
    reader.read([])
    suffix = reader._suffix([{"role": "user", "content": "Where is the key?"}])
    reply = reader._by_windows(window, reader._forward(suffix))
    model = plain_model(tmp_path)
    model.set_dtype(mx.float32)
    reference = Reference(model, window, policy_of(Rung.FP, "float32"), END)
    assert reference.generate(suffix, len(reply) + 8)[: len(reply)] == reply
    assert 8 <= len(reply) <= 72
    assert reader.passes.count < len(reply)  # some passes commit several
    assert reader.passes.processed >= (4 if window.left_to_right else 8) * reader.passes.count


@pytest.mark.long(20)
def test_a_run_lowers_both_losses_and_one_that_was_interrupted_ends_with_the_same_bits(
    tiny: Path, tmp_path: Path
) -> None:
    sizes_of_small = {name: size for name, size in asdict(SMALL).items() if name != "vocab_size"}
    shape = WedlmShape(**sizes_of_small)
    plan = train.Plan(
        steps=4, warm_up=1, mixed=((2, 128),), recitals=(2, 128), learning_rate=2e-3, windows=Plan(16, 32), shape=shape
    )
    sizes = plain_train.Sizes(classic=1, everyday=1, names=((300, 1024),), names_each=4, at_once=1)
    whole = train.run(plan, tmp_path / "whole", 0, tiny, sizes=None)
    train.run(plan, tmp_path / "parts", 0, tiny, sizes=sizes, until=2)
    again = train.run(plan, tmp_path / "parts", 0, tiny, sizes=sizes)
    assert whole.log[-1]["loss"] < whole.log[0]["loss"] - 0.3
    assert whole.log[-1]["masks"] < whole.log[0]["masks"] - 0.3
    assert again.step == whole.step == 4
    assert again.tokens == whole.tokens
    for name, array in whole.state.weights.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(again.state.weights[name]), name)
    assert {"everyday", "q4 everyday"} <= set(again.log[-1]["exact"])
    assert MaskWindow.of_config(_config(tmp_path / "parts")) == MaskWindow(
        MASK, 16, draws_next=True, left_to_right=True
    )


def _config(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found
