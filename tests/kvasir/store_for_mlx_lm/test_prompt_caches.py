"""Prompt caches of the unmodified mlx-lm through a store: what comes back goes on as what never left, in fp32."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import StoreClient
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError, NotFound
from kvasir.formats.digest import Digest
from kvasir.store_for_mlx_lm import PromptCaches, cache_file, prompt_caches
from mlx.utils import tree_flatten
from mlx_lm.models import cache as caches

from inference_svc.model import kvasir_tiny
from tests.cachestore.service.running import RunningStore, store_home

_PROMPT = list(range(20, 620))
_WINDOW = 64


@pytest.fixture(scope="module")
def model() -> Any:
    loaded, *_ = mlx_lm.load(str(kvasir_tiny.path()))
    loaded.set_dtype(mx.float32)
    return loaded


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    with store_home(tmp_path_factory.mktemp("s")) as home:
        yield home.start()


@pytest.fixture
def kept(store: RunningStore) -> Iterator[PromptCaches]:
    with store.client() as client:
        yield PromptCaches(client, "kvasir-tiny")


def _plain(model: Any) -> list[Any]:
    return list(caches.make_prompt_cache(model))


def _quantized(model: Any) -> list[Any]:
    return [caches.QuantizedKVCache(group_size=32, bits=4) for _ in _plain(model)]


def _rotating(model: Any) -> list[Any]:
    return [caches.RotatingKVCache(_WINDOW) for _ in _plain(model)]


def _mixed(model: Any) -> list[Any]:
    return [*_plain(model)[:1], *_rotating(model)[1:]]


def _generate(model: Any, cache: list[Any], tokens: list[int], count: int) -> list[int]:
    """Greedy tokens behind these; the cache then holds all but the last."""
    made: list[int] = []
    while len(made) < count:
        logits = model(mx.array([tokens]), cache=cache)[0, -1]
        tokens = [int(mx.argmax(logits).item())]
        made += tokens
    return made


def _file(cache: list[Any], path: Path) -> bytes:
    caches.save_prompt_cache(str(path), cache, {"model": "kvasir-tiny"})
    return path.read_bytes()


def _loaded(data: bytes, path: Path) -> list[Any]:
    path.write_bytes(data)
    return list(caches.load_prompt_cache(str(path)))


def _rows(cache: list[Any]) -> list[bytes]:
    return [bytes(memoryview(each)) for layer in cache for _, each in tree_flatten(layer.keys_and_values())]


@pytest.mark.long(7)
@pytest.mark.parametrize("make", [_plain, _quantized, _rotating, _mixed])
def test_a_cache_from_the_store_goes_on_as_the_one_that_never_left(
    model: Any, kept: PromptCaches, tmp_path: Path, make: Any
) -> None:
    cache = make(model)
    reply = _generate(model, cache, _PROMPT, 5)
    tokens = [*_PROMPT, *reply[:-1]]
    digest = kept.save("ada", _file(cache, tmp_path / "saved.safetensors"), tokens)
    data, held = kept.load("ada")
    assert held == tokens
    assert kept.load(digest) == (data, held)
    came = _loaded(data, tmp_path / "came.safetensors")
    assert _rows(came) == _rows(cache)
    assert _generate(model, came, reply[-1:], 20) == _generate(model, cache, reply[-1:], 20)


def test_a_longer_cache_sends_its_new_rows_alone_and_comes_back_whole(
    model: Any, kept: PromptCaches, tmp_path: Path
) -> None:
    cache = _plain(model)
    model(mx.array([_PROMPT[:300]]), cache=cache)
    kept.save("first", _file(cache, tmp_path / "1.safetensors"), _PROMPT[:300])
    model(mx.array([_PROMPT[300:]]), cache=cache)
    whole = _rows(cache)
    blocks = kept.stored_blocks(_PROMPT)
    assert blocks == 1
    new = [type(each).from_state((each.keys[..., 256:, :], each.values[..., 256:, :], each.offset)) for each in cache]
    data = _file(new, tmp_path / "2.safetensors")
    kept.save("second", data, _PROMPT, left_out_blocks=blocks)
    assert _rows(_loaded(kept.load("second")[0], tmp_path / "came.safetensors")) == whole
    with pytest.raises(FailedPrecondition, match="save all rows"):
        kept.save("second", data, [1, *_PROMPT[1:]], left_out_blocks=blocks)


def test_caches_with_one_prefix_share_its_blobs(model: Any, kept: PromptCaches, tmp_path: Path) -> None:
    cache = _plain(model)
    model(mx.array([_PROMPT]), cache=cache)
    manifests = []
    for name, tokens in (("one", _PROMPT), ("two", _PROMPT[:560])):
        caches.trim_prompt_cache(cache, cache[0].offset - len(tokens))
        kept.save(name, _file(cache, tmp_path / "saved.safetensors"), tokens)
        manifests.append(manifest_pb2.Manifest.FromString(kept._store.get_snapshot(name)[1]))
    assert len(manifests[0].blocks) == 2
    assert manifests[0].blocks == manifests[1].blocks


@pytest.mark.long(2)
def test_it_remembers_as_many_blocks_as_it_may_and_is_sent_the_rows_of_others(
    model: Any, kept: PromptCaches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_caches, "_MOST_BLOCKS", 3)
    caches_of = {}
    for first in (20, 21, 22):
        tokens = [first, *_PROMPT[1:]]
        cache = _plain(model)
        model(mx.array([tokens]), cache=cache)
        caches_of[first] = tokens, _file(cache, tmp_path / f"{first}.safetensors")
    for first, (tokens, data) in caches_of.items():
        kept.save(f"bounded-{first}", data, tokens)
        assert kept.stored_blocks(tokens) == 2
        assert len(kept._blocks) <= 3
    tokens, data = caches_of[20]
    assert kept.stored_blocks(tokens) == 0
    kept.save("bounded-20", data, tokens)
    assert kept.load("bounded-20")[1] == tokens


@pytest.mark.parametrize("make", [_plain, _rotating])
def test_a_listed_cache_has_its_tokens_and_counts_those_for_a_request(
    model: Any, kept: PromptCaches, tmp_path: Path, make: Any
) -> None:
    cache = make(model)
    model(mx.array([_PROMPT[:300]]), cache=cache)
    kept.save("listed/it", _file(cache, tmp_path / "saved.safetensors"), _PROMPT[:300])
    [found] = kept.kept("listed/")
    assert list(found.tokens) == _PROMPT[:300]
    tokens = found.tokens
    assert found.shared_with(tokens + tokens[:5]) == 300
    assert found.shared_with(tokens) == (299 if found.is_trimmable else 0)
    assert found.shared_with(tokens[:100] + tokens) == (100 if found.is_trimmable else 0)
    assert found.is_trimmable == (make is _plain)
    kept.remove("listed/it")
    assert list(kept.kept("listed/")) == []


def test_a_cache_of_other_weights_is_refused(store: RunningStore, model: Any, tmp_path: Path) -> None:
    cache = _plain(model)
    model(mx.array([_PROMPT[:10]]), cache=cache)
    with store.client() as client:
        PromptCaches(client, "these").save("eve", _file(cache, tmp_path / "saved.safetensors"), _PROMPT[:10])
        others = PromptCaches(client, "those")
        with pytest.raises(FailedPrecondition, match="these weights"):
            others.load("eve")
        assert list(others.kept("eve")) == []


def test_a_wrong_file_or_number_of_tokens_is_refused_by_name(model: Any, kept: PromptCaches, tmp_path: Path) -> None:
    cache = _plain(model)
    model(mx.array([_PROMPT[:10]]), cache=cache)
    data = _file(cache, tmp_path / "saved.safetensors")
    with pytest.raises(InvalidArgument, match="tokens: expected 10"):
        kept.save("x", data, _PROMPT[:11])
    for wrong in (b"", b"12345678", data[:-1], b"\xff" * 64):
        with pytest.raises(InvalidArgument, match="mlx-lm cache file"):
            kept.save("x", wrong, _PROMPT[:10])
    mx.save_safetensors(str(tmp_path / "none.safetensors"), {"0.0": mx.zeros((1, 2, 3, 4))})
    with pytest.raises(InvalidArgument, match="save_prompt_cache"):
        kept.save("x", (tmp_path / "none.safetensors").read_bytes(), _PROMPT[:10])
    for unknown in ("nobody", Digest("0" * 64, 5)):
        with pytest.raises(NotFound):
            kept.load(unknown)


def test_a_memory_that_is_no_prompt_cache_is_no_crash(kept: PromptCaches, model: Any, tmp_path: Path) -> None:
    """One with the weights' digest and other states, as another program may have committed it."""
    cache = _plain(model)
    model(mx.array([_PROMPT[:10]]), cache=cache)
    kept.save("odd", _file(cache, tmp_path / "saved.safetensors"), _PROMPT[:10])
    manifest = manifest_pb2.Manifest.FromString(kept._store.get_snapshot("odd")[1])
    del manifest.states[:]
    digest = kept._store.put_manifest(manifest.SerializeToString(deterministic=True))
    kept._store.commit("odd", digest, 1)
    with pytest.raises(KvasirError, match="no prompt cache"):
        kept.load("odd")


