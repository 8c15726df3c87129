"""What of a request changes and means nothing leaves one memory that goes on, by rules that a header, a label or the
gateway's switch chooses.
"""

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Front

CHAT = "/v1/chat/completions"
SYSTEM = "You look after a harbour, and you are careful. " * 16
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"It {name}s what is there, and says so.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "day": {"type": "string"}}},
        },
    }
    for name in ("look", "find", "write", "ask", "count")
]


class Client:
    """A chat client that sends its conversation whole. `agent` of its answers, and tokens of the newest."""

    def __init__(self, front: Front, **headers: str) -> None:
        self.front = front
        self.headers = headers
        self.said: list[dict[str, Any]] = []
        self.agents: set[str] = set()
        self.prompt = self.cached = 0

    def turn(self, question: str, system: str = SYSTEM, tools: Any = (), **headers: str) -> httpx.Response:
        asked = [*self.said, {"role": "user", "content": question}]
        body = {"model": "any", "messages": [{"role": "system", "content": system}, *asked], "max_tokens": 8}
        sent = self.front.bearer() | self.headers | headers
        answer = httpx.post(self.front.gateway.url + CHAT, json=body | {"tools": list(tools)}, headers=sent, timeout=60)
        assert answer.status_code == 200, answer.text
        self.said = [*asked, answer.json()["choices"][0]["message"]]
        usage = answer.json()["usage"]
        self.prompt, self.cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        self.agents.add(answer.headers["x-agent-id"])
        return answer


@pytest.fixture
def names(front: Front) -> Iterator[str]:
    """A named agent, gone afterwards."""
    yield "harbour"
    httpx.delete(f"{front.gateway.url}/v1/agents/harbour", headers=front.bearer())


def moved(value: Any) -> Any:
    """The same JSON with the keys of its objects in another order, and its list too."""
    if isinstance(value, dict):
        return {key: moved(value[key]) for key in reversed(value)}
    return [moved(each) for each in reversed(value)] if isinstance(value, list) else value


def test_tools_in_another_order_go_on_in_the_one_memory(front: Front) -> None:
    client = Client(front)
    assert "x-kvasir-volatile" not in client.turn("Which ships lie at the quay?", tools=TOOLS).headers
    before = client.prompt
    assert client.turn("And which leave?", tools=moved(TOOLS)).headers["x-kvasir-volatile"] == "tools-order"
    assert client.cached >= before
    before = client.prompt
    off = {"x-kvasir-volatile": "template-date"}
    assert "x-kvasir-volatile" not in client.turn("And then?", tools=moved(TOOLS), **off).headers
    assert client.cached < before
    assert len(client.agents) == 1


def test_a_header_that_names_no_rule_is_refused_by_name(front: Front) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}
    headers = front.bearer() | {"x-kvasir-volatile": "tools-order, clocks"}
    answer = httpx.post(front.gateway.url + CHAT, json=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert "'clocks' is none of" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "x-kvasir-volatile"


def test_an_agents_label_holds_for_what_the_gateway_leaves_out_too(front: Front, names: str) -> None:
    billed = "x-anthropic-billing-header: cc_version=1; cch={n};\n" + SYSTEM
    client = Client(front, **{"x-agent-id": names})
    assert client.turn("Hello", billed.format(n=1)).headers["x-kvasir-volatile"] == "billing-line"
    with front.house.store_client(front.keys["ada"]) as store:
        store.update_agent(names, labels={"kvasir.volatile": "tools-order"})
    assert "x-kvasir-volatile" not in client.turn("Go on.", billed.format(n=2)).headers
    asked = client.turn("Go on.", billed.format(n=3), **{"x-kvasir-volatile": "billing-line"})
    assert asked.headers["x-kvasir-volatile"] == "billing-line"
