"""mlx_lm.server with stored prompt caches: warm after `kill -9`, equal to one that never ended, never in the way."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from kvasir.clients import StoreClient
from kvasir.store_for_mlx_lm import PromptCaches, server, stored_caches
from kvasir.store_for_mlx_lm.fitting import Fitting
from kvasir.store_for_mlx_lm.stored_caches import StoredPromptCaches
from kvasir.store_for_mlx_lm.weights import weights_of
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, save_prompt_cache

from inference_svc.model import kvasir_tiny
from tests.cachestore.service.running import RunningStore, StoreHome, store_home
from tests.running.programs import ONE_THREAD
from tests.running.waiting import eventually

_TINY = (str(kvasir_tiny.path()), None, None)
_PROMPT = list(range(20, 320))
_WITHIN_S = 120.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[StoreHome]:
    with store_home(tmp_path / "h") as made:
        yield made


@pytest.fixture
def store(home: StoreHome) -> RunningStore:
    return home.start()


@contextmanager
def _caches(address: str, keep: int = 64) -> Iterator[StoredPromptCaches]:
    with StoreClient.connect(address) as client:
        made = StoredPromptCaches(client, keep, _fits())
        yield made
        made.close()


@cache
def _model() -> Any:
    return mlx_lm.load(_TINY[0])[0]


def _fits(kv_bits: int | None = None) -> Fitting:
    """A server's, that has loaded the model."""
    options = SimpleNamespace(kv_bits=kv_bits, kv_group_size=32)
    return Fitting(SimpleNamespace(model_key=_TINY, model=_model(), draft_model=None, cli_args=options))


def _wait_until_stored(client: StoreClient) -> None:
    eventually(lambda: client.list_agents().agents, _WITHIN_S)


def _computed(tokens: list[int]) -> list[Any]:
    return deepcopy(_computed_once(tuple(tokens)))


@cache
def _computed_once(tokens: tuple[int, ...]) -> list[Any]:
    model = _model()
    made = make_prompt_cache(model)
    model(mx.array([tokens]), cache=made)
    mx.eval([each.state for each in made])
    return list(made)


@pytest.mark.long(2)
def test_a_prompt_that_a_stored_cache_begins_goes_on_from_there_after_a_restart(store: RunningStore) -> None:
    cache = _computed(_PROMPT)
    with _caches(store.address) as first:
        first.insert_cache(_TINY, _PROMPT, cache)
    with _caches(store.address) as second:
        found, rest = second.fetch_nearest_cache(_TINY, [*_PROMPT, 5, 6])
        assert (found[0].offset, rest) == (300, [5, 6])
        assert mx.array_equal(found[-1].keys_and_values()[0], cache[-1].keys_and_values()[0])
        found, rest = second.fetch_nearest_cache(_TINY, [*_PROMPT[:200], 7, 8])  # another end of the same beginning
        assert (found[0].offset, rest) == (200, [7, 8])
        assert second.fetch_nearest_cache(_TINY, [9, 9, 9]) == (None, [9, 9, 9])


@pytest.mark.long(7)
def test_a_longer_cache_takes_the_place_of_its_beginning_and_the_oldest_go(store: RunningStore) -> None:
    cache = _computed(_PROMPT)
    with _caches(store.address, keep=2) as caches, store.client() as client:
        caches.insert_cache(_TINY, _PROMPT, cache)
        _wait_until_stored(client)
        longer = _computed([*_PROMPT, *_PROMPT])
        caches.insert_cache(_TINY, [*_PROMPT, *_PROMPT], longer)
        caches.close()
        assert [agent.lines[0].token_count for agent in client.list_agents().agents] == [600]
    with _caches(store.address, keep=2) as caches, store.client() as client:
        found, rest = caches.fetch_nearest_cache(_TINY, [*_PROMPT, *_PROMPT, 5])
        assert rest == [5]
        assert mx.array_equal(found[-1].keys_and_values()[1], longer[-1].keys_and_values()[1])
        for first in (1, 2):
            caches.insert_cache(_TINY, [first, *_PROMPT], _computed([first, *_PROMPT]))
        caches.close()
        assert [agent.lines[0].token_count for agent in client.list_agents().agents] == [301, 301]


