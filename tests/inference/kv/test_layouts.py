"""Every layout of the floor, as models use it: against mlx-lm's own caches, alone and in a batch."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition
from mlx.nn.layers.linear import Linear
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.layout import Layout, shown_layout
from inference_svc.kv.model_hooks import attention_hook, step_attention
from inference_svc.kv.model_hooks.few_rows import take_few_rows
from inference_svc.kv.model_hooks.joined_steps import join_steps
from inference_svc.kv.model_hooks.row_exact import make_row_exact
from inference_svc.kv.model_hooks.step_attention import StepAttention
from inference_svc.kv.model_hooks.whole_layers import WholeLayer
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.prefill_layer import commit, prefill_layers
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from inference_svc.model.probing import layout_trial
from inference_svc.model.probing.layout_trial import layer_kinds, tried_count, tried_layout
from tests.inference.engine.families import (
    DEEPSEEK_V3,
    FALCON_H1,
    FAMILIES,
    GEMMA3,
    GPT_OSS,
    JAMBA,
    write_family,
)
from tests.inference.kv import test_backends
from tests.inference.kv.greedy import ROOMY, tokens_of
from tests.inference.kv.mlx_lm_batch import judged_layers
from tests.inference.kv.sequences import identity_of, pool_of, stored, unrounded_pool
from tests.made_models.sampling import first_and_in_turn

ALL = {**FAMILIES, "deepseek_v3": DEEPSEEK_V3, "falcon_h1": FALCON_H1, "jamba": JAMBA}
KINDS = {
    "gemma3": "window full window full",
    "gpt_oss": "window full window full",
    "llama3.1": "full full full",
    "qwen2.5": "full full full",
    "qwen3": "full full full",
    "deepseek_v2": "full full full",
    "deepseek_v3": "latent latent latent",
    "granite_hybrid": "state full state",
    "jamba": "state full state",
    "falcon_h1": "state full state full state full",
}

PARTS = ((0, 70), (70, 71), (71, 256), (256, 299), (299, 300))  # of a prompt: cells and tokens


def found_layout(model: Any) -> Layout:
    return tried_layout(model, shown_layout(model), None)


class Family:
    """A tiny model of a family, and its layout."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.model: Any = load(write_family(directory, config, seed=1), "float32").model
        make_row_exact(self.model)
        self.layout: Layout = found_layout(self.model)

    def pool(self) -> KvPool:
        return pool_of(self.layout.entries)

    def computed(self, kv: SequenceKV, tokens: list[int]) -> np.ndarray:
        """Logits after these tokens, which are stored."""
        layers = prefill_layers(kv)
        logits = self.layout.forward(self.model, mx.array([tokens]), layers)[:, -1]
        commit(kv, layers, len(tokens))
        return np.array(logits)

    def part_by_part(self, kv: SequenceKV, tokens: list[int]) -> list[np.ndarray]:
        """Logits after each part of the tokens."""
        return [self.computed(kv, tokens[start:stop]) for start, stop in PARTS]

    def part_by_part_in_mlx_lm(self, tokens: list[int]) -> list[np.ndarray]:
        """The same over mlx-lm's own caches."""
        caches = make_prompt_cache(self.model)
        return [np.array(self.model(mx.array([tokens[start:stop]]), cache=caches)[:, -1]) for start, stop in PARTS]

    def prefilled(self, pool: KvPool, tokens: list[int]) -> tuple[SequenceKV, int]:
        """A sequence, and the token that the model would say next."""
        kv = SequenceKV(pool)
        for start in range(0, len(tokens), 256):
            logits = self.computed(kv, tokens[start : start + 256])
        return kv, int(logits[0].argmax())

    def batch(self, pool: KvPool) -> DecodeBatch:
        return DecodeBatch(pool, lambda tokens, layers: self.layout.forward(self.model, tokens, layers), ROOMY)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Family]]:
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            made[name] = Family(tmp_path_factory.mktemp(name), ALL[name])
        return made[name]

    yield get
    made.clear()
    gc.collect()


@pytest.mark.long(4)
@pytest.mark.parametrize("name", ALL)
def test_the_layout_of_a_family_is_found_by_looking(name: str, family: Callable[[str], Family]) -> None:
    entries = family(name).layout.entries
    words = [identity_pb2.LayerKind.Name(entry.kind).removeprefix("LAYER_KIND_").lower() for entry in entries]
    assert " ".join(words) == KINDS[name]
    assert {entry.window for entry in entries} <= {0, ALL[name].get("sliding_window", 0)}


