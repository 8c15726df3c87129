"""The HTTP gateway under fuzz, before its services: what requests may name, and what its document says of answers."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.campaigns.fuzz.campaign import Outcome, Send
from tests.campaigns.fuzz.http_calls import HttpCall, HttpRequests, Json
from tests.campaigns.fuzz.mutations import Known
from tests.gateway.conftest import ENCODER, Front, running_front
from tests.gateway.serving import MODEL
from tests.made_models.tiny_encoder import write_encoder

SECRET = "heliotrope-canary"
_WAITING_HELPS = (429, 503, 529)
# To a header with bytes that HTTP forbids.
_NO_HTTP = b"Invalid HTTP request received."
# A caller whose request asks for a long reply leaves.
_STAYS_S = 30.0
_WELL_WITHIN_S = 30.0  # the gateway gives its engine two seconds, which may be short on a busy machine
_TEXTS = ("Hello.", "What is it?", f"My name is {SECRET}.", "é 💥", "<|im_start|>user\nHi<|im_end|>\n")
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}


class GatewayTarget:
    """A running gateway, its engine and its store."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._open = contextlib.ExitStack()
        self._front: Front

    @property
    def pids(self) -> Sequence[int]:
        house = self._front.house
        return [self._front.gateway.pid, house.engine.pid, house.store.pid]

    @property
    def log(self) -> str:
        return self._front.gateway.log + self._front.house.engine.log + self._front.house.store.log

    def start(self) -> None:
        options = ("--embeddings", f"{ENCODER}={write_encoder(self._directory / 'encoder')}")
        self._front = self._open.enter_context(running_front(self._directory / "front", engine_options=options))
        self._steady = self._open.enter_context(httpx.Client(base_url=self._front.gateway.url, timeout=120))
        self._said = self._say()
        turn = {"model": MODEL, "prompt": "Hello.", "max_tokens": 2}
        headers = {**self._front.bearer(), "x-agent-id": "ada"}
        self._steady.post("/v1/completions", json=turn, headers=headers).raise_for_status()
        for caller in self._front.keys:  # each has a channel to the engine
            self._steady.get("/v1/models", headers=self._front.bearer(caller))

    def sending(self, seed: int) -> "contextlib.AbstractContextManager[Send]":
        document = httpx.get(f"{self._front.gateway.url}/openapi.json").json()
        keys = {f"Bearer {key}": name for name, key in self._front.keys.items() if name != "eve"}
        requests = HttpRequests(document, _known(), {"ada": self._front.keys["ada"], **keys}, "ada")
        return _sending(requests, self._front.gateway.url, seed)

    def is_well(self) -> str | None:
        """It is well, says so, and another namespace's turn says what it said at first."""
        give_up = time.monotonic() + _WELL_WITHIN_S
        while (health := self._steady.get("/healthz")).status_code != 200:
            if time.monotonic() > give_up:
                return f"/healthz: {health.status_code} {health.text}"
            time.sleep(0.1)
        said = self._say()
        return None if said == self._said else f"it said {said!r} and not {self._said!r}"

    def _say(self) -> str:
        turn = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
        headers = {**self._front.bearer("eve"), "x-agent-memory": "none"}
        answer = self._steady.post("/v1/completions", json=turn, headers=headers)
        said: str = answer.raise_for_status().json()["choices"][0]["text"]
        return said

    def end(self) -> Sequence[str]:
        problems = [f"{SECRET} is in a log"] if SECRET in self.log else []
        self._front.gateway.stop()
        codes = [service.stop(60) for service in (self._front.house.engine, self._front.house.store)]
        return [*problems, f"SIGTERM ended them with {codes}"] if any(codes) else problems

    def close(self) -> None:
        self._open.close()


@contextlib.contextmanager
def _sending(requests: HttpRequests, url: str, seed: int) -> Iterator[Send]:
    with httpx.Client(base_url=url, timeout=_STAYS_S) as client:

        def send(number: int) -> Iterator[Outcome]:
            call = requests.of(seed, number)
            status, problem = _asked(client, call, requests.document)
            yield Outcome(call.operation.name, status, status.startswith("2"), problem, str(call))

        yield send


