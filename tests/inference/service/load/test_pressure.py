"""Whoever goes away, stops reading or asks for too much frees its place within a step or a cell; nobody else waits."""

import http.client
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.credentials import CLIENT, Principal, write_credentials
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc

from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.made_models.sampling import first_and_in_turn
from tests.running.programs import run
from tests.running.system_fixtures import ROOT, House, running_house

GREEDY = {"max_tokens": 6}
PASSAGE = "The archive lists every door by its key; the seventh key is missing since the flood of spring. "
LONG = {"max_tokens": 1500, "stop_token_ids": []}

# A program of its own: it asks, says that it was heard, and waits to be killed with its socket open.
ASKER = """
import sys, time
from kvasir.clients import InferenceClient
client = InferenceClient.connect(sys.argv[1])
events = client.generate(agent_id=sys.argv[2], prompt=sys.argv[3], sampling={"max_tokens": 1000})
print(next(events).WhichOneof("event"), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide and deep enough that a prompt of some thousand tokens takes it seconds."""
    config = {**LLAMA, "hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 2048}
    return write_model(tmp_path_factory.mktemp("slow") / "slow", config)


@pytest.fixture(scope="module")
def slow(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    options = ("--max-unread-bytes", "3000", "--store-budget-ms", "3600000")
    with running_house(tmp_path_factory.mktemp("pressure"), slow_model, engine_options=options) as house:
        yield house


@pytest.fixture
def client(slow: House) -> Iterator[InferenceClient]:
    with slow.client() as client:
        yield client


def turns_under_way(client: InferenceClient) -> int:
    return sum(each.waiting_turns + each.running_turns for each in client.get_stats().namespaces)


def until_free(client: InferenceClient, kv_bytes: float = math.inf) -> None:
    """Until no turn waits or runs, and no more of KV is used, which a step counts at its end."""
    began = time.monotonic()
    while turns_under_way(client) or client.get_stats().engine.kv_memory_used_bytes > kv_bytes:
        assert time.monotonic() - began < 20, "the place was never freed"
        time.sleep(0.01)


def prefilled_tokens(client: InferenceClient) -> int:
    return sum(each.prefilled_tokens for each in client.get_stats().namespaces)


def ends(client: InferenceClient) -> dict[str, int]:
    return dict(client.get_stats().namespaces[0].turn_ends) if client.get_stats().namespaces else {}


def ask_from_another_process(house: House, agent: str, prompt: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ASKER, house.engine.address, agent, prompt]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "started"
    return process


@pytest.mark.long(4)
@pytest.mark.parametrize("words", [4, 3000], ids=["while it decodes", "while it prefills"])
def test_a_client_that_is_killed_frees_its_row_within_a_step_or_a_cell(
    slow: House, client: InferenceClient, words: int
) -> None:
    """(LESSONS 25) Its socket closes, and nothing decodes for nobody."""
    before = client.get_stats().engine.kv_memory_used_bytes
    asker = ask_from_another_process(slow, f"killed {words}", "door " * words)
    if words == 4:
        time.sleep(0.3)
    assert turns_under_way(client) == 1
    asker.kill()
    asker.wait()
    until_free(client, before)
    prefilled = prefilled_tokens(client)
    time.sleep(0.3)
    assert prefilled_tokens(client) == prefilled


@pytest.mark.parametrize("how", first_and_in_turn(["cancel", "deadline"], seconds=2))
def test_a_cancel_and_a_deadline_stop_a_prefill_within_a_cell(client: InferenceClient, how: str) -> None:
    before = prefilled_tokens(client)
    events = client.generate(prompt="door " * 3800, sampling=GREEDY, timeout_s=1.0 if how == "deadline" else None)
    if how == "cancel":
        assert next(events).HasField("started")
        events.close()
    else:
        with pytest.raises(errors.DeadlineExceeded):
            for _ in events:
                pass
    until_free(client)
    assert prefilled_tokens(client) - before < 3800


@pytest.mark.long(13)
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_turn_that_waits_for_its_store_is_let_go_at_once(slow: House, client: InferenceClient, how: str) -> None:
    """(LESSONS 25) Its budget for the store is an hour here; nobody waits for it once the caller is gone."""
    agent = f"store hangs {how}"
    client.reply(agent_id=agent, prompt=f"{agent} {PASSAGE}", sampling=GREEDY)
    slow.engine.kill()
    slow.engine.start()
    client.get_stats()
    slow.store.freeze()
    try:
        with grpc.insecure_channel(slow.engine.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            request = pb.GenerateRequest(agent_id=agent, prompt=f"{agent} {PASSAGE} And?")
            call = None
            while call is None or not call.is_active():  # again, if its deadline was over before the turn was seen
                call = stub.Generate(request, timeout=2.0 if how == "deadline" else None)
                while turns_under_way(client) != 1 and call.is_active():
                    time.sleep(0.02)
            if how == "cancel":
                call.cancel()
            with pytest.raises(grpc.RpcError):
                list(call)
        until_free(client)
        assert ends(client).keys() == {"cancelled"}
    finally:
        slow.store.thaw()
        slow.repair()


@pytest.mark.long(3)
def test_a_reader_that_never_reads_is_ended_and_its_row_is_free_while_others_go_on(
    slow: House, client: InferenceClient
) -> None:
    """(LESSONS 36) The reply piles up behind a closed window; at 3,000 unread bytes the turn is over."""
    # The smallest window that gRPC has, so that the test needs no megabytes.
    options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.max_frame_size", 16384)]
    with grpc.insecure_channel(slow.engine.address, options=options) as channel:
        sampling = pb.Sampling(max_tokens=3500, logprobs=True, top_logprobs=20)
        request = pb.GenerateRequest(prompt="door", sampling=sampling)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request)
        assert next(call).HasField("started")
        other = client.generate(prompt="another", sampling={"max_tokens": 40})
        heard = Reply()
        for event in other:
            heard.add(event)
        assert len(heard.token_ids) == heard.finished.usage.completion_tokens
        began = time.monotonic()
        while turns_under_way(client):
            assert time.monotonic() - began < 60, "it decodes for nobody"
            time.sleep(0.05)
        decoded = client.get_stats().namespaces[0].decoded_tokens
        assert decoded < 3000
        # Whoever reads on after all is told why.
        with pytest.raises(grpc.RpcError) as ended:
            for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert "unread" in ended.value.details()  # type: ignore[attr-defined]


def test_one_namespace_leaves_places_for_the_next_and_is_told_when_to_come_back(model: Path, tmp_path: Path) -> None:
    house = House(tmp_path, model, engine_options=("--max-turns", "4"))
    people = [Principal(name, name[:5], frozenset({CLIENT})) for name in ("north1", "north2", "south1")]
    tokens = write_credentials(tmp_path / "credentials.toml", people, lambda: secrets.token_urlsafe(32))
    house.engine.options += ["--credentials-file", str(tmp_path / "credentials.toml")]
    try:
        house.start()
        with house.client(tokens["north1"]) as north, house.client(tokens["south1"]) as south:
            running = [north.generate(prompt=f"{name} door", sampling=LONG) for name in "abc"]
            for events in running:
                next(events)
            with house.client(tokens["north2"]) as colleague, pytest.raises(errors.ResourceExhausted) as busy:
                colleague.reply(prompt="d door")
            assert (busy.value.reason, busy.value.metadata["max_turns"]) == ("NAMESPACE_BUSY", "3")
            assert busy.value.retry_after_s
            assert south.reply(prompt="e door", sampling=GREEDY).token_ids
            for events in running:
                events.close()
            # Nobody sees what others do.
            [stats] = south.get_stats().namespaces
            assert (stats.namespace, stats.turns, dict(stats.refusals)) == ("south", 1, {})
            [stats] = north.get_stats().namespaces
            assert (stats.turns, dict(stats.refusals)) == (3, {"NAMESPACE_BUSY": 1})
            assert north.get_capabilities().limits.max_turns_per_namespace == 3
    finally:
        house.close()


@pytest.mark.long(8)
def test_sigterm_in_the_middle_of_turns_leaves_every_memory_warm(model: Path, tmp_path: Path) -> None:
    """Those that may end do, those that take longer are ended, and what an outage kept from the store is stored."""
    options = ("--stop-grace-s", "0.5")  # the long reply takes 1.8 s on an idle machine
    with running_house(tmp_path, model, engine_options=options) as house, house.client() as client:
        told = {f"agent {number}": f"agent {number}: {PASSAGE * 6}" for number in range(3)}
        for agent, text in told.items():
            client.reply(agent_id=agent, prompt=text, sampling=GREEDY)
        # Stored late: the store comes back after the reply was told, and the engine is told to go at once.
        house.store.freeze()
        pending = client.reply(agent_id="agent 0", prompt=told["agent 0"] + "So?", sampling=GREEDY, timeout_s=60)
        assert pending.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
        house.store.thaw()
        events = client.generate(agent_id="agent 1", prompt=told["agent 1"] + "And then?", sampling=LONG)
        next(events)
        os.kill(house.engine.pid, signal.SIGTERM)
        with pytest.raises(errors.KvasirError):
            for _ in events:
                pass
        assert house.engine._process is not None
        assert house.engine._process.wait(60) == 0
        house.engine.start()
        for agent, text in told.items():
            again = client.reply(agent_id=agent, prompt=text + "So?", sampling=GREEDY)
            assert again.started.source == pb.CACHE_SOURCE_WARM, agent
            assert again.started.parent_version == (2 if agent == "agent 0" else 1), agent
            assert again.started.cached_tokens > 200, agent


@pytest.mark.long(3)
def test_metrics_tell_the_same_as_statistics_and_name_nobody(
    model: Path, tmp_path: Path, unused_port: Callable[[], int]
) -> None:
    port = unused_port()
    options = ("--metrics-listen", f"127.0.0.1:{port}")
    with running_house(tmp_path, model, engine_options=options) as house, house.client() as client:
        client.reply(agent_id="ada lovelace", prompt=PASSAGE * 4, sampling=GREEDY)
        client.reply(agent_id="ada lovelace", prompt=PASSAGE * 4 + "So?", sampling=GREEDY)
        [stats] = client.get_stats().namespaces
        page = scrape(port)
        for line in (
            'kvasir_sources_total{source="cold"} 1.0',
            'kvasir_sources_total{source="hot"} 1.0',
            'kvasir_misses_total{reason="new_agent"} 1.0',
            'kvasir_publications_total{state="committed"} 2.0',
            'kvasir_turn_ends_total{end="finished"} 2.0',
            'kvasir_model_loaded{model="sharpened"} 1.0',
            f"kvasir_cached_tokens_total {float(stats.cached_tokens)}",
            f"kvasir_prefilled_tokens_total {float(stats.prefilled_tokens)}",
            f"kvasir_decoded_tokens_total {float(stats.decoded_tokens)}",
            "kvasir_running_turns 0.0",
        ):
            assert line in page
        assert stats.decoded_tokens == 12
        assert "lovelace" not in page
        assert "default" not in page


@pytest.fixture
def unused_port() -> Callable[[], int]:
    def find() -> int:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return find


def scrape(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


@pytest.mark.parametrize("address", ["0.0.0.0:9000", "unix:/tmp/kv-none/metrics", "example.com:9000", "9000"])
def test_metrics_are_for_this_machine_only(address: str) -> None:
    ended = run("inference_svc", "serve", "--listen", "unix:/tmp/kv-none/s", "--metrics-listen", address)
    assert ended.returncode == 78
    assert "--metrics-listen" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_more_memory_than_the_device_has_is_refused_with_numbers() -> None:
    ended = run("inference_svc", "serve", "--listen", "unix:/tmp/kv-none/s", "--memory-gib", "65536")
    assert ended.returncode == 78
    of_others = r"( in all|, of which other engines here claim [\d.]+)"
    assert re.search(rf"--memory-gib 65536: the device has [\d.]+ GiB{of_others}; the weights take ", ended.stderr)


def test_an_engine_that_cannot_claim_memory_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / f"kvasir-memory-{os.getuid()}").touch()
    ended = run("inference_svc", "serve", "--listen", "unix:/tmp/kv-none/s", env={"TMPDIR": str(tmp_path)})
    assert ended.returncode == 78
    assert "claims to memory" in ended.stderr
    assert "Traceback" not in ended.stderr
