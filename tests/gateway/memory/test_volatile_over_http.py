"""What of a request changes and means nothing leaves one memory that goes on, by rules that a header, a label or the
gateway's switch chooses.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.formats import manifest

from tests.gateway.conftest import Front
from tests.gateway.page.html_page import Browser
from tests.made_models.sampling import first_and_in_turn

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

    def turn(
        self, question: str, system: str = SYSTEM, tools: Any = (), more: Any = MappingProxyType({}), **headers: str
    ) -> httpx.Response:
        asked = [*self.said, {"role": "user", "content": question}]
        body = {"model": "any", "messages": [{"role": "system", "content": system}, *asked], "max_tokens": 8}
        sent = self.front.bearer() | self.headers | headers
        body |= {"tools": list(tools), **more}
        answer = httpx.post(self.front.gateway.url + CHAT, json=body, headers=sent, timeout=60)
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


@pytest.mark.long(3)
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


@pytest.mark.long(3)
def test_an_agents_label_holds_for_what_the_gateway_leaves_out_too(front: Front, names: str) -> None:
    billed = "x-anthropic-billing-header: cc_version=1; cch={n};\n" + SYSTEM
    client = Client(front, **{"x-agent-id": names})
    assert client.turn("Hello", billed.format(n=1)).headers["x-kvasir-volatile"] == "billing-line"
    with front.house.store_client(front.keys["ada"]) as store:
        store.update_agent(names, labels={"kvasir.volatile": "tools-order"})
    assert "x-kvasir-volatile" not in client.turn("Go on.", billed.format(n=2)).headers
    asked = client.turn("Go on.", billed.format(n=3), **{"x-kvasir-volatile": "billing-line"})
    assert asked.headers["x-kvasir-volatile"] == "billing-line"


def why(answer: httpx.Response) -> Any:
    assert answer.headers["x-kvasir-miss"].isascii()
    return json.loads(answer.headers["x-kvasir-miss"])


@pytest.mark.long(2)
def test_an_answer_reports_what_was_reused_and_where_its_prompt_parted_from_the_memory(
    front: Front, names: str
) -> None:
    client, system = Client(front, **{"x-agent-id": names}), "You count ships. " * 8 + "It is 10:{} – süß."
    first = client.turn("Hello", system.format(30), TOOLS)
    assert first.headers["x-kvasir-reused"] == f"0 of {client.prompt}; cold"
    assert "x-kvasir-miss" not in first.headers
    second = client.turn("Go on.", system.format(30), TOOLS)
    assert second.headers["x-kvasir-reused"] == f"{client.cached} of {client.prompt}; hot"
    assert "x-kvasir-miss" not in second.headers
    clock = why(client.turn("Go on.", system.format(47), TOOLS))
    assert clock.pop("character") > 100
    assert clock == {
        "reason": "text_differs",
        "message": 0,
        "role": "system",
        "what": "clock",
        "rules": ["system-clock"],
        "memory": "10:30 – süß.\nTools:\n",
        "prompt": "10:47 – süß.\nTools:\n",
    }
    off = {"x-kvasir-volatile": "none"}
    tools = why(client.turn("Go on.", system.format(47), moved(TOOLS), **off))
    assert (tools["role"], tools["what"], tools["rules"]) == ("tools", "order", ["tools-order"])
    assert "message" not in tools


@pytest.mark.long(1)
def test_a_billing_line_that_is_prompted_names_its_rule(front: Front, names: str) -> None:
    client = Client(front, **{"x-agent-id": names, "x-kvasir-volatile": "none"})
    billed = "x-anthropic-billing-header: cc_version=1; cch={n};\n" + SYSTEM
    client.turn("Hello", billed.format(n=1111))
    place = why(client.turn("Go on.", billed.format(n=2222)))
    assert (place["role"], place["memory"], place["rules"]) == ("system", "cch=1111;\nYou look a", ["billing-line"])


@pytest.mark.long(2)
@pytest.mark.parametrize("is_named", first_and_in_turn([False, True], seconds=2))
def test_a_midnight_in_the_first_users_text_costs_what_follows_it_and_leaves_no_second_memory(
    front: Front, names: str, is_named: bool
) -> None:
    reminder = "<system-reminder>Today's date is 2026-11-{day}.</system-reminder>"
    client = Client(front, **({"x-agent-id": names} if is_named else {}))
    client.turn(reminder.format(day=23), f"{is_named}: {SYSTEM}")
    client.said[0]["content"] = reminder.format(day=24)
    answer = client.turn("Go on.", f"{is_named}: {SYSTEM}")
    assert (answer.headers["x-agent-memory"], len(client.agents)) == ("rewound", 1)
    place = why(answer)
    assert (place["message"], place["role"], place["what"], place["rules"]) == (1, "user", "date", [])
    assert (place["memory"], place["prompt"]) == ("2026-11-23.</system-", "2026-11-24.</system-")
    before = client.prompt
    client.turn("And on.", f"{is_named}: {SYSTEM}")
    assert client.cached >= before
    client.said[0]["content"] = reminder.format(day=25)
    exact = client.turn("Go on.", f"{is_named}: {SYSTEM}", **{"x-kvasir-volatile": "none"})
    if is_named:
        assert exact.headers["x-agent-memory"] == "branched"
        assert why(exact)["what"] == "date"
    else:
        assert len(client.agents) == 2  # as it was before there were rules


CLOCK = {"x-kvasir-volatile": "system-clock,system-date,tools-order,template-date"}


def test_a_clock_in_a_system_text_costs_nothing_where_its_rule_is_on(front: Front) -> None:
    client = Client(front, **CLOCK)
    client.turn("Hello", f"It is 10:30. {SYSTEM}")
    before = client.prompt
    answer = client.turn("Go on.", f"It is 10:47. {SYSTEM}")
    assert answer.headers["x-kvasir-volatile"] == "system-clock"
    assert client.cached >= before
    assert len(client.agents) == 1


@pytest.mark.long(6)
def test_a_kill_between_a_call_and_its_result_leaves_one_memory(own_front: Front) -> None:
    client = Client(own_front)
    client.turn("Which ships lie at the quay?", tools=TOOLS, more={"tool_choice": "required", "max_tokens": 100})
    [call] = client.said[-1]["tool_calls"]
    own_front.gateway.kill()
    own_front.house.restart()
    own_front.gateway.start()
    client.said.append({"role": "tool", "tool_call_id": call["id"], "content": "Two."})
    client.turn("And?", tools=TOOLS)
    assert len(client.agents) == 1


@pytest.mark.long(13)
@pytest.mark.parametrize("rules", [CLOCK, {}], ids=["with its rule", "without"])
def test_a_clock_in_a_system_text_leaves_one_memory_also_over_a_kill(own_front: Front, rules: dict[str, str]) -> None:
    client, system = Client(own_front, **rules), f"It is {{}}.\n{SYSTEM}"
    client.turn("Which ships lie at the quay?", system.format("2026-11-24T10:30:00Z"))
    for number, time in enumerate(("2026-11-24T10:47:12Z", "2026-11-25T00:01:00Z", "2026-11-25T00:01:00Z")):
        if number == 1:
            own_front.gateway.kill()
            own_front.house.restart()
            own_front.gateway.start()
        before = client.prompt
        answer = client.turn("And then?", system.format(time))
        if rules:
            assert client.cached >= before
            assert "system-clock" in answer.headers["x-kvasir-volatile"]
            assert "x-kvasir-miss" not in answer.headers
        elif number < 2:
            assert client.cached < 40
            assert "system-clock" in why(answer)["rules"]
    assert len(client.agents) == 1
    if rules:
        with own_front.house.client(own_front.keys["ada"]) as engine:
            (agent,) = client.agents
            said = manifest.parse(engine.get_snapshot(agent)[1]).messages
        assert [each.content for each in said if each.is_note] == [
            *("It is 2026-11-24T10:47:12Z.", "It is 2026-11-25T00:01:00Z."),
        ]


def test_what_parted_is_for_the_keys_owner_alone(front: Front) -> None:
    canary, client = "Zanzibar-4711", Client(front)
    client.turn(f"Hello {canary}")
    client.said[0]["content"] = "Hello Timbuktu"
    named = {"x-agent-id": client.agents.pop()}
    assert canary in why(client.turn("Go on.", **named))["memory"]
    for log in (front.house.engine.log, front.house.store.log, front.gateway.log):
        assert canary not in log
        assert "Timbuktu" not in log
    stranger = Client(front)
    stranger.front = replace(front, keys=front.keys | {"ada": front.keys["eve"]})
    aside = {"x-agent-memory": "read-only"}
    assert "x-kvasir-miss" not in stranger.turn("Hello Timbuktu", **named, **aside).headers
    ada, eve = Browser(front.gateway.url), Browser(front.gateway.url)
    for browser, name in ((ada, "ada"), (eve, "eve")):
        browser.sign_in(front.keys[name])
    rows = [row.text for row in ada.get("status").all("li") if named["x-agent-id"] in row.text]
    assert any("message 2 (user)" in row and canary in row for row in rows)
    assert canary not in eve.get("status").text
