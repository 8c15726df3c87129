"""What a client sends and is answered, between it and the gateway: bytes pass as they are, and are kept."""

import http.client
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_OF_A_HOP = {"connection", "transfer-encoding", "keep-alive", "host"}


@dataclass(frozen=True)
class Exchange:
    """One request that asked for a reply, and its answer."""

    path: str
    body: dict[str, Any]
    status: int
    headers: Mapping[str, str]
    events: list[dict[str, Any]]

    @property
    def reply(self) -> dict[str, Any]:
        """The newest usage, whatever API it is."""
        used: dict[str, Any] = {}
        for event in self.events:
            for part in (event, event.get("message"), event.get("response")):
                if isinstance(part, dict) and isinstance(part.get("usage"), dict):
                    used |= part["usage"]
        return used

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the prompt, and those of it that were not computed."""
        used = self.reply
        if "prompt_tokens" in used:
            return used["prompt_tokens"], (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if "input_tokens_details" in used:
            return used["input_tokens"], used["input_tokens_details"]["cached_tokens"]
        read = used.get("cache_read_input_tokens", 0)
        return used.get("input_tokens", 0) + read, read


def goes_on(exchange: Exchange) -> bool:
    return exchange.headers.get("x-agent-memory") in ("extended", "rewound")


def computed_twice(exchanges: Sequence[Exchange]) -> list[int]:
    """Which requests of a conversation did not reuse all of the prompt before."""
    known: dict[str, int] = {}
    found = []
    for number, each in enumerate(exchanges):
        agent = each.headers.get("x-agent-id", "")
        tokens, cached = each.tokens
        if goes_on(each) and cached < known.get(agent, 0):
            found.append(number)
        if each.headers.get("x-agent-memory") not in ("read-only", "none"):
            known[agent] = tokens - 1  # the last one is always computed
    return found


class Recorder:
    """A server on a port of its own before one gateway."""

    def __init__(self, gateway_port: int) -> None:
        self.exchanges: list[Exchange] = []
        handler = type("Handler", (_Handler,), {"recorder": self, "port": gateway_port})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    recorder: Recorder
    port: int
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """The exchanges are the log."""

    def _pass_on(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1800)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_HOP}
        there.request(self.command, self.path, sent, {**headers, "accept-encoding": "identity"})
        answer = there.getresponse()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_A_HOP:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        came = bytearray()
        while piece := answer.read1(1 << 16):
            came += piece
            try:
                self.wfile.write(piece)
                self.wfile.flush()
            except OSError:  # the client has left: the gateway shall hear of it
                there.close()
                return
        if self.command == "POST":
            told = {name.lower(): value for name, value in answer.getheaders()}
            exchange = Exchange(self.path, json.loads(sent), answer.status, told, events_of(bytes(came)))
            self.recorder.exchanges.append(exchange)

    do_GET = do_POST = do_HEAD = _pass_on  # noqa: N815 - http.server's names


def events_of(came: bytes) -> list[dict[str, Any]]:
    """Of a stream, or the one object of an answer."""
    lines = [line[5:] for line in came.splitlines() if line.startswith(b"data:")] or [came]
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        found += [event] if isinstance(event, dict) else []
    return found