@pytest.mark.long(7)
def test_a_clock_that_was_set_back_drops_no_new_cache(store: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(2_000_000_000, 0, -86_400))
    monkeypatch.setattr(stored_caches, "PromptCaches", partial(PromptCaches, clock=lambda: next(seconds)))
    with _caches(store.address, keep=2) as caches, store.client() as client:
        for first in (1, 2, 3):
            caches.insert_cache(_TINY, [first, *_PROMPT], _computed([first, *_PROMPT]))
        caches.close()
        assert len(client.list_agents().agents) == 2
        model = caches._models[_TINY]
        assert model is not None
        assert [each.tokens[0] for each in model._known.values()] == [2, 3]


@pytest.mark.long(2)
def test_of_many_stored_caches_the_newest_alone_are_read_and_few_of_the_others_go_at_once(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _caches(store.address) as caches, store.client() as client:
        for first in range(20):
            caches.insert_cache(_TINY, [first, *_PROMPT[:20]], _computed([first, *_PROMPT[:20]]))
            while len(client.list_agents().agents) <= first:
                time.sleep(0.01)
    with _caches(store.address, keep=2) as caches, store.client() as client:
        read: list[str] = []
        whole = StoreClient.get_snapshot
        monkeypatch.setattr(StoreClient, "get_snapshot", lambda me, name: read.append(name) or whole(me, name))
        assert caches.fetch_nearest_cache(_TINY, [19, *_PROMPT[:20], 5])[1] == [5]
        assert len(set(read)) == 2
        for first, left in ((30, 4), (31, 2)):
            caches.insert_cache(_TINY, [first, *_PROMPT[:20]], _computed([first, *_PROMPT[:20]]))
            eventually(lambda left=left: len(client.list_agents().agents) == left, _WITHIN_S)  # type: ignore[misc]


@pytest.mark.long(3)
def test_a_store_that_is_gone_or_lost_a_cache_costs_no_request(store: RunningStore) -> None:
    cache = _computed(_PROMPT)
    with _caches(store.address) as first:
        first.insert_cache(_TINY, _PROMPT, cache)
    with _caches(store.address) as caches, store.client() as client:
        caches.fetch_nearest_cache(_TINY, [9])  # it knows what is stored
        client.delete_agent(client.list_agents().agents[0].agent_id)
        assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5]) == (None, [*_PROMPT, 5])
        store.kill()
        caches.insert_cache(_TINY, _PROMPT, cache)
        assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5])[1] == [5]
    with _caches(store.address) as caches:
        assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5]) == (None, [*_PROMPT, 5])


@pytest.mark.long(3)
def test_a_damaged_cache_hides_no_other(store: RunningStore) -> None:
    with _caches(store.address) as first, store.client() as client:
        for begin in (1, 2):
            first.insert_cache(_TINY, [begin, *_PROMPT], _computed([begin, *_PROMPT]))
        first.close()
        damaged, _ = [client.get_snapshot(agent.agent_id)[0].manifest.hash for agent in client.list_agents().agents]
    [file] = store.data_dir.rglob(damaged)
    file.write_bytes(file.read_bytes()[:-1])
    with _caches(store.address) as caches:
        found = [caches.fetch_nearest_cache(_TINY, [begin, *_PROMPT, 5])[1] for begin in (1, 2)]
    assert sorted(map(len, found)) == [1, 302], "one goes on, and of the damaged one nothing does"


def _wider(cache: list[Any]) -> list[Any]:
    for each in cache:
        each.keys = mx.concatenate([each.keys, each.keys], axis=1)
    return cache


def _short(cache: list[Any]) -> list[Any]:
    for each in cache:
        each.keys, each.values = each.keys[..., :9, :], each.values[..., :9, :]
    return cache


_UNFIT: dict[str, Callable[[list[Any]], list[Any]]] = {
    "of fewer layers": lambda cache: cache[:-1],
    "of more heads": _wider,
    "of fewer rows": _short,
    "quantized": lambda cache: [each.to_quantized(group_size=32, bits=4) for each in cache],
}


