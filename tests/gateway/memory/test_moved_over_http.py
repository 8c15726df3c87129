"""A turn that moves to another engine while an HTTP reader hears it: the reader notices nothing."""

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.clients import InferenceClient
from kvasir.credentials import hash_token
from kvasir.errors import KvasirError

from tests.gateway.serving import MODEL, GatewayProcess, running_gateway, write_keys
from tests.inference.handover.cases import ON, STORY
from tests.inference.handover.two_engines import TwoEngines
from tests.running.waiting import eventually

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": STORY}],
    "stream": True,
    "temperature": 0.9,
    "seed": 12,
    "max_tokens": 300,
    "logit_bias": ON["logit_bias"],
}


@dataclass(frozen=True)
class Engines:
    """Two engines, a gateway before the first that knows both by the names that they have for each other, and one that
    knows no peers."""

    two: TwoEngines
    gateway: GatewayProcess
    plain: GatewayProcess
    key: str


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    root = tmp_path_factory.mktemp("moved")
    two = TwoEngines(root)
    keys, token = write_keys(root / "credentials.toml"), root / "engine.token"
    token.touch(mode=0o600)
    token.write_text(keys["engine-first"])
    for service in (two.house.store, two.a, two.b):
        service.options += ["--credentials-file", str(root / "credentials.toml")]
    for engine in (two.a, two.b):
        engine.options += ["--store-token-file", f"first={token}"]
    two.a.options += ["--peer-token-file", f"first/b={token}"]
    two.b.options += ["--peer-token-file", f"first/a={token}"]
    try:
        two.start()
        peers = ("--peer", f"b={two.b.address}", "--peer", f"a={two.a.address}")
        options = ("--credentials", str(root / "credentials.toml"))
        with running_gateway(two.house, *options, *peers) as gateway, running_gateway(two.house, *options) as plain:
            yield Engines(two, gateway, plain, keys["ada"])
    finally:
        two.close()


def heard(engines: Engines, *peers: str, url: str = "") -> tuple[str, int]:
    """The text that a reader of server-sent events hears, and how often the turn moved meanwhile, from peer to peer."""
    both, waiting = (engines.two.a, engines.two.b), list(peers)
    text, events, given = "", list[dict[str, Any]](), sum(engine.log.count("turn.given") for engine in both)
    headers = {"authorization": f"Bearer {engines.key}"}
    with (
        httpx.Client(base_url=url or engines.gateway.url, timeout=60) as http,
        InferenceClient.connect(engines.two.a.address, token=engines.key) as a,
        InferenceClient.connect(engines.two.b.address, token=engines.key) as b,
        http.stream("POST", "/v1/chat/completions", json=CHAT, headers=headers) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            events.append(json.loads(line[6:]))
            text += told(events[-1])
            if waiting and text:
                peer = waiting.pop(0)
                with contextlib.suppress(KvasirError):  # on a busy machine it may have ended before
                    (a if peer == "b" else b).hand_over(peer, request_id=answer.headers["x-request-id"])
    assert "error" not in events[-1], events[-1]
    return text, sum(engine.log.count("turn.given") for engine in both) - given


def told(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


@pytest.mark.long(21)
@pytest.mark.parametrize("has_peers", [True, False])
@pytest.mark.parametrize("peers", [("b",), ("b", "a")])
def test_its_reader_hears_every_character_once(engines: Engines, peers: tuple[str, ...], has_peers: bool) -> None:
    """Without peers of its own the gateway reads on through the engine that it called, which reads on at the others."""
    stays, _ = heard(engines)
    for _ in range(4):
        goes, moves = heard(engines, *peers, url="" if has_peers else engines.plain.url)
        assert goes == stays
        if moves == len(peers):
            break
    assert moves == len(peers)


@pytest.mark.long(2)
def test_tokens_for_other_engines_are_read_again_with_a_reload(engines: Engines) -> None:
    two = engines.two
    credentials, file = two.house.root / "credentials.toml", two.house.root / "engine.token"
    old, new = file.read_text(), secrets.token_urlsafe(32)
    credentials.write_text(credentials.read_text().replace(hash_token(old), hash_token(new)))
    file.write_text(new)
    services = (two.house.store, two.a, two.b)
    for service in services:
        os.kill(service.pid, signal.SIGHUP)
    eventually(lambda: all("reload.done" in service.log for service in services))
    assert any(heard(engines, "b")[1] for _ in range(4))
