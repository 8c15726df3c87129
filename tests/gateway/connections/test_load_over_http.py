"""`kvasir bench load --http` before the real gateway, and before a server that gives no usage and refuses."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL
from tests.running.programs import run


def load(url: str, key: str, *options: str, code: int = 0) -> Any:
    shape = ("--rate", "6", "--seconds", "2", "--ramp", "0.5", "--in", "40", "--out", "8")
    ended = run("kvasir", "bench", "load", "--http", url, *shape, "--json", *options, env={"KVASIR_API_KEY": key})
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout)


def conversations(front: Front) -> set[str]:
    with front.house.client(front.keys["eve"]) as client:
        return {agent.agent_id for agent in client.list_agents(name_prefix="conversation/").agents}


@pytest.mark.long(3)
def test_a_load_over_http_is_measured_as_one_over_grpc_and_leaves_no_memory(front: Front, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(front.keys["eve"])
    before = conversations(front)  # those of tests that ran before
    found = load(front.gateway.url, "", "--model", MODEL, "--api-key-file", str(key_file))
    assert found["failures"] == {}
    assert found["phases"]["steady"] > 3
    assert 0 < found["first_token_s"]["p50"] <= found["end_to_end_s"]["largest"]
    assert found["gap_s"]["count"] > 0
    assert set(found["tokens_counted_by"]) == {"usage"}
    assert not found["prompt_tokens_are_guessed"]
    assert conversations(front) == before


@pytest.mark.long(3)
def test_a_refused_first_call_ends_the_load_with_the_servers_words(front: Front) -> None:
    told = load(front.gateway.url + "/v1", "wrong", "--model", MODEL, code=4)
    assert "401" in told["error"]["message"]
    assert "API key" in told["error"]["message"]


@pytest.mark.long(3)
def test_of_a_server_without_usage_events_are_counted_and_refusals_by_status() -> None:
    with _meagre_server() as url:
        found = load(url, "any", "--model", "other")
    steady = found["phases"]["ramp"] + found["phases"]["steady"]
    assert found["prompt_tokens_are_guessed"]
    assert found["failures"] == {"HTTP 429": (steady + 1) // 3, "the stream ended early": (steady + 2) // 3}
    assert found["tokens_counted_by"] == {"events": steady - (steady + 1) // 3}


@pytest.mark.long(3)
def test_a_load_of_which_no_turn_ended_well_ends_with_1() -> None:
    """Though each had a first token, in time."""
    with _meagre_server(kinds=1) as url:
        found = load(url, "any", "--model", "other", code=1)
    assert found["first_token_s"]["count"] == found["phases"]["steady"] > 0
    assert found["end_to_end_s"]["count"] == 0


@pytest.mark.long(2)
def test_a_server_that_is_no_such_server_is_refused_by_its_address() -> None:
    with _serving(_Page) as url:
        told = load(url, "any", "--model", "other", code=4)
    assert told["error"]["field"] == "--http"
    assert f"{url}/v1/chat/completions does not answer with a chat completion" in told["error"]["message"]


class _Page(BaseHTTPRequestHandler):
    """Answers everything with a page, as some servers do."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def _meagre_server(kinds: int = 3) -> Iterator[str]:
    """Answers in turn, with the first kinds of: a stream without an end, 429, a whole stream; and never with usage."""
    lock, numbers = threading.Lock(), iter(range(1000))
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}

    class Meagre(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not asked["stream"]:
                return self._answer(200, b'{"choices": []}')
            with lock:
                number = next(numbers) % kinds
            lines = [json.dumps(chunk)] * 3 + (["[DONE]"] if number == 2 else [])
            body = "".join(f"data: {line}\n\n" for line in lines)
            return self._answer(429 if number == 1 else 200, body.encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with _serving(Meagre) as url:
        yield url


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()
