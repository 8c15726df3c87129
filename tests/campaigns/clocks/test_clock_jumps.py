"""The clocks of store, engine and gateway are set back and forth while agents live: nobody notices."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx2 as httpx
import pytest
from kvasir.clients import InferenceClient
from kvasir.errors import FailedPrecondition
from kvasir.inference.v1 import inference_pb2 as pb

from tests.gateway.conftest import Front, running_front
from tests.made_models.sampling import sampled
from tests.running.set_clock import VARIABLE, set_ahead
from tests.running.waiting import eventually

ROUNDS = sampled(1, of=60)
SEED = int(os.environ.get("KVASIR_SEED", "1"))
_DAY_S = 86_400.0
_AHEAD_S = (-20 * 365 * _DAY_S, -30 * _DAY_S, -7200.0, -60.0, 0.0, 60.0, 7200.0, 30 * _DAY_S, 50 * 365 * _DAY_S)
_EVERY_S = 0.02
SAID = ("My name is Anna.", "My dog is called Rex.", "What is my name?", "What is my dog called?")
GREEDY = pb.Sampling(max_tokens=8, temperature=0)
# Agents and blobs that nobody used for an hour go, and it is looked for them all the time.
_STORE = ("--expires-after-s", "3600", "--gc-interval-s", "0.1")


@contextmanager
def jumping(clock: Path, chance: random.Random) -> Iterator[None]:
    over = threading.Event()

    def jump() -> None:
        while not over.wait(_EVERY_S):
            set_ahead(clock, chance.choice(_AHEAD_S) + chance.uniform(-30, 30))

    thread = threading.Thread(target=jump)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def talk(client: InferenceClient, agent_id: str) -> list[tuple[str, str, int]]:
    """What the agent said, where its memory came from, and how much was reused."""
    replies = [
        client.reply(agent_id=agent_id, append_messages=[{"role": "user", "content": text}], sampling=GREEDY)
        for text in SAID
    ]
    return [(each.text, pb.CacheSource.Name(each.started.source), each.started.cached_tokens) for each in replies]


def is_stored(client: InferenceClient, agent_id: str) -> bool:
    [memory] = client.list_hot_memories([agent_id])
    return memory.is_stored


@pytest.mark.long(6)
@pytest.mark.timeout(3600)
def test_clocks_that_are_set_change_no_turn_and_end_no_lease_token_or_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, chance = tmp_path / "clock", random.Random(SEED)
    monkeypatch.setenv(VARIABLE, str(clock))
    with running_front(tmp_path / "front", store_options=_STORE) as front:
        with front.house.client(front.keys["ada"]) as client:
            calm = talk(client, "calm")
            client.fork_agent("calm", "nobody's")  # no lease keeps it
            for number in range(ROUNDS):
                with jumping(clock, chance):
                    assert talk(client, f"round {number}") == calm
                    eventually(partial(is_stored, client, f"round {number}"))
                    answers_by_key(front)
                    nobody_else_takes(front, f"round {number}")
        front.house.engine.kill()
        with jumping(clock, chance):
            front.house.engine.start()
            with front.house.client(front.keys["ada"]) as client:
                question = [{"role": "user", "content": SAID[2]}]
                last = client.reply(agent_id=f"round {ROUNDS - 1}", append_messages=question, sampling=GREEDY)
                assert (pb.CacheSource.Name(last.started.source), "Anna" in last.text) == ("CACHE_SOURCE_WARM", True)
                assert len(client.list_agents().agents) == ROUNDS + 2
    print(f"{ROUNDS} rounds, seed {SEED}")


def nobody_else_takes(front: Front, agent_id: str) -> None:
    """The engine has the agent's lease, whatever a clock says."""
    with front.house.store_client(front.keys["engine-first"]) as store:
        [line] = store.get_agent(agent_id).lines
        for _ in range(10):
            with pytest.raises(FailedPrecondition) as refused:
                store.acquire_lease(agent_id, line.kv_identity_hash, "another engine", ttl_s=10)
            assert refused.value.reason == "LEASE_HELD"
            time.sleep(_EVERY_S)


def answers_by_key(front: Front) -> None:
    for caller, status in (("ada", 200), ("eve", 200)):
        answer = httpx.get(f"{front.gateway.url}/v1/models", headers=front.bearer(caller), timeout=30)
        assert answer.status_code == status
    assert httpx.get(f"{front.gateway.url}/v1/models", headers={"authorization": "Bearer x"}).status_code == 401
