"""Conversations over HTTP go on over midnight: the date of their model's template stays the one they began with."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest

from inference_svc.model import kvasir_tiny
from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import running_gateway
from tests.made_models.dated_model import dated
from tests.made_models.sampling import first_and_in_turn

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "My name is Anna, and my dog is called Rex. Please remember both. " * 8}]
KEPT = "template-date"


@pytest.fixture(scope="module")
def midnights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    root = tmp_path_factory.mktemp("midnights")
    with running_front(root / "front", model=dated(kvasir_tiny.path(), root / "model")) as front:
        yield front


def ask(front: Front, messages: list[dict[str, str]], **headers: str) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 12, "model": "any"}
    answer = httpx.post(front.gateway.url + CHAT, json=body, headers=front.bearer() | headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def goes_on(messages: list[dict[str, str]], answer: httpx.Response) -> list[dict[str, str]]:
    reply = answer.json()["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "And now?"}]


def cached(answer: httpx.Response) -> Any:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def tokens(answer: httpx.Response) -> Any:
    usage = answer.json()["usage"]
    return usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.long(3)
def test_a_conversation_without_a_name_is_reused_whole_also_after_a_kill(midnights: Front) -> None:
    messages = [*HELLO]
    before = ask(midnights, messages)
    assert "x-kvasir-volatile" not in before.headers
    agents = {before.headers["x-agent-id"]}
    for number in range(3):
        if number == 1:
            midnights.gateway.kill()
            midnights.house.restart()
            midnights.gateway.start()
        messages = goes_on(messages, before)
        answer = ask(midnights, messages)
        assert answer.headers["x-kvasir-volatile"] == KEPT
        assert cached(answer) > tokens(before) - 4  # a reply that was cut may end inside a character
        agents.add(answer.headers["x-agent-id"])
        before = answer
    assert len(agents) == 1


@pytest.mark.long(3)
def test_a_stream_and_a_named_agent_tell_it_too(midnights: Front) -> None:
    name = {"x-agent-id": "named"}
    first = ask(midnights, HELLO, **name)
    body = {"messages": goes_on(HELLO, first), "max_tokens": 4, "model": "any", "stream": True}
    with httpx.stream(
        "POST", midnights.gateway.url + CHAT, json=body, headers=midnights.bearer() | name, timeout=60
    ) as told:
        told.read()
        assert told.headers["x-kvasir-volatile"] == KEPT
    own = f"{midnights.gateway.url}/v1/agents/named/generate"
    body = {"append_messages": HELLO, "sampling": {"max_tokens": 4}}
    for asked, kept in (({}, KEPT), ({"x-kvasir-volatile": "none"}, None)):
        answer = httpx.post(own, json=body, headers=midnights.bearer() | asked, timeout=60)
        assert answer.headers.get("x-kvasir-volatile") == kept, answer.text


@pytest.mark.parametrize("rules", first_and_in_turn(["billing-line", "none"], seconds=2))
def test_without_the_rule_every_turn_prints_its_own_date(midnights: Front, rules: str) -> None:
    options = ("--credentials", str(midnights.house.root / "credentials.toml"), "--volatile", rules)
    with running_gateway(midnights.house, *options, name=f"without-{rules}") as gateway:
        front = replace(midnights, gateway=gateway)
        messages = [{"role": "user", "content": f"{rules}: {HELLO[0]['content']}"}]
        first = ask(front, messages)
        second = ask(front, goes_on(messages, first))
    assert "x-kvasir-volatile" not in second.headers
    assert cached(second) < 60