@pytest.mark.long(3)
@pytest.mark.parametrize("name", ALL)
def test_without_rounding_a_family_computes_what_it_does_with_mlx_lms_own_caches(
    name: str, family: Callable[[str], Family]
) -> None:
    """Prompts in cells and tokens, past the window; sinks, latent rows and states are whatever its model makes them."""
    tiny, tokens = family(name), tokens_of(300, seed=2)
    found = tiny.part_by_part(SequenceKV(unrounded_pool(tiny.layout.entries)), tokens)
    expected = tiny.part_by_part_in_mlx_lm(tokens)
    parts = zip(PARTS, found, expected, strict=True)
    assert not [part for part, ours, theirs in parts if np.abs(ours - theirs).max() >= 1e-3 * np.abs(theirs).max()]


@pytest.mark.long(6)
@pytest.mark.parametrize("name", ALL)
def test_sequences_of_every_layout_decode_in_a_batch_as_each_does_alone(
    name: str, family: Callable[[str], Family]
) -> None:
    """Q4 rows, lengths around the window and a block, joining and leaving at different moments (LESSONS 2). Forks that
    share all pages stay as they were.
    """
    tiny = family(name)
    prompts = [tokens_of(length, seed=length) for length in (3, 95, 96, 130, 257)]
    expected = []
    for prompt in prompts:
        kv, token = tiny.prefilled(tiny.pool(), prompt)
        single, said = tiny.batch(kv.pool), [token]
        single.join(kv)
        for _ in range(12):
            said.append(int(np.array(single.step([said[-1]]))[0].argmax()))
        expected.append(said)
    pool = tiny.pool()
    started = [tiny.prefilled(pool, prompt) for prompt in prompts]
    kept = [kv.fork() for kv, _ in started]
    before = [stored(kv) for kv in kept]
    batch, numbers, said_together = tiny.batch(pool), {id(kv): number for number, (kv, _) in enumerate(started)}, {}
    for step in range(16):
        if step < len(prompts):
            batch.join(started[step][0])
            said_together[step] = [started[step][1]]
        slots = [numbers[id(kv)] for kv in batch.sequences]
        logits = np.array(batch.step([said_together[number][-1] for number in slots]))
        for slot, number in enumerate(slots):
            said_together[number].append(int(logits[slot].argmax()))
        for number in [number for number in slots if len(said_together[number]) == 13]:
            batch.leave(started[number][0])
    assert [said_together[number] for number in range(len(prompts))] == expected
    assert len({tuple(said) for said in expected}) == len(expected), "the models say something"
    assert [stored(kv) for kv in kept] == before


@pytest.mark.parametrize("config", [GEMMA3, GPT_OSS], ids=["gemma3", "gpt_oss"])
def test_another_window_gives_another_reply(config: dict[str, Any], tmp_path: Path) -> None:
    """The tiny models do look back: what the tests above compare depends on the window."""
    tokens, replies = tokens_of(200, seed=1), []
    for window in (96, 48):
        tiny = Family(tmp_path / str(window), {**config, "sliding_window": window})
        replies.append(tiny.computed(SequenceKV(tiny.pool()), tokens))
    assert not np.allclose(*replies, atol=1e-3)


# --- what cannot be kept ---


def refused(model: Any, said: str, layer: str) -> None:
    with pytest.raises(FailedPrecondition, match=said) as error:
        found_layout(model)
    assert error.value.reason == "LAYER_NOT_KEPT"
    assert error.value.metadata["layer"] == layer


def test_a_cache_that_is_not_known_is_refused_with_its_layer_and_class(tmp_path: Path) -> None:
    model: Any = load(write_family(tmp_path / "m", FAMILIES["qwen3"]), "float32").model
    model.make_cache = lambda: [KVCache(), ChunkedKVCache(64), KVCache()]
    refused(model, r"layer 1 \(TransformerBlock\) of qwen3 .*ChunkedKVCache", "1")
    model.make_cache = lambda: [KVCache(), KVCache(), RotatingKVCache(max_size=64, keep=4)]
    refused(model, "layer 2 .*keeps the first 4", "2")
    model.make_cache = list
    refused(model, "no memory at all", "0")


