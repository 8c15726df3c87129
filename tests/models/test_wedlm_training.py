"""kvasir-tiny-wedlm's trainer on a CPU: windows, the second stream beside WeDLM's reference, a run that goes on."""

import itertools
import json
import lzma
import os
import re
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
from tools.kvasir_tiny.wedlm import exam, row_files, train  # noqa: E402
from tools.kvasir_tiny.wedlm import network as wedlm  # noqa: E402
from tools.kvasir_tiny.wedlm.evaluate import WindowReader  # noqa: E402
from tools.kvasir_tiny.wedlm.network import MASK, WedlmShape, Windows  # noqa: E402
from tools.kvasir_tiny.wedlm.windows import BEHIND, Maker, Plan, replies_from  # noqa: E402

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
    ids = np.array([[7, 8, 9, END, 5, 6], [7, 8, 9, 8, 9, 8]], np.uint16)
    learned = np.array([[False, True, False, True, False, False], [True] * 6])
    tokens, weights = replies_from(np.array([[1], [3]], np.int32), 5, ids, learned, END)
    assert tokens.tolist() == [[[8, 9, END, END, END]], [[8, 9, 8, END, END]]]
    assert weights.tolist() == [[[1, 0, 1, np.float32(BEHIND), np.float32(BEHIND)]], [[1, 1, 1, 0, 0]]]


def test_windows_stand_in_replies_with_observed_tokens_first_and_their_own_positions() -> None:
    ids, learned, (asked, targets, weights) = Maker(Plan(16, 32))(Batch(5 * 10**6, 4, 256), path())
    kinds = set()
    known, known_weights = replies_from(asked.starts, 17, ids, learned, END)
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
        tokens, plain_weights = known[row, number], known_weights[row, number]
        ends = order[~masked & (tokens[order - start] == END)]
        assert not (order[~masked] > ends.min(initial=start + 17)).any()  # nothing is kept behind a kept end
        assert (targets[row, number] == tokens[order - start]).all()
        assert (asked.ids[row, number][~masked] == targets[row, number][~masked]).all()
        assert (
            weights[row, number] == (plain_weights[order - start] * masked / masked.mean()).astype(np.float32)
        ).all()
        kinds.add(bool(masked.all()))
    assert kinds == {True, False}


def test_a_row_without_replies_teaches_nothing() -> None:
    ids, learned = np.full((2, 65), 7, np.uint16), np.zeros((2, 65), np.bool_)
    learned[1, 5:9] = True
    _, _, weights = Maker(Plan(16, 32)).with_windows((ids, learned), path(), 1).reordered
    assert not weights[0].any()
    assert (weights[1].max(-1) > 0).all()


@pytest.mark.long(3)
def test_short_rows_have_long_replies_and_each_step_has_its_own_rows() -> None:
    steps = list(itertools.islice(train.batches(train.Plan()), 3))
    assert [[batch.kind for batch in group] for group in steps] == 3 * [["conversation"] * 2 + ["review", "short"]]
    seeds = [range(each.first_seed, each.first_seed + each.count) for group in steps for each in group]
    assert len({seed for each in seeds for seed in each}) == sum(map(len, seeds))
    shares = {}
    for batch in (steps[0][1], steps[0][-1], replace(steps[0][-1], kind="recital")):
        _, learned = rows.make(replace(batch, count=40), path())
        replies = [len(reply) for row in learned for reply in np.split(row, _edges(row)) if reply[0]]
        shares[batch.kind] = sum(length for length in replies if length > 50) / sum(replies)
    assert shares["recital"] > 0.4
    assert 0.15 < shares["short"] < 0.35
    assert shares["conversation"] < 0.2


def test_a_review_has_more_questions_about_unknown_facts() -> None:
    found = {}
    for kind in ("conversation", "review"):
        ids, learned = rows.make(Batch(8 * 10**8, 40, 1024, kind=kind), path())
        said = b"".join(row[mask].tobytes() for row, mask in zip(ids, learned, strict=True))
        text = rows.encoder_of(path()).decode(np.frombuffer(said, np.uint16).tolist())
        found[kind] = len(re.findall("I was not told", text)) / learned.sum()
    assert found["review"] > 1.1 * found["conversation"]