_VAST = "9" * 12
_WRONG_PLACES = {
    "an array in a list of billions": lambda tensors, words: (tensors | {f"0.{_VAST}": mx.zeros(1)}, words),
    "rows in a list of billions": lambda tensors, words: (tensors | {f"0.0{_VAST}": tensors["0.0"]}, words),
    "a word in a list of billions": lambda tensors, words: (tensors, words | {f"2.{_VAST}": "scalar"}),
    "an array in many lists": lambda tensors, words: (tensors | {"0." * 5000 + "0": mx.zeros(1)}, words),
    "many long lists": lambda tensors, words: (tensors, words | {f"2.{n}.9999": "" for n in range(2, 2000)}),
}


@pytest.mark.parametrize("how", _WRONG_PLACES)
def test_a_file_whose_lists_would_fill_the_memory_is_neither_kept_nor_given_back(
    model: Any, kept: PromptCaches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """mlx-lm makes a list as long as the largest number in a name."""
    cache, file = _plain(model), str(tmp_path / "saved.safetensors")
    model(mx.array([_PROMPT[:10]]), cache=cache)
    _file(cache, tmp_path / "saved.safetensors")
    mx.save_safetensors(file, *_WRONG_PLACES[how](*mx.load(file, return_metadata=True)))
    data = Path(file).read_bytes()
    with pytest.raises(InvalidArgument, match=r"expected (lists|at most)"):
        kept.save("vast", data, _PROMPT[:10])
    with monkeypatch.context() as another:  # a program that does not look
        another.setattr(cache_file, "_check_places", lambda _: None)
        kept.save("vast", data, _PROMPT[:10])
    with pytest.raises(InvalidArgument, match=r"expected (lists|at most)"):
        kept.load("vast")


def test_a_cache_that_claims_a_million_heads_is_not_given_back(
    model: Any, kept: PromptCaches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be cut out of the rows, whatever these have: of a number of thirteen digits for days."""
    cache, written = _plain(model), cache_file._state_tensors
    model(mx.array([_PROMPT[:10]]), cache=cache)

    def lying(others: Any, metadata: Any, rows: Any) -> list[bytes]:
        claimed = {name: replace(each, shape=(1, 1 << 20, *each.shape[2:])) for name, each in rows.items()}
        return written(others, metadata, claimed)

    monkeypatch.setattr(cache_file, "_state_tensors", lying)
    kept.save("vast", _file(cache, tmp_path / "saved.safetensors"), _PROMPT[:10])
    with pytest.raises(InvalidArgument, match="heads are not those of their layer"):
        kept.load("vast")


def test_caches_without_a_name_of_their_weights_are_refused(store: RunningStore) -> None:
    with pytest.raises(InvalidArgument, match="weights"), StoreClient.connect(store.address) as client:
        PromptCaches(client, "")
