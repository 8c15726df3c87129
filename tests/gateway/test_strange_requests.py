"""What nobody should send: each API refuses in its own shape, never with a 500, and nothing of a text is logged."""

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as of_the_document

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL

SECRET = "heliotrope-canary"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/agents/a/generate")


def is_in_shape(path: str, body: Mapping[str, Any]) -> bool:
    """Whether an error looks as its API's do."""
    error = body["error"]
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
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        json.dumps({"model": MODEL, "messages": [{"role": SECRET, "content": SECRET}], "max_tokens": 1}).encode(),
        json.dumps({"model": MODEL, "max_tokens": 1, SECRET: SECRET}).encode(),
    ],
    ids=range(11),
)
def test_a_strange_body_is_refused_in_the_shape_of_its_api(front: Front, path: str, content: bytes) -> None:
    answer = post(front, path, content)
    assert answer.status_code == 400, answer.text
    assert is_in_shape(path, answer.json())
    assert SECRET not in front.gateway.log + front.house.engine.log


@pytest.mark.parametrize("path", PATHS)
def test_ten_megabytes_are_refused_before_they_are_read(front: Front, path: str) -> None:
    answer = post(front, path, b'{"model": "' + b"x" * (10 << 20) + b'"}')
    assert answer.status_code == 413
    assert is_in_shape(path, answer.json())


@pytest.mark.parametrize("path", [*PATHS, "/healthz", "/openapi.json"])
@pytest.mark.parametrize(
    "headers", [{"host": "kvasir.attacker.example"}, {"origin": "https://attacker.example"}, {"origin": "null"}]
)
def test_a_foreign_site_is_refused(front: Front, path: str, headers: dict[str, str]) -> None:
    answer = post(front, path, b"{}", **headers)
    assert answer.status_code == 403
    assert is_in_shape(path, answer.json())


@pytest.mark.parametrize("path", PATHS)
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


def test_an_engines_token_is_no_key(front: Front) -> None:
    answer = post(front, PATHS[0], b"{}", authorization=f"Bearer {front.keys['engine-first']}")
    assert answer.status_code == 403


def test_what_is_no_http_is_answered_and_harms_nobody(front: Front) -> None:
    for sent in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"PRI * HTTP/2.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", front.gateway.port), timeout=5) as connection:
            connection.sendall(sent)
            connection.settimeout(2)
            with contextlib.suppress(OSError):
                connection.recv(100)
    assert httpx.get(f"{front.gateway.url}/healthz").json() == {"status": "ok", "engine": True, "store": True}


def test_fuzzed_by_its_own_document_it_answers_as_documented(front: Front) -> None:
    """Schemathesis makes the requests. Some are made sensible, so that they reach the engine."""
    document = httpx.get(f"{front.gateway.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=front.gateway.url)
    wanted = [
        checks.not_a_server_error,
        of_the_document.status_code_conformance,
        of_the_document.content_type_conformance,
        of_the_document.response_schema_conformance,
    ]
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=4,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy() | operation.as_strategy(GenerationMode.NEGATIVE))
        def answers(case: schemathesis.Case) -> None:
            nonlocal tried
            tried += 1
            if isinstance(case.body, dict):
                case.body = {**case.body, "model": MODEL, **{n: 2 for n in ("max_tokens",) if n in case.body}}
            case.call_and_validate(headers=front.bearer(), checks=wanted, timeout=60)

        answers()
    assert tried >= 40
