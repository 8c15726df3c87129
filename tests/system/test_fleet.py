"""`make fleet`: three engines, a store on PostgreSQL and S3, a gateway and a balancer, as one command starts them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import certifi
import httpx2 as httpx
import pytest
from kvasir.clients import InferenceClient
from kvasir.credentials import read_token
from kvasir.errors import Unavailable
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.memory.store.answers import LEASE_TTL_S
from tests.cli.running import process_exists
from tests.running import in_memory
from tests.running.system_fixtures import ROOT, running_house
from tools.fleet import servers
from tools.fleet.fleet import Fleet, Plan
from tools.fleet.part import FleetError, program

PETS = ("Rex", "Tom", "Max", "Leo", "Sam")
AGENTS = [f"agent-{number}" for number in range(len(PETS))]
# A machine that runs other tests besides is slow, not wrong; and a host may have no certificates of authorities.
SETTINGS = {
    "SSL_CERT_FILE": certifi.where(),
    "KVASIR_ENGINE_STORE_BUDGET_MS": "5000",
    "KVASIR_ENGINE_COMMIT_WAIT_S": "20",
}


def words_of(pet: str) -> list[str]:
    return [f"My dog is called {pet}.", "What is my dog called?", "My name is Anna.", "What is my name?"]


@contextmanager
def fleet_process(*options: str) -> Iterator[tuple[dict[str, Any], "subprocess.Popen[str]"]]:
    """The command, once all is ready; it is ended by SIGINT, as by Ctrl-C."""
    root = in_memory.home()
    command = [sys.executable, "-m", "tools.fleet", "--dir", str(root), "--json", *options]
    log = root.with_suffix(".log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **SETTINGS}, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line), process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
        log.unlink()
        shutil.rmtree(root)


def tokens_of(client: InferenceClient, agent: str, words: str) -> list[int]:
    """A turn that is stored when it ends; again, with its request id, while an engine that was killed is missed."""
    give_up, request_id = time.monotonic() + 8 * LEASE_TTL_S, str(uuid.uuid4())
    while True:
        try:
            reply = client.reply(
                agent_id=agent,
                append_messages=[{"role": "user", "content": words}],
                sampling={"temperature": 0.0, "max_tokens": 12},
                timeout_s=60,
                request_id=request_id,
            )
        except Unavailable:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)
        else:
            assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
            return list(reply.token_ids)


def text_over_http(facts: dict[str, Any], agent: str, words: str) -> str:
    key = read_token(Path(facts["token_file"]))
    answer = httpx.post(
        f"{facts['http']}/v1/chat/completions",
        headers={"x-agent-id": agent, "x-agent-memory": "append", "authorization": f"Bearer {key}"},
        json={
            "model": "kvasir-tiny",
            "messages": [{"role": "user", "content": words}],
            "temperature": 0,
            "max_tokens": 12,
        },
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def stayed(root: Path) -> tuple[list[list[list[int]]], list[str]]:
    """The same agents at one engine, which they never left: tokens of all turns, and the text of the last question."""
    with running_house(root) as house, house.client() as client:
        tokens = [
            [tokens_of(client, agent, words) for words in words_of(pet)]
            for agent, pet in zip(AGENTS, PETS, strict=True)
        ]
        last = [
            client.reply(
                agent_id=agent,
                append_messages=[{"role": "user", "content": "What is my dog called?"}],
                sampling={"temperature": 0.0, "max_tokens": 12},
            ).text
            for agent in AGENTS
        ]
    return tokens, last


@pytest.mark.long(25)
@pytest.mark.skipif(bool(servers.missing()), reason=servers.missing())
@pytest.mark.parametrize("door", servers.DOORS)
def test_five_agents_of_a_fleet_go_on_after_a_kill_as_if_they_had_never_left(tmp_path: Path, door: str) -> None:
    if why := servers.missing(door):
        pytest.skip(why)
    with futures.ThreadPoolExecutor(5) as pool:
        reference = pool.submit(stayed, tmp_path / "house")
        with fleet_process("--door", door) as (facts, process):
            token = read_token(Path(facts["token_file"]))
            with InferenceClient.connect(facts["door"], token=token) as client:
                heard = _talk(client, token, facts, pool)
            tokens, last = reference.result()
            assert heard == tokens
            assert [text_over_http(facts, agent, "What is my dog called?") for agent in AGENTS] == last
            pids = [*facts["pids"].values(), *(each["pid"] for each in facts["stores"])]
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
            assert not [pid for pid in pids if process_exists(pid)], "Ctrl-C ends all"


def _talk(
    client: InferenceClient, token: str, facts: dict[str, Any], pool: futures.ThreadPoolExecutor
) -> list[list[list[int]]]:
    """All agents' turns by the balancer, and between them a kill -9 of an engine that has some of the agents."""

    def turns(number: int, which: slice) -> list[list[int]]:
        return [tokens_of(client, AGENTS[number], words) for words in words_of(PETS[number])[which]]

    numbers = range(len(AGENTS))
    before = list(pool.map(turns, numbers, [slice(0, 2)] * len(AGENTS)))
    engines = {each["address"]: each["pid"] for each in facts["engines"]}
    hot = {address: _hot_at(address, token) for address in engines}
    assert sorted(agent for agents in hot.values() for agent in agents) == AGENTS, "each is at one engine"
    os.kill(engines[max(hot, key=lambda address: len(hot[address]))], signal.SIGKILL)
    after = list(pool.map(turns, numbers, [slice(2, 4)] * len(AGENTS)))
    return [[*first, *later] for first, later in zip(before, after, strict=True)]


def _hot_at(address: str, token: str) -> set[str]:
    with InferenceClient.connect(address, token=token) as client:
        return {each.agent_id for each in client.list_hot_memories(AGENTS)}


def test_a_part_that_is_not_installed_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FleetError, match=r"^nothing is not installed here\. `apt install nothing`$"):
        program("nothing", "/usr/lib/nothing/*/bin", advice="`apt install nothing`")
    assert program("env", "/usr/b*", advice="") == "/usr/bin/env"


@pytest.mark.long(2)
@pytest.mark.skipif(bool(servers.missing()), reason=servers.missing())
def test_a_second_fleet_in_a_directory_is_refused_by_the_first_ones_pid(tmp_path: Path) -> None:
    import fcntl

    lock = (tmp_path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "tools.fleet", "--dir", str(tmp_path)]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 1
    assert f"kill {os.getpid()}" in refused.stderr


@pytest.mark.skipif(bool(servers.missing()), reason=servers.missing())
def test_engines_of_a_fleet_are_divided_among_its_stores(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet", Plan(3, "none", stores=2))
    fleet.set_up_engines()
    called = [each.part.argv[each.part.argv.index("--store") + 1] for each in fleet.engines]
    first, second = (each.address for each in fleet.stores)
    assert called == [first, second, first]
