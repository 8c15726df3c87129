"""The gateway before a played engine: long work is done beside the event loop, and ends when its reader leaves."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients.aio import large_requests
from kvasir.clients.aio.large_requests import _LargeCall
from kvasir.errors import InvalidArgument, NotFound, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.operating.audit import Audit
from kvasir.server.operating.traces import Traces
from kvasir_gateway import agents
from kvasir_gateway import app as gateway_app
from kvasir_gateway.answering import Turns
from kvasir_gateway.app import Gateway, GatewayLimits, Surroundings
from kvasir_gateway.conversations import Conversations
from kvasir_gateway.door.security import Gate
from kvasir_gateway.embedding.bodies import EmbeddingsRequest
from kvasir_gateway.engine import CallerAtEngine, EngineLink
from kvasir_gateway.metrics import GatewayNumbers
from kvasir_gateway.models import Aliases
from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.reading.tolerance import Tolerance
from kvasir_gateway.turn import Said, Turn
from starlette.responses import JSONResponse

_KEY = bytes(32)


class PlayedEngine:
    """A client of the engine. Agents take for ever to be listed."""

    def __init__(self) -> None:
        self.listing, self.was_cancelled = asyncio.Event(), asyncio.Event()
        self.embedded_by = list[str]()

    async def get_model(self, name: str) -> None:
        if name not in ("", "m"):
            raise NotFound("no such model", reason="MODEL_NOT_FOUND")

    async def every_agent(self, **_asked: object) -> AsyncGenerator[None, None]:
        self.listing.set()
        try:
            await asyncio.sleep(60)
            yield
        finally:
            self.was_cancelled.set()

    async def embed(self, texts: list[str], *, model: str = "", **_asked: object) -> pb.EmbedResponse:
        self.embedded_by.append(model)
        await self.get_model(model)
        embeddings = [pb.Embedding(values=[0.5] * 1024, tokens=1) for _ in texts]
        return pb.EmbedResponse(model="m", embeddings=embeddings)

    async def list_agents(self, **_asked: object) -> cachestore_pb2.ListAgentsResponse:
        agents = [cachestore_pb2.Agent(agent_id=f"ä{number}", labels={"a": "b" * 200}) for number in range(200)]
        return cachestore_pb2.ListAgentsResponse(agents=agents, next_page_token="next")


def app_before(engine: PlayedEngine, limits: GatewayLimits = GatewayLimits()) -> Any:
    """The gateway without keys and without its page."""
    link: Any = SimpleNamespace(of=lambda _token, beside, _making, _namespace: CallerAtEngine(engine, beside))
    gate = Gate(None, hosts=(), origins=(), audit=Audit("http", None))
    return app_of(link, gate, SimpleNamespace(routes=lambda _rooms: []), limits)


def app_of(engine: Any, gate: Gate, page: Any, limits: GatewayLimits = GatewayLimits()) -> Any:
    around = Surroundings(
        engine=engine,
        gate=gate,
        turns=Turns(Conversations(_KEY, new_name=lambda: "name", now=lambda: datetime.now(UTC))),
        limits=limits,
        numbers=GatewayNumbers(),
        page=page,
        tolerance=Tolerance(is_strict=False, any_model=True, seals=ThoughtSeals(_KEY)),
        aliases=Aliases({}),
        traces=Traces(),
        now=lambda: 0.0,
        clock=lambda: 0.0,
        new_request_id=lambda: "request",
    )
    return Gateway(around).app()


async def post(app: Any, path: str, body: object, left: asyncio.Event, method: str = "POST") -> tuple[int, bytes]:
    """The answer's status and body, to a reader who leaves with that event."""
    sent, answered = json.dumps(body).encode(), list[Any]()

    async def receive() -> Any:
        nonlocal sent
        if sent:
            message, sent = {"type": "http.request", "body": sent}, b""
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answered.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": headers, "root_path": "", "client": None, "scheme": "http"}, receive, send)
    return answered[0]["status"], b"".join(message.get("body", b"") for message in answered)


async def test_a_look_up_ends_when_its_reader_leaves() -> None:
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    engine, left = PlayedEngine(), asyncio.Event()
    asked = asyncio.create_task(
        post(app_before(engine), "/v1/chat/completions", {"model": "m", "messages": chat}, left)
    )
    await asyncio.wait_for(engine.listing.wait(), 5)
    left.set()
    await asyncio.wait_for(engine.was_cancelled.wait(), 5)
    assert (await asked)[0] == 499


def test_a_list_of_agents_is_written_beside_the_loop_as_it_was_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, plain = list[threading.Thread](), agents.shown
    noted = lambda message: (threads.append(threading.current_thread()), plain(message))[1]  # noqa: E731
    monkeypatch.setattr(agents, "shown", noted)

    async def ask() -> tuple[int, bytes]:
        return await post(app_before(PlayedEngine()), "/v1/agents", None, asyncio.Event(), "GET")

    status, answer = asyncio.run(ask())
    assert (status, answer) == (200, JSONResponse(plain(asyncio.run(PlayedEngine().list_agents()))).body)
    assert threads
    assert threading.main_thread() not in threads


