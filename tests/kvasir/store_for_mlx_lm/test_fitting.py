"""Every cache that mlx-lm makes fits its model, of any family and however it came about; no damaged one does."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from kvasir.store_for_mlx_lm.fitting import Fitting, offsets
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as caches
from mlx_lm.utils import _get_classes

from tests.inference.engine.families import FALCON_H1, GEMMA3, GRANITE_HYBRID, LLAMA31

_WINDOW = 96  # of GEMMA3
_LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        **GEMMA3,
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": _WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 192,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": False,
    },
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA31,
    "gemma3": GEMMA3,
    "falcon_h1": FALCON_H1,
    "granite_hybrid": GRANITE_HYBRID,
    "llama4": _LLAMA4,
}
_BATCHED = [name for name in _FAMILIES if name != "llama4"]  # mlx-lm serves chunks one by one


@cache
def _model(family: str) -> Any:
    mx.random.seed(0)
    make_model, make_args = _get_classes(_FAMILIES[family])
    return make_model(make_args.from_dict(_FAMILIES[family]))


@cache
def _fits(family: str, kv_bits: int | None = None) -> Fitting:
    options = SimpleNamespace(kv_bits=kv_bits, kv_group_size=32)
    return Fitting(SimpleNamespace(model_key=family, model=_model(family), draft_model=None, cli_args=options))


def _computed(family: str, tokens: int, steps: int = 0) -> list[Any]:
    """A cache of so many tokens, the last ones one by one."""
    made = list(caches.make_prompt_cache(_model(family)))
    for begin in range(0, tokens - steps, 70):
        _model(family)(mx.ones((1, min(70, tokens - steps - begin)), mx.int32), cache=made)
    for _ in range(steps):
        mx.eval(_model(family)(mx.ones((1, 1), mx.int32), cache=made))
    return made


def _from_file(cache: list[Any], folder: Path) -> list[Any]:
    caches.save_prompt_cache(str(folder / "saved.safetensors"), cache)
    return list(caches.load_prompt_cache(str(folder / "saved.safetensors")))


@pytest.mark.long(2)
@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("tokens", [7, _WINDOW, _WINDOW + 1, 230])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_cache_of_any_length_fits(family: str, tokens: int, steps: int, tmp_path: Path) -> None:
    made = _from_file(_computed(family, tokens, steps), tmp_path)
    assert _fits(family)(family, made, tokens)
    assert offsets(made) == {tokens}
    assert not _fits(family)(family, made, tokens - 1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_cache_that_was_cut_fits(family: str, tmp_path: Path) -> None:
    made = _computed(family, 90)
    cut = caches.trim_prompt_cache(made, 30)
    assert _fits(family)(family, _from_file(made, tmp_path), 90 - cut)


def _of_batch(family: str, prompts: list[list[int]], count: int) -> Iterator[tuple[list[int], list[Any]]]:
    """The tokens and caches of replies that were made together."""
    batch = BatchGenerator(_model(family), max_tokens=count, prefill_step_size=64)
    batch.insert(prompts)
    left = len(prompts)
    while left:
        for made in batch.next()[1]:
            if made.finish_reason is not None:
                yield made.all_tokens, made.prompt_cache
                left -= 1
    batch.close()


@pytest.mark.parametrize("family", _BATCHED)
def test_the_caches_of_a_batch_fit(family: str, tmp_path: Path) -> None:
    prompts = [[1] * length for length in (3, 40, _WINDOW - 2, _WINDOW + 30, 230)]
    for tokens, made in _of_batch(family, prompts, 9):
        assert offsets(made) == {len(tokens)}
        assert _fits(family)(family, _from_file(made, tmp_path), len(tokens))


def _each(kind: str, **numbers: Any) -> Callable[[list[Any]], list[Any]]:
    def change(cache: list[Any]) -> list[Any]:
        changed = [part for each in cache for part in getattr(each, "caches", [each]) if type(part).__name__ == kind]
        assert changed
        for part in changed:
            for name, value in numbers.items():
                setattr(part, name, value(part) if callable(value) else value)
        return cache

    return change


def _float(name: str) -> Callable[[Any], float]:
    return lambda part: float(getattr(part, name))


def _keys(rows: int) -> Callable[[Any], mx.array]:
    return lambda part: part.keys[..., :rows, :]


def _often(name: str) -> Callable[[Any], mx.array]:
    return lambda part: mx.concatenate([getattr(part, name)] * 4, axis=2)


_WINDOWS: dict[str, dict[str, Any]] = {
    "of fewer rows": {"keys": _keys(5), "values": lambda part: part.values[..., :5, :]},
    "without rows": {"keys": _keys(0), "values": lambda part: part.values[..., :0, :]},
    "of half its rows": {"keys": _keys(48), "values": lambda part: part.values[..., :48, :], "_idx": 20},
    "of more rows than tokens": {
        "keys": _often("keys"),
        "values": _often("values"),
        "_idx": lambda part: part.keys.shape[2],
    },
    "of fewer values": {"values": lambda part: part.values[..., :7, :]},
    "whose next row is beyond": {"_idx": 1000},
    "whose next row is before the first": {"_idx": -7},
    "whose next row is the first": {"_idx": 0},
    "whose next row is not whole": {"_idx": _float("_idx")},
    "without a window": {"max_size": 0},
    "of a vast window": {"max_size": 1 << 40},
    "of another window": {"max_size": 16},
    "of a window below 0": {"max_size": -4},
    "of no tokens": {"offset": 0},
    "of tokens below 0": {"offset": -5},
    "of vastly many tokens": {"offset": 1 << 31},
    "of half a token": {"offset": _float("offset")},
    "that keeps first rows": {"keep": 8},
    "that keeps rows below 0": {"keep": -3},
    "that keeps nothing it says": {"keep": None},
    "that keeps text": {"keep": "4"},
    "of keys in a list": {"keys": lambda part: [part.keys]},
}


@pytest.mark.long(4)
@pytest.mark.parametrize("how", _WINDOWS)
@pytest.mark.parametrize(("tokens", "steps"), [(60, 5), (230, 0), (230, 5)])
def test_a_damaged_window_does_not_fit(how: str, tokens: int, steps: int, tmp_path: Path) -> None:
    made = _each("RotatingKVCache", **_WINDOWS[how])(_computed("gemma3", tokens, steps))
    assert not _fits("gemma3")("gemma3", _from_file(made, tmp_path), tokens)


_OTHERS: dict[str, tuple[str, Callable[[list[Any]], list[Any]]]] = {
    "of half a token": ("gemma3", _each("KVCache", offset=_float("offset"))),
    "of keys in a list": ("gemma3", _each("KVCache", keys=lambda part: [part.keys])),
    "of other rows than keys": ("gemma3", _each("KVCache", values=lambda part: mx.repeat(part.values, 2, axis=2))),
    "in a list, of fewer tokens": ("falcon_h1", _each("KVCache", offset=3)),
    "in a list, of fewer rows": ("falcon_h1", _each("KVCache", keys=_keys(5), values=_keys(5))),
    "in a list, of another class": ("falcon_h1", lambda cache: [caches.CacheList(each[0], each[0]) for each in cache]),
    "in a shorter list": ("falcon_h1", lambda cache: [caches.CacheList(*each.caches[:1]) for each in cache]),
    "of a state that is empty at first": (
        "granite_hybrid",
        _each("ArraysCache", cache=lambda part: [None, *part.cache]),
    ),
    "of lengths": ("granite_hybrid", _each("ArraysCache", lengths=lambda _: mx.array([3]))),
    "of another chunk": ("llama4", _each("ChunkedKVCache", chunk_size=7)),
    "of a chunk that begins late": ("llama4", _each("ChunkedKVCache", start_position=225)),
    "of a chunk that begins before 0": ("llama4", _each("ChunkedKVCache", start_position=-10)),
    "of a chunk of fewer rows": ("llama4", _each("ChunkedKVCache", keys=_keys(5), values=_keys(5))),
}


@pytest.mark.parametrize("how", _OTHERS)
def test_a_damaged_cache_of_another_class_does_not_fit(how: str, tmp_path: Path) -> None:
    family, change = _OTHERS[how]
    made = _from_file(change(_computed(family, 230)), tmp_path)
    assert not _fits(family)(family, made, 230)


@pytest.mark.parametrize("numbers", [{"group_size": 64}, {"bits": 8}, {"bits": 0}, {"bits": None}, {"offset": 40.0}])
def test_a_quantized_cache_that_lies_about_its_numbers_does_not_fit(numbers: dict[str, Any], tmp_path: Path) -> None:
    made = [each.to_quantized(group_size=32, bits=4) for each in _computed("llama", 40)]
    assert _fits("llama", 4)("llama", _from_file(made, tmp_path), 40)
    lying = _from_file(_each("QuantizedKVCache", **numbers)(made), tmp_path)
    assert not _fits("llama", 4)("llama", lying, 40)