def test_rows_that_were_made_ahead_are_the_rows_of_their_steps_with_new_windows_each_time(tmp_path: Path) -> None:
    plan = train.Plan(steps=3, mixed=((1, 128),), own=(("short", 2, 96),), windows=Plan(16, 32))
    made = [[rows.make(batch, path()) for batch in group] for group in train.batches(plan)]
    row_files.write(made[:2], tmp_path)
    row_files.write(made[2:], tmp_path / "last")
    (tmp_path / "1.rows.xz").write_bytes(lzma.compress((tmp_path / "last/0000.rows").read_bytes()))
    source = train.from_files(plan, path(), tmp_path)
    found = list(itertools.islice(source(0), 5))
    for group, wanted in zip(found, made + made, strict=False):
        for each, (ids, learned) in zip(group, wanted, strict=True):
            np.testing.assert_array_equal(each.ids, ids)
            np.testing.assert_array_equal(each.learned, learned)
    assert (found[0][1].reordered.windows.starts != found[3][1].reordered.windows.starts).any()
    for name, array in found[4][0].reordered.windows._asdict().items():
        np.testing.assert_array_equal(next(source(4))[0].reordered.windows._asdict()[name], array, name)
    with pytest.raises(SystemExit, match="--make-rows"):
        row_files.RowFiles(tmp_path / "none")


def _edges(row: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(row.astype(np.int8))) + 1


@pytest.mark.long(8)
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


@pytest.mark.long(12)
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
    if window.left_to_right:
        prompts = [suffix, suffix[:-2]]
        by_jax = exam.decode(*network.load(tmp_path, WedlmShape), window, prompts)[0].ids[len(suffix) :]
        assert by_jax[: len(reply)] == reply
    assert reader.passes.processed >= (4 if window.left_to_right else 8) * reader.passes.count


@pytest.mark.long(24)
def test_a_run_lowers_both_losses_and_one_that_was_interrupted_ends_with_the_same_bits(
    tiny: Path, tmp_path: Path
) -> None:
    sizes_of_small = {name: size for name, size in asdict(SMALL).items() if name != "vocab_size"}
    shape = WedlmShape(**sizes_of_small)
    plan = train.Plan(
        steps=4,
        warm_up=1,
        mixed=((2, 128),),
        own=(("short", 2, 128),),
        learning_rate=2e-3,
        masked_weight=1.0,
        averaged=0.5,
        windows=Plan(16, 32),
        shape=shape,
    )
    sizes = plain_train.Sizes(classic=1, everyday=1, names=((300, 1024),), names_each=4, at_once=1)
    made = train.made_now(plan, tiny, 0)
    whole = train.run(plan, tmp_path / "whole", made, tiny, sizes=None)
    train.run(plan, tmp_path / "parts", made, tiny, sizes=sizes, until=2)
    again = train.run(plan, tmp_path / "parts", made, tiny, sizes=sizes)
    assert whole.log[-1]["loss"] < whole.log[0]["loss"] - 0.3
    assert whole.log[-1]["masks"] < whole.log[0]["masks"] - 0.3
    assert again.step == whole.step == 4
    assert again.tokens == whole.tokens
    for name, array in whole.state.weights.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(again.state.weights[name]), name)
        np.testing.assert_array_equal(
            np.asarray(whole.state.average[name]), np.asarray(again.state.average[name]), name
        )
    kept = {name: network.load(tmp_path / "whole" / name, WedlmShape)[0] for name in (".", "at-50", "at-75", "average")}
    begun = network.load(tiny, network.Shape)[0]["gate"]
    far = {name: float(jnp.abs(weights["gate"] - begun).sum()) for name, weights in kept.items()}
    assert 0 < far["at-50"] < far["at-75"] < far["average"] < far["."]
    assert {"everyday", "q4 everyday"} <= set(again.log[-1]["exact"])
    assert MaskWindow.of_config(_config(tmp_path / "parts")) == MaskWindow(
        MASK, 16, draws_next=True, left_to_right=True
    )


def test_the_exam_has_long_summaries_and_takes_a_file_of_weights(tmp_path: Path) -> None:
    asked = list(exam.summaries(3))
    encoder = rows.encoder_of(path())
    for each in asked:
        ids, learned = encoder.conversation(exam.talk_of(each))
        assert encoder.decode(np.array(ids)[learned].tolist()) == each.answer
        assert 64 <= encoder.count(each.answer) <= 130
    weights = tmp_path / "other.safetensors"
    weights.write_bytes(b"weights")
    folder = exam.folder_of(weights, tmp_path / "model")
    assert MaskWindow.of_config(_config(folder))
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert exam.folder_of(folder, tmp_path / "unused") == folder


def _config(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found
