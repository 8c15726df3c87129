"""Agents over HTTP: turns in the contract's own terms, and what one does with a memory."""

import json
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.errors import InvalidArgument
from kvasir_gateway.agents import AgentTurn
from kvasir_gateway.reading.tolerance import Reading

from tests.gateway.conftest import Front


def call(front: Front, method: str, path: str, body: Any = None, caller: str = "ada") -> httpx.Response:
    return httpx.request(method, front.gateway.url + path, json=body, headers=front.bearer(caller), timeout=60)


def test_an_agent_is_talked_to_forked_rolled_back_and_deleted(front: Front) -> None:
    turn = {"messages": [{"role": "user", "content": "My name is Anna."}], "sampling": {"max_tokens": 16}}
    first = call(front, "POST", "/v1/agents/http%2Fone/generate", turn).json()
    assert first["finished"]["snapshot"]["state"] == "SNAPSHOT_STATE_COMMITTED"
    asked = {"append_messages": [{"role": "user", "content": "What is my name?"}], "stream": True}
    streamed = call(front, "POST", "/v1/agents/http%2Fone/generate", asked)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert "started" in events[0]
    assert "Anna" in "".join(event.get("delta", {}).get("text", "") for event in events)
    assert events[-1]["finished"]["snapshot"]["version"] == "2"
    aside = {"messages": [{"role": "user", "content": "A title?"}], "memory_mode": "READ_ONLY"}
    assert call(front, "POST", "/v1/agents/http%2Fone/generate", aside).status_code == 200
    versions = call(front, "GET", "/v1/agents/http%2Fone/versions").json()["snapshots"]
    assert [version["version"] for version in versions] == ["2", "1"]
    forked = call(front, "POST", "/v1/agents/http%2Fone/fork", {"agent_id": "http/two", "version": 1})
    assert (forked.status_code, forked.json()["agent_id"]) == (201, "http/two")
    back = call(front, "POST", "/v1/agents/http%2Fone/rollback", {"version": 1, "expected_version": 2})
    assert back.json()["version"] == "3"
    listed = call(front, "GET", "/v1/agents?name_prefix=http/&page_size=10").json()["agents"]
    assert [agent["agent_id"] for agent in listed] == ["http/one", "http/two"]
    assert call(front, "GET", "/v1/agents?name_prefix=http/", caller="eve").json() == {}
    assert call(front, "DELETE", "/v1/agents/http%2Ftwo").status_code == 200
    assert call(front, "GET", "/v1/agents/http%2Ftwo").status_code == 404


def test_an_agent_whose_name_ends_like_a_path_is_reached(front: Front) -> None:
    turn = {"prompt": "Hello", "sampling": {"max_tokens": 1}}
    for name in ("odd", "odd%2Fversions", "versions", "odd%2Fgenerate", "odd%2F100%2525"):
        assert call(front, "POST", f"/v1/agents/{name}/generate", turn).status_code == 200
    assert call(front, "GET", "/v1/agents/odd%2Fversions").json()["agent_id"] == "odd/versions"
    assert len(call(front, "GET", "/v1/agents/odd/versions").json()["snapshots"]) == 1
    assert call(front, "GET", "/v1/agents/versions").json()["agent_id"] == "versions"
    assert call(front, "GET", "/v1/agents/odd/100%2525").json()["agent_id"] == "odd/100%25"
    assert call(front, "DELETE", "/v1/agents/odd%2Fgenerate").status_code == 200
    assert call(front, "GET", "/v1/agents/odd%FF").status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "/v1/agents/a/generate", {"prompt": "x", "messages": []}, 400, "INVALID_FIELD"),
        ("POST", "/v1/agents/a/generate", {"prompt": "x", "sampling": {"top_k": "2"}}, 400, "INVALID_FIELD"),
        ("POST", "/v1/agents/a/fork", {"agent_id": "\u200b"}, 400, "INVALID_FIELD"),
        ("POST", "/v1/agents/nobody/rollback", {"version": 1}, 404, "AGENT_NOT_FOUND"),
        ("GET", "/v1/agents?page_size=many", None, 400, "INVALID_FIELD"),
        ("PUT", "/v1/agents/a", {}, 405, "METHOD_NOT_ALLOWED"),
    ],
)
def test_a_refusal_is_the_contracts_own(
    front: Front, method: str, path: str, body: Any, status: int, reason: str
) -> None:
    answer = call(front, method, path, body)
    assert answer.status_code == status
    assert reason in [detail.get("reason") for detail in answer.json()["error"]["details"]]


@pytest.mark.parametrize("field", ["messages", "append_messages"])
def test_a_message_that_is_no_text_is_named(field: str) -> None:
    asked = AgentTurn.model_validate({field: [{"role": "user", "content": [{"type": "image"}]}]})
    with pytest.raises(InvalidArgument) as refused:
        asked.turn(Reading())
    assert refused.value.field == f"{field}[0].content[0]"
