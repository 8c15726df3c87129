"""One gateway before two engines of one store: agents share them, and go on at the other when one is killed."""

import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.clients import InferenceClient

from inference_svc.memory.store.answers import LEASE_TTL_S
from tests.gateway.page.html_page import HTML, Html, parsed
from tests.gateway.serving import MODEL, GatewayProcess
from tests.inference.handover.cases import ON
from tests.running.system_fixtures import ENGINE_SERVICE, House, Service, running_house

WORDS = ("My dog is called Rex.", "What is my dog called?", "My cat is called Tom.", "What is my cat called?")
NAMES = [f"agent-{number}" for number in range(6)]


@dataclass
class Pair:
    house: House
    second: Service
    gateway: GatewayProcess

    def said(self, agent: str, words: str) -> str:
        """A turn of an agent that remembers, over OpenAI's API."""
        answer = httpx.post(
            f"{self.gateway.url}/v1/chat/completions",
            headers={"x-agent-id": agent, "x-agent-memory": "append"},
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": words}],
                "temperature": 0,
                "max_tokens": 12,
            },
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return str(told["choices"][0]["message"]["content"])

    def shown(self, path: str) -> Html:
        answer = httpx.get(f"{self.gateway.url}{path}", headers=HTML, timeout=5)
        assert answer.status_code == 200, answer.text
        return parsed(answer.text)

    def hot_at(self, service: Service, *agents: str) -> set[str]:
        with InferenceClient.connect(service.address) as client:
            return {each.agent_id for each in client.list_hot_memories(agents or NAMES)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("pair")
    with running_house(root / "house") as house:
        socket = Path(house.engine.address.removeprefix("unix:")).with_name("e2")
        second = Service("second", "inference_svc", ENGINE_SERVICE, socket, root / "second.log")
        second.options = [*house.engine.options, "--state-dir", str(root / "state2")]
        second.start()
        gateway = GatewayProcess(house, "--engine", second.address, "--no-keys")
        gateway.start()
        try:
            yield Pair(house, second, gateway)
        finally:
            gateway.kill()
            second.kill()


@pytest.mark.long(4)
def test_a_turn_goes_to_the_engine_that_holds_its_agent_and_waits_there(pair: Pair) -> None:
    """Another client's turn runs at the engine to which the gateway would not have sent it."""
    pair.said("held", WORDS[0])
    other = pair.house.engine if "held" in pair.hot_at(pair.second, "held") else pair.second
    with InferenceClient.connect(other.address) as client, futures.ThreadPoolExecutor(1) as beside:
        running = client.generate(
            agent_id="held",
            append_messages=[{"role": "user", "content": "Go on."}],
            sampling={**ON, "max_tokens": 3000},
        )
        while not next(running).HasField("delta"):
            pass
        answer = beside.submit(pair.said, "held", WORDS[1])
        while len(client.list_turns()) < 2:
            assert not answer.done(), answer.result()
            time.sleep(0.05)
        running.close()
        assert "Rex" in answer.result(60)
        pair.said("held", WORDS[2])  # it stays where it is hot now
        assert "held" in pair.hot_at(other, "held")


@pytest.mark.long(8)
def test_agents_share_two_engines_stay_where_they_are_hot_and_outlive_a_kill(pair: Pair) -> None:
    first = {name: [pair.said(name, words) for words in WORDS[:2]] for name in NAMES}
    assert len({tuple(each) for each in first.values()}) == 1, "the same turns, at whichever engine"
    at_first, at_second = pair.hot_at(pair.house.engine), pair.hot_at(pair.second)
    assert at_first | at_second == {*NAMES}
    assert not at_first & at_second, "an agent's turns went to one engine"
    assert at_first
    assert at_second
    gone, left = pair.house.engine, pair.second
    stayed = [pair.said(min(at_second), words) for words in WORDS[2:]]
    gone.kill()
    began = time.monotonic()
    moved = [pair.said(min(at_first), words) for words in WORDS[2:]]
    assert time.monotonic() - began < 3 * LEASE_TTL_S
    assert moved == stayed, "as the one that never left"
    assert min(at_first) in pair.hot_at(left)
    health = httpx.get(f"{pair.gateway.url}/healthz")
    assert (health.status_code, [each["reason"] for each in health.json()["problems"]]) == (200, ["ENGINE_UNREACHABLE"])
    gone.start()
    found, later = set[str](), list[str]()
    while not found:  # once it answers again, new agents go there, too
        assert len(later) < 60
        later.append(f"later-{len(later)}")
        pair.said(later[-1], WORDS[0])
        found = pair.hot_at(gone, *later)


@pytest.mark.long(3)
def test_a_call_about_an_agent_goes_to_the_engine_that_has_it_hot(pair: Pair) -> None:
    """What is not stored yet, that one alone knows. The other one is frozen: a call there would hang."""
    agents = f"{pair.gateway.url}/v1/agents"
    names = [f"called-{number}" for number in range(6)]
    for name in names:
        pair.said(name, WORDS[0])
    services = (pair.house.engine, pair.second)
    hot = [pair.hot_at(service, *names) for service in services]
    assert all(hot)
    for frozen, there in zip(services, reversed(hot), strict=True):
        name = min(there)
        frozen.freeze()
        try:
            assert httpx.get(f"{agents}/{name}", timeout=5).status_code == 200
            assert httpx.get(f"{agents}/{name}/versions", timeout=5).status_code == 200
            forked = httpx.post(f"{agents}/{name}/fork", json={"agent_id": f"{name}-fork"}, timeout=5)
            assert forked.status_code == 201
            rolled = httpx.post(f"{agents}/{name}/rollback", json={"version": 1}, timeout=5)
            assert rolled.status_code == 200, rolled.text
            assert pair.shown(f"/page/agent?id={name}").all("h1")
            page = pair.shown(f"/page/chat?id={name}")
            fields = page.fields(page.form("say")) | {"text": WORDS[1]}
            origin = {"origin": pair.gateway.url}
            assert (
                httpx.post(f"{pair.gateway.url}/page/say", data=fields, headers=origin, timeout=20).status_code == 303
            )
            assert "Your dog is called Rex" in pair.shown(f"/page/chat?id={name}").text
            assert httpx.delete(f"{agents}/{name}", timeout=5).status_code == 200
        finally:
            frozen.thaw()