@pytest.mark.long(4)
@pytest.mark.parametrize("how", _UNFIT)
def test_a_stored_cache_that_the_model_cannot_go_on_with_is_left_out(
    store: RunningStore, tmp_path: Path, how: str
) -> None:
    """Whoever may write in the namespace can store one under the server's names; its thread would end."""
    cache, file = _UNFIT[how](_computed(_PROMPT)), tmp_path / "unfit.safetensors"
    save_prompt_cache(str(file), cache)
    with store.client() as client:
        kept = PromptCaches(client, weights_of(_TINY))
        kept.save(f"mlx-lm/{kept.weights_digest[:16]}/unfit", file.read_bytes(), _PROMPT)
    with _caches(store.address) as caches:
        assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5]) == (None, [*_PROMPT, 5])
        caches.insert_cache(_TINY, _PROMPT, _computed(_PROMPT))
    with _caches(store.address) as caches:
        assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5])[1] == [5]


def test_a_prompt_that_is_stored_whole_leaves_its_last_token_to_compute(store: RunningStore) -> None:
    """mlx-lm's batches end of a prompt that leaves none."""
    with _caches(store.address) as caches:
        caches.insert_cache(_TINY, _PROMPT, _computed(_PROMPT))
        assert caches.fetch_nearest_cache(_TINY, _PROMPT)[1] == _PROMPT[-1:]
    with _caches(store.address) as caches:
        found, rest = caches.fetch_nearest_cache(_TINY, _PROMPT)
        assert (found[0].offset, rest) == (299, _PROMPT[-1:])
        rotating = [RotatingKVCache(4) for _ in found]  # is full, and cannot be cut
        _model()(mx.array([[1, 2, 3, 4, 5]]), cache=rotating)
        caches.insert_cache(_TINY, [1, 2, 3, 4, 5], rotating)
        assert caches.fetch_nearest_cache(_TINY, [1, 2, 3, 4, 5]) == (None, [1, 2, 3, 4, 5])


def test_a_server_that_quantizes_goes_on_with_its_own_caches_and_with_those_of_others() -> None:
    plain = _computed(_PROMPT)
    for bits, fits in ((4, True), (8, False)):
        assert _fits(4)(_TINY, [each.to_quantized(group_size=32, bits=bits) for each in plain], 300) is fits
    assert _fits(4)(_TINY, plain, 300)
    assert not _fits()(_TINY, plain, 299)
    assert not _fits()((*_TINY[:2], "draft"), plain, 300)


@pytest.mark.parametrize("knows", [True, False])
def test_a_store_that_does_not_answer_for_a_while_is_waited_for_once_and_its_caches_are_used_later(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch, *, knows: bool
) -> None:
    with _caches(store.address) as first:
        first.insert_cache(_TINY, _PROMPT, _computed(_PROMPT))
    monkeypatch.setattr(stored_caches, "SILENCE_S", 0.5)
    with StoreClient.connect(store.address, timeout_s=0.5) as client:
        caches = StoredPromptCaches(client, 64, lambda *_: True)
        if knows:
            caches.fetch_nearest_cache(_TINY, [9])
        os.kill(store.process.pid, signal.SIGSTOP)
        try:
            took_s = []
            for _ in range(4):
                began = time.monotonic()
                assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5]) == (None, [*_PROMPT, 5])
                took_s.append(time.monotonic() - began)
            assert sum(took_s[1:]) < took_s[0]
        finally:
            os.kill(store.process.pid, signal.SIGCONT)
        [stored] = caches._models.values()
        assert stored is not None
        stored._next_call_s = 0.0
        assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5])[1] == [5]
        caches.close()


@contextmanager
def _full_disk(most_bytes: int = 1000) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_and_a_failure_of_any_kind_cost_no_request_and_no_later_cache(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, save = _computed(_PROMPT), PromptCaches.save
    with _caches(store.address) as caches, store.client() as client:
        with _full_disk():
            caches.insert_cache(_TINY, _PROMPT, cache)
        [stored] = caches._models.values()
        assert stored is not None
        assert list(stored._files.path.iterdir()) == []
        monkeypatch.setattr(PromptCaches, "save", lambda *_, **__: 1 / 0)
        caches.insert_cache(_TINY, _PROMPT, cache)
        while stored.waiting.qsize() or list(stored._files.path.iterdir()):
            time.sleep(0.02)
        monkeypatch.setattr(PromptCaches, "save", save)
        assert not client.list_agents().agents
        caches.insert_cache(_TINY, _PROMPT, cache)
        _wait_until_stored(client)
    with _caches(store.address) as caches:
        with _full_disk():
            assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5]) == (None, [*_PROMPT, 5])
        assert caches.fetch_nearest_cache(_TINY, [*_PROMPT, 5]) == (None, [*_PROMPT, 5])