def test_a_large_answer_of_embeddings_is_made_beside_the_loop_within_the_room_of_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, plain = list[threading.Thread](), EmbeddingsRequest.answer
    noted = lambda *given: (threads.append(threading.current_thread()), plain(*given))[1]  # noqa: E731
    monkeypatch.setattr(EmbeddingsRequest, "answer", noted)

    async def ask(limits: GatewayLimits) -> tuple[int, bytes]:
        body = {"model": "m", "input": ["x"] * 100}
        return await post(app_before(PlayedEngine(), limits), "/v1/embeddings", body, asyncio.Event())

    status, answer = asyncio.run(ask(GatewayLimits()))
    assert (status, len(json.loads(answer)["data"])) == (200, 100)
    assert threads
    assert threading.main_thread() not in threads
    assert asyncio.run(ask(GatewayLimits(max_bodies_bytes=1 << 20)))[0] == 429


def test_the_refusal_of_a_malformed_body_holds_nothing_that_was_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    held, plain = list[object](), gateway_app.refused
    noted = lambda request, error, *more: (held.append(error.__context__), plain(request, error, *more))[1]  # noqa: E731
    monkeypatch.setattr(gateway_app, "refused", noted)
    body = {"model": "m", "messages": "x" * 100_000}
    status, answer = asyncio.run(post(app_before(PlayedEngine()), "/v1/chat/completions", body, asyncio.Event()))
    assert (status, json.loads(answer)["error"]["param"]) == (400, "messages")
    assert held == [None]


def test_the_engines_refusal_of_a_turn_leaves_nothing_of_it_for_the_collector() -> None:
    class Refusing(PlayedEngine):
        async def generate(self, **_asked: object) -> AsyncGenerator[pb.GenerateResponse, None]:
            raise InvalidArgument("tools: not these", field="tools")
            yield pb.GenerateResponse()  # so that it is a generator

    async def ask() -> tuple[tuple[int, bytes], int]:
        body = {"model": "m", "prompt": "x" * 100_000}
        answer = await post(app_before(Refusing()), "/v1/completions", body, asyncio.Event())
        await asyncio.sleep(0.2)  # a thread frees what was made
        return answer, sum(isinstance(each, Turn) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        (status, _), left = asyncio.run(ask())
    finally:
        gc.enable()
    assert (status, left) == (400, 0)


@pytest.mark.long(3)
@pytest.mark.parametrize("token", [None, "a-token"])
def test_requests_with_prompts_are_made_and_if_large_begun_beside_the_loop(
    token: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun_by, take = list[bytes](), list[str](), _LargeCall._take

    def noted(self: _LargeCall, take_one: Any) -> Any:
        begun_by.append(threading.current_thread().name.partition("_")[0])
        return take(self, take_one)

    async def making(make: Callable[[], bytes]) -> bytes:
        made.append(await asyncio.to_thread(make))
        return made[-1]

    async def ask() -> None:
        link = EngineLink.connect(f"unix:{tmp_path}/nobody")
        client = link.of(token, making=making).client  # type: ignore[arg-type]  # of bytes alone
        for asked in (client.reply(prompt="one"), client.count_tokens(prompt="two"), client.embed(["three"])):
            with pytest.raises(Unavailable):
                await asked
        await link.close()

    monkeypatch.setattr(_LargeCall, "_take", noted)
    asyncio.run(ask())
    assert begun_by == []
    monkeypatch.setattr(large_requests, "LARGE_BYTES", 1)
    asyncio.run(ask())
    assert begun_by == ["large-requests"] * 3
    requests = (pb.GenerateRequest, pb.CountTokensRequest, pb.EmbedRequest) * 2
    texts = [str(kind.FromString(each)) for kind, each in zip(requests, made, strict=True)]
    assert [word in text for word, text in zip(("one", "two", "three") * 2, texts, strict=True)] == [True] * 6


@pytest.mark.parametrize(("length", "counted"), [(100, ["theirs", ""]), (100_000, [""])])
def test_a_large_prompt_is_sent_once_whatever_model_it_names(length: int, counted: list[str]) -> None:
    sent = list[str]()

    class OneModel:
        async def get_model(self, _name: str) -> None:
            raise NotFound("no such model", reason="MODEL_NOT_FOUND")

        async def count_tokens(self, *, model: str = "", **_asked: object) -> int:
            sent.append(model)
            if model:
                await self.get_model(model)
            return 7

    turn = Turn(model="theirs", any_model=True, messages=(Said("user", "a" * length),))
    assert asyncio.run(CallerAtEngine(OneModel()).count(turn, ())) == 7  # type: ignore[arg-type]
    assert sent == counted


@pytest.mark.parametrize(("name", "embedded_by"), [("m", ["m", "m"]), ("theirs", ["", "m"])])
def test_texts_to_embed_are_sent_once_whatever_model_they_name(name: str, embedded_by: list[str]) -> None:
    engine, body = PlayedEngine(), {"model": name, "input": ["x"] * 65}
    status, answer = asyncio.run(post(app_before(engine), "/v1/embeddings", body, asyncio.Event()))
    assert (status, len(json.loads(answer)["data"])) == (200, 65)
    assert engine.embedded_by == embedded_by
