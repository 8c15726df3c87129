"""What nobody should send: each API refuses in its own shape, never with a 500, and nothing of a text is logged."""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.clients import Choice, Reply
from kvasir.common.v1.message_pb2 import ToolCall
from kvasir.errors import Internal, NotFound, Unauthenticated
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway import anthropic_messages, errors
from kvasir_gateway.turn import Asked
from starlette.requests import Request
from starlette.responses import JSONResponse

from tests.gateway.conftest import ORIGIN, Front
from tests.gateway.serving import MODEL

SECRET = "heliotrope-canary"
OLLAMA = ("/api/chat", "/api/generate")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/agents/a/generate")


def is_in_shape(path: str, body: Mapping[str, Any]) -> bool:
    """Whether an error looks as its API's do."""
    error = body["error"]
    if path.startswith("/api/"):
        return isinstance(error, str)
    if path.startswith("/v1/messages"):
        return body["type"] == "error" and set(error) == {"type", "message"}
    if path.startswith("/v1/agents"):
        return {"code", "message", "details"} <= set(error)
    return set(error) == {"message", "type", "param", "code"}


def post(front: Front, path: str, content: bytes, **headers: str) -> httpx.Response:
    sent = {**front.bearer(), "content-type": "application/json", **headers}
    return httpx.post(front.gateway.url + path, content=content, headers=sent, timeout=60)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": 7}',
        b'{"model": "\xff\xfe"}',
        b'{"model": "m", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "input": "\\ud800", "prompt": "\\ud800", "max_tokens": 1, "messages": "\\ud800"}',
        b'{"model": "m", "prompt": "x", "metadata": {"a": 1e999}, "top_p": 1e999, "messages": [], "input": "x"}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        json.dumps({"model": MODEL, "messages": [{"role": SECRET, "content": SECRET}], "max_tokens": 1}).encode(),
        json.dumps({"model": MODEL, "max_tokens": 1, SECRET: SECRET}).encode(),
    ],
    ids=range(12),
)
def test_a_strange_body_is_refused_in_the_shape_of_its_api(front: Front, path: str, content: bytes) -> None:
    answer = post(front, path, content)
    assert answer.status_code == 400, answer.text
    assert is_in_shape(path, answer.json())
    assert SECRET not in front.gateway.log + front.house.engine.log


@pytest.mark.parametrize("path", [*PATHS, *OLLAMA])
def test_ten_megabytes_are_refused_before_they_are_read(front: Front, path: str) -> None:
    answer = post(front, path, b'{"model": "' + b"x" * (10 << 20) + b'"}')
    assert answer.status_code == 413
    assert is_in_shape(path, answer.json())


@pytest.mark.parametrize("path", [*PATHS, *OLLAMA, "/healthz", "/openapi.json"])
@pytest.mark.parametrize(
    "headers", [{"host": "kvasir.attacker.example"}, {"origin": "https://attacker.example"}, {"origin": "null"}]
)
def test_a_foreign_site_is_refused(front: Front, path: str, headers: dict[str, str]) -> None:
    answer = post(front, path, b"{}", **headers)
    assert answer.status_code == 403
    assert is_in_shape(path, answer.json())


@pytest.mark.parametrize("path", [*PATHS, *OLLAMA])
@pytest.mark.parametrize("key", ["", "Bearer wrong", "Basic abc", "Bearer " + "k" * 5000])
def test_a_wrong_key_is_refused(front: Front, path: str, key: str) -> None:
    answer = post(front, path, b"{}", authorization=key)
    assert answer.status_code == 401
    assert is_in_shape(path, answer.json())