def test_a_model_whose_files_are_gone_is_served_without_stored_caches(store: RunningStore, tmp_path: Path) -> None:
    gone = ("nobody/nothing", None, None)
    with _caches(store.address) as caches:
        caches.insert_cache(gone, _PROMPT, _computed(_PROMPT))
        assert caches.fetch_nearest_cache(gone, [*_PROMPT, 5])[1] == [5]


@pytest.mark.long(2)
def test_the_end_waits_for_no_store_that_hangs(store: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_caches, "SILENCE_S", 0.2)
    with StoreClient.connect(store.address) as client, ThreadPoolExecutor(1) as threads:
        caches = StoredPromptCaches(client, 64, lambda *_: True)
        caches.fetch_nearest_cache(_TINY, [9])
        os.kill(store.process.pid, signal.SIGSTOP)
        try:
            for first in range(12):
                caches.insert_cache(_TINY, [first, *_PROMPT[:20]], _computed([first, *_PROMPT[:20]]))
            threads.submit(caches.close).result(5)  # before the store's calls give up
        finally:
            os.kill(store.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "adapter_config.json", "model.py"])
def test_other_files_that_decide_the_kv_have_another_digest(tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_text("one")
    (tmp_path / name).write_text('{"rope_theta": 10000}')
    first = weights_of([str(tmp_path), None])
    (tmp_path / "README.md").write_text("two")
    assert weights_of([str(tmp_path), None]) == first
    assert weights_of([None, str(tmp_path)]) != first
    (tmp_path / name).write_text('{"rope_theta": 20000}')
    assert weights_of([str(tmp_path), None]) != first


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("--keep", "0"), "--keep: expected at least 1, got 0"),
        (("--keep", "-3"), "--keep: expected at least 1, got -3"),
        (("--store-token-file", "TOKEN"), "chmod 600"),
        (("--store-token-file", "/nowhere/token"), "No such file"),
        (("--store", "nowhere"), "expected unix:/path"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    refusal: str,
) -> None:
    (tmp_path / "token").write_text("hidden-" * 8)
    (tmp_path / "token").chmod(0o644)
    monkeypatch.setattr(sys, "argv", ["server", *(word.replace("TOKEN", str(tmp_path / "token")) for word in words)])
    with pytest.raises(SystemExit) as ended:
        server.main()
    printed = capsys.readouterr().err
    assert (ended.value.code, refusal in printed, "hidden" in printed) == (2, True, False), printed


class _Server:
    """mlx_lm.server as a process, with the plug."""

    def __init__(self, address: str, log: Path, most_file_bytes: int = 0, options: Sequence[str] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.log = log
        argv = ["--store", address, "--model", _TINY[0], "--port", str(self._port), "--max-tokens", "12", *options]
        with log.open("ab") as out, _full_disk(most_file_bytes) if most_file_bytes else nullcontext():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvasir.store_for_mlx_lm.server", *argv],
                stdout=out,
                stderr=out,
                env={**os.environ, **ONE_THREAD},
            )

    def ready(self) -> "_Server":
        give_up = time.monotonic() + _WITHIN_S
        while time.monotonic() < give_up and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def chat(self, messages: list[dict[str, str]]) -> tuple[str, int]:
        """The reply, and how many tokens of its prompt were in a cache."""
        body = json.dumps({"messages": messages}).encode()
        url = f"http://127.0.0.1:{self._port}/v1/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_WITHIN_S) as response:
            answer = json.load(response)
        message = answer["choices"][0]["message"]
        return message["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.long(3)
def test_the_unmodified_server_replies_on_a_full_disk(store: RunningStore, tmp_path: Path) -> None:
    started = _Server(store.address, tmp_path / "log", most_file_bytes=16 << 10)
    try:
        started.ready()
        messages = [{"role": "user", "content": "My name is Anna. My dog is called Rex."}]
        reply, _ = started.chat(messages)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "What is my dog called?"}]
        assert started.chat(messages)[1] > 16
        assert "a prompt cache is not kept: RuntimeError" in started.log.read_text()
    finally:
        started.process.kill()
        started.process.wait()