def test_a_model_that_computes_something_else_in_a_batch_is_refused(tmp_path: Path) -> None:
    """It is tried before it is promised: here rows of a batch look at each other."""
    model: Any = load(write_family(tmp_path / "m", FAMILIES["qwen3"]), "float32").model
    attention = model.model.layers[1].self_attn
    whole = type(attention)

    def mixing(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = whole.__call__(self, x, *args, **kwargs)
        return out + out.mean(axis=0, keepdims=True) if out.shape[0] > 1 else out * 2

    attention.__class__ = type("Mixing", (whole,), {"__call__": mixing})
    refused(model, "something else", "0")


def test_a_model_whose_attention_cannot_be_batched_is_refused(tmp_path: Path) -> None:
    """Gemma 2 applies soft caps with masks of its own shape, which fails in a batch."""
    config = {
        **GEMMA3,
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model: Any = load(write_family(tmp_path / "m", config), "float32").model
    refused(model, "layer 0 .*in a batch", "0")


@pytest.mark.long(3)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_mlx_lms_own_batches_run_on_windows_unmodified(name: str, family: Callable[[str], Family]) -> None:
    """Ragged prompts, right padding past the window, joins and leaves: each row says what it says alone."""
    tiny, judge = family(name), test_backends.TestUnmodifiedBatchGenerator()

    new_layers = judged_layers(identity_of(tiny.layout.entries))
    prompts = [tokens_of(n, n) for n in (3, 96, 130, 17, 200)]
    limits = [9, 20, 5, 14, 11]
    found = judge.run(tiny.model, new_layers, prompts, limits, completion_batch_size=3, prefill_batch_size=2)
    for prompt, limit, (said, cache) in zip(prompts, limits, found, strict=True):
        [(expected, _)] = judge.run(tiny.model, new_layers, [prompt], [limit])
        assert said == expected
        assert [layer.offset for layer in cache] == [len(prompt) + limit] * len(cache)


# --- what of a model is tried ---

DEEP = {**FAMILIES["llama3.1"], "num_hidden_layers": 6}


@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_fewest_first_layers_that_have_every_kind_are_tried_and_two_where_there_are_two(kinds: list[int]) -> None:
    count = tried_count(kinds)
    assert set(kinds[:count]) == set(kinds)
    assert count >= min(2, len(kinds))
    assert count <= 2 or set(kinds[: count - 1]) != set(kinds)


def of_rows(layout: Layout) -> Layout:
    """Without what only a trial shows, and only on a GPU."""
    return replace(layout, reads_pages=False)


def deep_model(directory: Path, changed: int = -1, **names: Any) -> Any:
    """Six equal layers, the attention of one of which is of another class."""
    model: Any = load(write_family(directory, DEEP, seed=1), "float32").model
    if names:
        attention = model.model.layers[changed].self_attn
        attention.__class__ = type("Changed", (type(attention),), names)
    return model


def test_a_trial_computes_no_layer_that_is_like_one_before_it(tmp_path: Path) -> None:
    """Whoever computed the last four would find NaN."""
    model = deep_model(tmp_path / "m")
    for layer in model.model.layers[2:]:
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * mx.nan
    layout = shown_layout(model)
    assert tried_count(layer_kinds(model.layers, layout)) == 2
    for trunk in (None, model.model):
        assert of_rows(tried_layout(model, layout, trunk)) == layout
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[2].mlp.down_proj.weight
    refused(model, "something else", "0")


def test_layers_that_compute_few_rows_on_a_gpu_are_of_one_kind(tmp_path: Path) -> None:
    model = deep_model(tmp_path / "m")
    for module in model.modules():
        if isinstance(module, Linear):
            module.__class__ = Linear  # as it is loaded for a GPU
    take_few_rows(model)
    assert tried_count(layer_kinds(model.layers, shown_layout(model))) == 2


@pytest.mark.cpu_only("on a GPU a model's steps are joined as it is loaded, and not again")
def test_layers_whose_steps_are_one_launch_are_of_one_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention_hook.attention)
    monkeypatch.setattr(step_attention, "turns_of", mx.cos)  # by a kernel elsewhere
    model = deep_model(tmp_path / "m")
    model.set_dtype(mx.bfloat16)
    join_steps(model, whole=True, attends=True)
    joined = [
        (isinstance(each.whole, WholeLayer), isinstance(each.self_attn.step, StepAttention)) for each in model.layers
    ]
    assert joined == [(True, True)] * 6
    assert tried_count(layer_kinds(model.layers, shown_layout(model))) == 2


def test_a_layer_of_a_kind_of_its_own_is_tried_however_deep_it_lies(tmp_path: Path) -> None:
    def doubled(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = type(self).__base__.__call__(self, x, *args, **kwargs)
        return out * 2 if out.shape[0] > 1 else out

    refused(deep_model(tmp_path / "m", __call__=doubled), "something else", "0")


def test_first_layers_show_a_models_mistake_in_a_batch(tmp_path: Path) -> None:
    """Beside the embedding it is little: less than a hundredth of a row, and a sixth of the whole model's logits."""
    model: Any = load(write_family(tmp_path / "m", {**GEMMA3, "num_hidden_layers": 6}, seed=1), "float32").model
    ropes = [layer.self_attn.rope for layer in model.model.layers]

    def of_one_length(self: Any, x: mx.array, offset: Any) -> mx.array:
        longest = mx.broadcast_to(mx.max(mx.array(offset)), (x.shape[0],))
        out: mx.array = type(self).__base__.__call__(self, x, offset=longest)
        return out

    kinds = {whole: type("OfOneLength", (whole,), {"__call__": of_one_length}) for whole in map(type, ropes)}
    for rope in ropes:
        rope.__class__ = kinds[type(rope)]
    layout = shown_layout(model)
    assert tried_count(layer_kinds(model.layers, layout)) == 2
    with pytest.raises(FailedPrecondition, match="something else"):
        tried_layout(model, layout, model.model)


@pytest.mark.parametrize("where", ["a setting", "a shape", "an object", "a window"])
def test_layers_differ_by(where: str, tmp_path: Path) -> None:
    model = deep_model(tmp_path / "m")
    attention = model.model.layers[4].self_attn
    layout = shown_layout(model)
    assert tried_count(layer_kinds(model.layers, layout)) == 2
    if where == "a setting":
        attention.scale *= 2
    elif where == "a shape":
        attention.k_proj.weight = mx.concatenate([attention.k_proj.weight] * 2)
    elif where == "an object":
        attention.chooses = object()
    else:
        model.make_cache = lambda: [RotatingKVCache(96) if place == 4 else KVCache() for place in range(6)]
        layout = shown_layout(model)
    assert tried_count(layer_kinds(model.layers, layout)) == 5


def test_a_layers_own_number_is_no_difference(tmp_path: Path) -> None:
    model = deep_model(tmp_path / "m")
    for place, layer in enumerate(model.layers):
        layer.self_attn.place = place
    assert tried_count(layer_kinds(model.layers, shown_layout(model))) == 2


def test_a_model_whose_layers_do_not_hand_on_rows_is_tried_as_it_is(tmp_path: Path) -> None:
    model = deep_model(tmp_path / "m")
    layers, whole = model.model.layers, type(model.model.layers[0])

    def in_a_tuple(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (whole.__call__(self, *args, **kwargs),)

    trunk = type(model.model)

    def unpacking(self: Any, tokens: mx.array, cache: Any, *_: Any) -> mx.array:
        h = self.embed_tokens(tokens)
        mask = create_attention_mask(h, cache[0])
        for layer, each in zip(self.layers, cache, strict=True):
            (h,) = layer(h, mask, cache=each)
        out: mx.array = self.norm(h)
        return out

    in_tuples = type("InTuples", (whole,), {"__call__": in_a_tuple})
    for layer in layers:
        layer.__class__ = in_tuples
    model.model.__class__ = type("Unpacking", (trunk,), {"__call__": unpacking})
    assert of_rows(found_layout(model)) == shown_layout(model)
    layers[-1].mlp.down_proj.weight = layers[-1].mlp.down_proj.weight * mx.nan
    refused(model, "something else", "0")


@pytest.mark.parametrize("name", first_and_in_turn(list(ALL), seconds=2, first=3))
def test_the_first_layers_of_a_family_show_what_all_of_them_show(
    name: str, family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = family(name)
    monkeypatch.setattr(layout_trial, "tried_count", len)
    assert found_layout(tiny.model) == tiny.layout
