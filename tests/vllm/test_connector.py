"""Unmodified vLLM with stored KV generates the same as without: after `kill -9`, and with its store gone.

`make test-vllm VLLM=PYTHON` runs it with a Python that has vLLM, on a CPU or a GPU."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvasir.clients import StoreClient

from inference_svc.model import kvasir_tiny
from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import ROOT, RunningStore, StoreHome, store_home

_PYTHON = os.environ.get("KVASIR_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not _PYTHON, reason="needs a Python with vLLM: make test-vllm VLLM=PYTHON"),
    pytest.mark.timeout(1800),
]
_TOKENS = 24
_TOKEN_BYTES = 2_097_152 // 256  # of kvasir-tiny in fp32
_WITHIN_S = 900.0
_ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT / 'clients' / 'python'}",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
Made = list[tuple[list[int], int]]  # the tokens of each reply, and how many of its prompt were not computed


def _prompt(seed: int, tokens: int) -> list[int]:
    return [3 + (seed * 977 + place * place * 31 + place * seed) % 900 for place in range(tokens)]


class _Vllm:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.preempted = 0  # requests that lost their blocks to others, in all

    def generate(self, *prompts: list[int], on_finished: Callable[[int], None] = lambda _number: None) -> Made:
        """`on_finished`: gets the number of each prompt whose reply is whole."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(prompts), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("PREEMPTED "):
                self.preempted = int(line[10:])
            if line.startswith("FINISHED "):
                on_finished(int(line[9:]))
            if line.startswith("MADE "):
                return [(tokens, cached) for tokens, cached in json.loads(line[5:])]
        raise AssertionError("vLLM ended")

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def _vllm(
    address: str | None, log: Path, policy: str = "recompute", waiting_mib: int = 4096, **others: Any
) -> Iterator[_Vllm]:
    connector = address and {
        "kv_connector": "KvasirConnector",
        "kv_connector_module_path": "kvasir.store_for_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"store": address, "waiting_mib": waiting_mib},
    }
    settings = {"model": str(kvasir_tiny.path()), "connector": connector, "most": _TOKENS, "others": others}
    with (
        log.open("a") as errors,
        subprocess.Popen(
            [_PYTHON, str(ROOT / "tests" / "vllm" / "generate.py")],
            env=os.environ | _ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        running = _Vllm(process)
        try:
            assert process.stdin
            print(json.dumps(settings), file=process.stdin, flush=True)
            yield running
        finally:
            if process.poll() is None:
                running.kill()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "log"


PROMPTS = [_prompt(1, 700), _prompt(2, 1100), [*_prompt(1, 512), *_prompt(3, 300)], _prompt(4, 90)]


@pytest.fixture(scope="module")
def plain(log: Path) -> tuple[Made, Made]:
    """Replies of vLLM to the prompts and to the turns behind them, without a store and without its own cache."""
    with _vllm(None, log, enable_prefix_caching=False) as vllm:
        first = vllm.generate(*PROMPTS)
        return first, vllm.generate(*_next(first))


def _next(made: Made) -> list[list[int]]:
    """The next turns: prompt, reply, and more."""
    return [[*prompt, *tokens, *_prompt(9, 300)] for prompt, (tokens, _) in zip(PROMPTS, made, strict=True)]


def _tokens(made: Made) -> list[list[int]]:
    return [tokens for tokens, _ in made]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[StoreHome]:
    with store_home(tmp_path / "h") as made:
        yield made


def _wait_until_stored(store: RunningStore, tokens: int) -> None:
    give_up = time.monotonic() + _WITHIN_S
    with StoreClient.connect(store.address) as client:
        while True:
            found = [line.token_count for agent in client.list_agents().agents for line in agent.lines]
            if sum(found) >= tokens:
                return
            assert time.monotonic() < give_up, found
            time.sleep(0.2)


def test_it_is_warm_after_a_kill_and_generates_the_same(home: StoreHome, plain: tuple[Made, Made], log: Path) -> None:
    store = home.start()
    with _vllm(store.address, log) as cold:
        first = cold.generate(*PROMPTS)
        assert _tokens(first) == _tokens(plain[0])
        _wait_until_stored(store, 1024 + 768)  # the first prompt begins the third
        cold.kill()
    with _vllm(store.address, log) as warm:
        again = warm.generate(*PROMPTS)
        assert _tokens(again) == _tokens(plain[0])
        assert [cached for _, cached in again] == [512, 1024, 768, 0]
        assert _tokens(warm.generate(*_next(first))) == _tokens(plain[1])
        assert warm.generate() == []  # resets the caches, as after new weights
        assert [cached for _, cached in warm.generate(PROMPTS[0])] == [0]


def test_another_implementation_of_the_model_takes_none_of_its_kv(home: StoreHome, log: Path) -> None:
    store = home.start()
    with _vllm(store.address, log) as vllm:
        vllm.generate(PROMPTS[0])
        _wait_until_stored(store, 512)
    with _vllm(store.address, log, model_impl="transformers") as other:
        assert [cached for _, cached in other.generate(PROMPTS[0])] == [0]


def test_a_store_that_is_gone_costs_no_request(home: StoreHome, plain: tuple[Made, Made], log: Path) -> None:
    store = home.start()
    with _vllm(store.address, log) as vllm:
        vllm.generate(*PROMPTS[:1])
        _wait_until_stored(store, 512)
        store.kill()
        assert _tokens(vllm.generate(*PROMPTS)) == _tokens(plain[0])


def test_others_are_computed_while_a_request_waits_for_its_blocks(
    home: StoreHome, plain: tuple[Made, Made], log: Path
) -> None:
    store, came = home.start(), dict[int, int]()
    with _vllm(store.address, log) as vllm:
        vllm.generate(PROMPTS[0])
        _wait_until_stored(store, 512)
    with proxy_to(store.address) as link, _vllm(link.address, log) as vllm:
        link.pause_s = 0.06  # a quarter of a minute for two blocks
        made = vllm.generate(
            PROMPTS[0], PROMPTS[3], on_finished=lambda number: came.update({number: link.received_bytes})
        )
        assert _tokens(made) == [plain[0][0][0], plain[0][3][0]]
        assert [cached for _, cached in made] == [512, 0]
    assert came[1] < 512 * _TOKEN_BYTES < came[0]


def test_stored_bytes_that_are_damaged_are_computed_again(home: StoreHome, plain: tuple[Made, Made], log: Path) -> None:
    store = home.start()
    with _vllm(store.address, log) as vllm:
        vllm.generate(*PROMPTS[:2])
        _wait_until_stored(store, 512 + 1024)
    for blob in [each for each in store.data_dir.rglob("*") if each.is_file() and each.stat().st_size > 1_000_000]:
        with blob.open("r+b") as file:
            file.seek(500_000)
            file.write(b"damaged")
    with _vllm(store.address, log) as vllm:
        found = vllm.generate(*PROMPTS)
        assert _tokens(found) == _tokens(plain[0])
        assert _tokens(vllm.generate(*_next(found))) == _tokens(plain[1])


def test_pieces_of_prompts_and_requests_that_lose_their_blocks_are_read_the_same(
    home: StoreHome, plain: tuple[Made, Made], log: Path
) -> None:
    store = home.start()
    tight = {"max_model_len": 1536, "max_num_batched_tokens": 320, "block_size": 128, "num_gpu_blocks_override": 14}
    for _ in ("cold", "warm"):
        with _vllm(store.address, log, **tight) as vllm:
            first = vllm.generate(*PROMPTS)
            assert _tokens(first) == _tokens(plain[0])
            assert _tokens(vllm.generate(*_next(first))) == _tokens(plain[1])
            assert vllm.preempted > 0
            _wait_until_stored(store, 1024)


def test_copies_that_wait_for_the_store_are_bounded(home: StoreHome, plain: tuple[Made, Made], log: Path) -> None:
    store = home.start()
    with _vllm(store.address, log, waiting_mib=2 * 256 * _TOKEN_BYTES >> 20) as vllm:
        assert _tokens(vllm.generate(PROMPTS[1])) == _tokens(plain[0][1:2])  # its 4 blocks are too many
        assert _tokens(vllm.generate(PROMPTS[0])) == _tokens(plain[0][:1])
        _wait_until_stored(store, 512)
        with StoreClient.connect(store.address) as client:
            assert [line.token_count for agent in client.list_agents().agents for line in agent.lines] == [512]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"policy": "fail"}, "kv_load_failure_policy: expected recompute, got fail"),
        ({"load_format": "dummy"}, r"expected weights in \*\.safetensors, got .* by --load-format dummy"),
    ],
)
def test_a_setting_that_would_cost_requests_or_exactness_is_refused_by_name(
    home: StoreHome, tmp_path: Path, settings: dict[str, str], why: str
) -> None:
    with _vllm(home.start().address, tmp_path / "log", **settings) as vllm, pytest.raises(AssertionError):
        vllm.generate(PROMPTS[3])
    assert re.search(why, (tmp_path / "log").read_text())