@pytest.mark.long(4)
def test_a_cache_that_another_server_quantized_does_not_end_one_that_batches(
    store: RunningStore, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "My name is Anna. My dog is called Rex."}]
    with ExitStack() as ends, store.client() as client:
        quantizes = ("--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "0")
        first = _Server(store.address, tmp_path / "a.log", options=quantizes)
        ends.callback(first.process.kill)
        reply, _ = first.ready().chat(said)
        _wait_until_stored(client)
        first.process.kill()
        said += [{"role": "assistant", "content": reply}, {"role": "user", "content": "What is my dog called?"}]
        second = _Server(store.address, tmp_path / "b.log")
        ends.callback(second.process.kill)
        assert second.ready().chat(said)[1] == 0
        assert "it is none that the model makes" in second.log.read_text()


def _windowed(folder: Path) -> str:
    """kvasir-tiny with windows of 32 tokens."""
    shutil.copytree(_TINY[0], folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * 4
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 32, "layer_types": kinds}))
    return str(folder)


_WINDOWS = {"fewer rows": {"rows": 5}, "another window": {"max_size": 16}, "no window": {"max_size": 0}, "honest": {}}


@pytest.mark.long(9)
def test_a_damaged_window_ends_no_server_and_changes_no_reply(store: RunningStore, tmp_path: Path) -> None:
    path = _windowed(tmp_path / "windowed")
    model, tokenizer, *_ = mlx_lm.load(path)
    said = "The river was cold. Anna carried her dog over the bridge, and Rex looked at the water and the old mill."
    asked = {how: [{"role": "user", "content": f"{how}: {said} Who carried the dog?"}] for how in _WINDOWS}
    with store.client() as client:
        kept = PromptCaches(client, weights_of((path, None, None)))
        for how, numbers in _WINDOWS.items():
            tokens = tokenizer.apply_chat_template(asked[how], add_generation_prompt=True)[:-4]
            cache = make_prompt_cache(model)
            model(mx.array([tokens]), cache=cache)
            for each in cache[::2]:
                each.keys, each.values = (part[..., : numbers.get("rows"), :] for part in (each.keys, each.values))
                each.max_size = numbers.get("max_size", each.max_size)
            save_prompt_cache(str(tmp_path / "saved.safetensors"), cache)
            data = (tmp_path / "saved.safetensors").read_bytes()
            kept.save(f"mlx-lm/{kept.weights_digest[:16]}/{how}", data, tokens)
    with ExitStack() as ends:
        warm, cold = (
            _Server(address, tmp_path / name, options=("--model", path))
            for address, name in ((store.address, "warm.log"), (f"unix:{tmp_path}/none", "cold.log"))
        )
        for each in (warm, cold):
            ends.callback(each.process.kill)
            each.ready()
        for how, messages in asked.items():
            reply, cached = warm.chat(messages)
            assert reply == cold.chat(messages)[0], how
            assert (cached > 32) == (how == "honest"), how


@pytest.mark.long(7)
def test_the_unmodified_server_is_warm_after_kill_9_and_replies_as_one_that_never_ended(
    store: RunningStore, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "My name is Anna. My dog is called Rex."}]
    asked = {"role": "user", "content": "What is my dog called?"}
    with ExitStack() as ends, store.client() as client:
        servers = [_Server(store.address, tmp_path / "a.log"), _Server(f"unix:{tmp_path}/none", tmp_path / "b.log")]
        for each in servers:
            ends.callback(each.process.kill)
        first, never_ended = (each.ready() for each in servers)
        reply, cached = first.chat(said)
        assert cached == 0
        assert never_ended.chat(said)[0] == reply
        said += [{"role": "assistant", "content": reply}, asked]
        _wait_until_stored(client)
        first.process.kill()
        again = _Server(store.address, tmp_path / "c.log")
        ends.callback(again.process.kill)
        warm = again.ready().chat(said)
        assert warm == never_ended.chat(said)
        assert warm[1] > 16
        again.process.terminate()
        assert again.process.wait(_WITHIN_S) == 0