@pytest.mark.parametrize("token", ["0" * 12 + "9" * 5000, "٣", "-1", str(1 << 32)], ids=range(4))
def test_a_token_that_is_none_is_refused(front: Front, token: str) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "logit_bias": {token: 1}}
    answer = post(front, PATHS[0], json.dumps(asked).encode(), **{"x-request-id": "mine"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "logit_bias"
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (PATHS[0], {"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
        (PATHS[0], {"tools": [{"type": "function", "function": {"name": "f"}, "magic": 1}]}, "tools[0].magic"),
        (PATHS[0], {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (PATHS[0], {"max_completion_tokens": 1 << 31}, "max_completion_tokens"),
        (PATHS[2], {"max_output_tokens": 1 << 31}, "max_output_tokens"),
        (PATHS[3], {"top_k": 1 << 31}, "top_k"),
        (PATHS[3], {"system": 7}, "system"),
        (PATHS[2], {"tools": [{"type": "function", "name": "f", "magic": 1}]}, "tools[0].magic"),
        (PATHS[2], {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (PATHS[2], {"metadata": {"a": [float("inf")]}}, "metadata"),
        (PATHS[3], {"tools": [{"name": "f", "magic": 1}]}, "tools[0].magic"),
        (PATHS[3], {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ],
)
def test_a_strict_gateway_refuses_by_name_what_is_not_applied(
    strict: Front, path: str, change: dict[str, Any], field: str
) -> None:
    talk = {"input": "?"} if path == PATHS[2] else {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    content = json.dumps({"model": MODEL, **talk, **change}).replace("Infinity", "1e999")
    answer = post(strict, path, content.encode())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["metadata", "tool_choice"])
def test_an_object_that_the_answer_repeats_is_small(front: Front, field: str) -> None:
    """Each event of a stream may have it."""
    large = {"type": "function", "name": "f", "a": [["x"] * 9] * 9_000}
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    asked = {"model": MODEL, "input": "?", "stream": True, "tools": tools, field: large}
    answer = post(front, PATHS[2], json.dumps(asked).encode())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}")


def test_pages_of_a_named_origin_may_ask_what_they_may_send_and_read_the_answer(front: Front) -> None:
    asks = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    may = httpx.options(front.gateway.url + PATHS[0], headers=asks)
    assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "POST" in may.headers["access-control-allow-methods"]
    assert "x-api-key" in may.headers["access-control-allow-headers"]
    refused = post(front, PATHS[0], b"{}", origin=ORIGIN)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, ORIGIN)
    assert (
        httpx.options(front.gateway.url + PATHS[0], headers={**asks, "origin": "https://b.example"}).status_code == 403
    )


@pytest.mark.parametrize("path", [PATHS[0], "/page/login"])
def test_a_caller_who_leaves_in_the_middle_of_a_body_is_no_bug(front: Front, path: str) -> None:
    headers = {"host": "localhost", "x-api-key": front.keys["ada"], "content-length": "99"}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    with socket.create_connection(("127.0.0.1", front.gateway.port), timeout=60) as connection:
        connection.sendall(("\r\n".join(lines) + '\r\n\r\n{"model"').encode())
        time.sleep(0.2)  # the gateway reads
    time.sleep(0.2)
    assert not {"request.failed", "page.failed"} & set(front.gateway.log.split())


def test_strangers_cannot_fill_the_disk_with_lines(caplog: pytest.LogCaptureFixture) -> None:
    request = Request({"type": "http", "method": "GET", "path": "/x", "headers": []})
    with caplog.at_level("INFO"):
        for _ in range(100):
            errors.refused(request, NotFound("no such path"), "")
            errors.refused(request, Unauthenticated("no key"), "known")
        strangers = len(caplog.messages)
        errors.refused(request, NotFound("no such agent"), "mine")
    assert strangers <= 20, "ten a second"
    assert caplog.messages[-1] == "request.refused request_id=mine status=404 reason=NOT_FOUND"


def test_arguments_that_json_cannot_repeat_do_no_harm() -> None:
    """A model may write halves of characters, numbers that are none, or nothing that is JSON."""
    call = ToolCall(id="c", name="f", arguments_json='{"a": "\\ud800", "b": NaN, "c": 1e999, "d": [1.5]}')
    finished = pb.Finished(reason=pb.FINISH_REASON_TOOL_CALLS, tool_calls=[call, ToolCall(id="d", arguments_json="{")])
    asked = Asked(request_id="r", created=0, model=MODEL)
    told = anthropic_messages.whole(
        asked, Reply(choices=[Choice("", finished=finished)]), seals=None, shows_thinking=True
    )
    uses = json.loads(JSONResponse(told).body)["content"]
    assert [use["input"] for use in uses] == [{"a": "?", "b": None, "c": None, "d": [1.5]}, {}]


def test_an_engines_token_is_no_key(front: Front) -> None:
    answer = post(front, PATHS[0], b"{}", authorization=f"Bearer {front.keys['engine-first']}")
    assert answer.status_code == 403


def raw(front: Front, *lines: str, rest: str = "") -> str:
    """The status of a request of these lines, which come at once."""
    with socket.create_connection(("127.0.0.1", front.gateway.port), timeout=60) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n" + rest).encode())
        return connection.recv(100).decode().split()[1]


@pytest.mark.parametrize(
    "lines",
    [
        ("host: localhost",),
        ("host: kvasir.attacker.example",),
        ("origin: http://localhost", "origin: https://attacker.example"),
        ("authorization: Bearer {ada}", "authorization: Bearer {eve}"),
        ("x-api-key: {ada}", "X-API-Key: {ada}"),
        ("content-length: 2", "content-length: 1"),
        ("content-length: 2", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked, identity",),
    ],
)
def test_a_head_of_which_two_readers_may_understand_two_things_is_refused(front: Front, lines: tuple[str, ...]) -> None:
    """A program before this one may have checked the other one of two names, keys or lengths."""
    given = ("GET /v1/models HTTP/1.1", "Host: localhost", *(line.format(**front.keys) for line in lines))
    assert raw(front, *given) == "400"


@pytest.mark.parametrize("key", ["authorization: Bearer {ada}", "x-api-key: {ada}"])
def test_a_trailer_is_no_header(front: Front, key: str) -> None:
    head = ("GET /v1/models HTTP/1.1", "host: localhost")
    key = key.format(**front.keys)
    assert raw(front, *head, key) == "200"
    assert raw(front, *head, "transfer-encoding: chunked", rest=f"0\r\n{key}\r\n\r\n") == "401"


@pytest.mark.long(4)
def test_what_is_no_http_is_answered_and_harms_nobody(front: Front) -> None:
    for sent in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"PRI * HTTP/2.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", front.gateway.port), timeout=60) as connection:
            connection.sendall(sent)
            connection.settimeout(2)
            with contextlib.suppress(OSError):
                connection.recv(100)
    assert httpx.get(f"{front.gateway.url}/healthz").json()["status"] == "ok"


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nx: ",
        b"GET /",
        b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=["header", "second", "line", "trailer"],
)
def test_what_no_body_holds_is_bounded(front: Front, begun: bytes) -> None:
    with socket.create_connection(("127.0.0.1", front.gateway.port), timeout=60) as connection:
        connection.sendall(begun)
        time.sleep(0.2)  # what is whole is answered
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            connection.sendall(b"a" * (8 << 20))
    assert httpx.get(f"{front.gateway.url}/healthz").json()["status"] == "ok"


def test_a_stream_that_ends_by_a_bug_leaves_its_reason_in_the_log_and_no_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        event = errors.ended_by(errors.api_of("/v1/messages"), "r1", Internal("of the prompt: Zanzibar"))
    assert "answer.refused request_id=r1 status=500 reason=INTERNAL" in caplog.text
    assert "Zanzibar" not in caplog.text
    assert "api_error" in event


def test_a_path_or_method_that_no_route_takes_is_refused_by_its_name(front: Front) -> None:
    for_anthropic = {"anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=front.gateway.url, headers=front.bearer()) as client:
        path = client.post("/v1/messages/batches", json={}, headers=for_anthropic)
        method = client.get("/v1/chat/completions")
        model = client.get("/v1/models/none", headers=for_anthropic)
        others = [client.get(f"/v1/models/{name}%0A").status_code for name in ("", "kvasir-tiny")]
    assert (path.status_code, path.json()["request_id"], is_in_shape("/v1/messages", path.json())) == (404, None, True)
    assert "/v1/messages/batches" in path.json()["error"]["message"]
    assert (method.status_code, "x-request-id" in method.headers, method.headers["allow"]) == (405, False, "POST")
    assert method.json()["error"]["message"] == "this path takes POST, not GET"
    assert (model.status_code, is_in_shape("/v1/messages", model.json())) == (404, True)
    assert model.json()["request_id"] == model.headers["request-id"]
    assert others == [404, 404], "a line's end is a part of a name"


@pytest.mark.long(5)
def test_a_wrong_base_url_or_key_is_refused_with_the_next_step(front: Front, openai: Any, anthropic: Any) -> None:
    refused = []
    with pytest.raises(openai.NotFoundError) as answer:
        front.openai().with_options(base_url=front.gateway.url).chat.completions.create(model=MODEL, messages=[])
    refused.append(answer.value)
    with pytest.raises(anthropic.NotFoundError) as answer:
        front.anthropic().with_options(base_url=f"{front.gateway.url}/v1").models.list()
    refused.append(answer.value)
    assert all("OpenAI's clients ends in /v1" in str(each) for each in refused), refused
    with pytest.raises(openai.AuthenticationError, match="`kvasir tokens ls`"):
        front.openai().with_options(api_key="sk-mine").models.list()