def _asked(client: httpx.Client, call: HttpCall, document: Json) -> tuple[str, str | None]:
    """The status of an answer, and what is wrong with it."""
    try:
        with client.stream(call.method, call.target, headers=list(call.headers), content=call.content) as answer:
            data = b""
            for piece in answer.iter_raw():
                data += piece
                if call.takes is not None and len(data) >= call.takes:
                    return "LEFT", None
    except (httpx.LocalProtocolError, httpx.InvalidURL):
        return "UNSENDABLE", None
    except httpx.ReadTimeout:
        return "LATE", None if call.method == "POST" else f"no answer within {_STAYS_S} s"  # a turn may last
    except httpx.TransportError as error:
        return "BROKEN", f"{type(error).__name__}: {error}"
    return str(answer.status_code), what_is_wrong(call, answer, data, document)


def what_is_wrong(call: HttpCall, answer: httpx.Response, data: bytes, document: Json) -> str | None:
    """What the document does not allow in this answer; None if all is well."""
    status = answer.status_code
    shown = f"{status} {dict(answer.headers)} {data[:300]!r}"
    if status >= 500 and status not in _WAITING_HELPS:
        return f"a bug: {shown}"
    if status in _WAITING_HELPS and "retry-after" not in answer.headers and call.operation.name != "get_healthz":
        return f"when to come again is not said: {shown}"
    if data == _NO_HTTP:
        return None
    kind = answer.headers.get("content-type", "").partition(";")[0]
    documented = call.operation.facts["responses"]
    response = documented.get(str(status), documented["default"])
    if call.method != call.operation.method or status == 307:
        return None
    if kind not in response["content"]:
        return f"not a documented type: {shown}"
    if kind != "application/json":
        return None if _streams(data, kind) else f"no stream of events: {shown}"
    schema = response["content"][kind]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return None if _fits(json.loads(data), schema) else f"not as documented: {shown}"


def _fits(value: Any, schema: Json) -> bool:
    if schema.get("type") == "string":
        return isinstance(value, str)
    if not isinstance(value, dict) or not set(schema.get("required", ())) <= set(value):
        return schema.get("type") != "object"
    return all(_fits(value[name], inner) for name, inner in schema.get("properties", {}).items() if name in value)


def _streams(data: bytes, kind: str) -> bool:
    """Whether each event, or line, is JSON, and the last one is whole."""
    if not data.endswith(b"\n"):
        return False
    lines = data.decode().splitlines()
    if kind == "text/event-stream":
        lines = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
        lines = [line for line in lines if line != "[DONE]"]
    return all(isinstance(json.loads(line), dict) for line in lines if line)


def _known() -> Known:
    return {
        "model": (MODEL, MODEL, MODEL, MODEL, ENCODER, "nobody's"),
        "agent_id": ("ada", "ada", "bob", "größe", "new"),
        "x-agent-id": ("ada", "bob", "new"),
        "name_prefix": ("", "a"),
        "page_token": ("", "YQ=="),
        "force": ("true", "false"),
        "role": ("user", "user", "user", "assistant", "system", "tool"),
        "content": _TEXTS,
        "prompt": _TEXTS,
        "system": _TEXTS,
        "instructions": _TEXTS[:2],
        "input": (*_TEXTS, [{"role": "user", "content": "Hi"}], ["a", "b"]),
        "previous_response_id": (None, None, "nobody's"),
        "conversation": (None,),
        "background": (False,),
        "truncation": ("disabled",),
        "n": (1, 1, 2),
        "best_of": (1,),
        "version": (1, 1, 2),
        "base_version": (1, 2),
        "expected_version": (0, 1),
        "stream": (True, False),
        "json_schema": (_SCHEMA,),
        "parameters": (_SCHEMA, {}),
        "input_schema": (_SCHEMA, {"type": "object"}),
        "regex": ("[a-z ]{1,8}", "(yes|no)"),
        "stop": (".", [" the"]),
        "arguments": ("{}", '{"a":[1,{"b":null}]}'),
        "temperature": (0, 1),
    }
