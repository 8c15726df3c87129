"""Engines and a gateway that do what a live one does seldom: refuse at first, give turns away, cut an answer."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from kvasir.cachestore.v1 import cachestore_pb2, cachestore_pb2_grpc
from kvasir.errors import KvasirError, NotFound, Unavailable
from kvasir.inference.v1 import inference_pb2, inference_pb2_grpc
from kvasir.status import DETAILS_KEY, answer_to, to_status


class FlakyEngine(inference_pb2_grpc.InferenceServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):  # type: ignore[misc]
    """Refuses the first two calls of each kind, as gRPC does for a service that is gone: without details.

    Which calls a client repeats by itself is seen in what it counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def CountTokens(self, request: Any, context: Any) -> inference_pb2.CountTokensResponse:  # noqa: N802
        self._refuse("CountTokens", context)
        return inference_pb2.CountTokensResponse(tokens=7)

    def GetAgent(self, request: Any, context: Any) -> cachestore_pb2.GetAgentResponse:  # noqa: N802
        self._refuse("GetAgent", context)
        line = cachestore_pb2.SnapshotVersion(version=1, token_count=9)
        return cachestore_pb2.GetAgentResponse(agent=cachestore_pb2.Agent(agent_id="ada", lines=[line]))

    def GetUsage(self, request: Any, context: Any) -> cachestore_pb2.GetUsageResponse:  # noqa: N802
        self._refuse("GetUsage", context)
        return cachestore_pb2.GetUsageResponse(agent_count=1)

    def ListHotMemories(self, request: Any, context: Any) -> inference_pb2.ListHotMemoriesResponse:  # noqa: N802
        self._refuse("ListHotMemories", context)
        return inference_pb2.ListHotMemoriesResponse()

    def ForkAgent(self, request: Any, context: Any) -> cachestore_pb2.ForkAgentResponse:  # noqa: N802
        self._refuse("ForkAgent", context)
        return cachestore_pb2.ForkAgentResponse()

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        self._refuse("Generate", context)
        yield inference_pb2.GenerateResponse()

    def _refuse(self, name: str, context: Any) -> None:
        self.calls[name] += 1
        if self.calls[name] <= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")


class MeasuringEngine(inference_pb2_grpc.InferenceServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):  # type: ignore[misc]
    """UNAVAILABLE for GetUsage; a turn is answered with the choice that its prompt names; notes what it receives."""

    def __init__(self) -> None:
        self.attempts = 0
        self.deadline_s = 0.0
        self.pieces: list[int] = []

    def GetAgent(self, request: Any, context: Any) -> cachestore_pb2.GetAgentResponse:  # noqa: N802
        self.deadline_s = context.time_remaining()
        line = cachestore_pb2.SnapshotVersion(version=1)
        return cachestore_pb2.GetAgentResponse(agent=cachestore_pb2.Agent(agent_id="ada", lines=[line]))

    def GetUsage(self, request: Any, context: Any) -> cachestore_pb2.GetUsageResponse:  # noqa: N802
        self.attempts += 1
        context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    def Embed(self, request: Any, context: Any) -> inference_pb2.EmbedResponse:  # noqa: N802
        return inference_pb2.EmbedResponse(model="cut" if request.truncate else "whole")

    def ImportAgent(self, requests: Any, context: Any) -> cachestore_pb2.ImportAgentResponse:  # noqa: N802
        assert next(requests).HasField("header")
        self.pieces += [len(request.data) for request in requests]
        return cachestore_pb2.ImportAgentResponse(snapshot=cachestore_pb2.SnapshotVersion(version=1))

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id=request.request_id))
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(choice=int(request.prompt), text="x"))
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP))


class MovingEngine(inference_pb2_grpc.InferenceServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):  # type: ignore[misc]
    """Gives every turn away after "Hel"; whoever comes back with the token gets the rest from it. That of "cut" ends
    there as if it were whole, as a proxy may end it; one of several replies ends behind the first reply's end."""

    PEER, TOKEN, CUT_TOKEN = "studio", "the-rest", "a-rest-that-is-cut"

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        event = inference_pb2.GenerateResponse
        if not request.resume_token:
            yield event(started=inference_pb2.Started(request_id=request.request_id))
            yield event(delta=inference_pb2.Delta(text="Hel"))
            if request.agent_id == "cut":
                return
            if request.sampling.n > 1:
                yield event(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP))
                return
            yield event(moved=inference_pb2.Moved(peer=self.PEER, resume_token=self.TOKEN))
        elif request.resume_token in (self.TOKEN, self.CUT_TOKEN):
            yield event(delta=inference_pb2.Delta(text="lo"))
            if request.resume_token == self.CUT_TOKEN:
                return
            snapshot = inference_pb2.SnapshotOutcome(version=4)
            yield event(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP, snapshot=snapshot))
        else:
            _abort(context, NotFound("resume_token: no reply waits for it", reason="RESUME_TOKEN_UNKNOWN"))


class SharingEngine(inference_pb2_grpc.InferenceServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):  # type: ignore[misc]
    """One of the engines of a store. A turn whose agent another engine holds is refused, with that engine's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held_by = name  # every agent
        self.is_refused_late = False  # after the reply's first word
        self.awake = threading.Event()  # else it tells its name to nobody
        self.awake.set()
        self.calls: Counter[str] = Counter()
        self.left_s: float | None = None  # of the last turn's deadline

    def GetCapabilities(self, request: Any, context: Any) -> inference_pb2.GetCapabilitiesResponse:  # noqa: N802
        self.calls["GetCapabilities"] += 1
        self.awake.wait(20)
        return inference_pb2.GetCapabilitiesResponse(lease_owner=self.name)

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        self.calls["Generate"] += 1
        self.left_s = context.time_remaining()
        event = inference_pb2.GenerateResponse
        if self.held_by == self.name or self.is_refused_late:
            yield event(started=inference_pb2.Started(request_id=request.request_id))
            yield event(delta=inference_pb2.Delta(text=f"by {self.name}"))
        if self.held_by != self.name:
            about = {"agent_id": request.agent_id, "owner": self.held_by}
            _abort(context, Unavailable("held", reason="AGENT_HELD_ELSEWHERE", metadata=about, retry_after_s=1.0))
        yield event(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP))


def _abort(context: Any, error: KvasirError) -> None:
    status = to_status(error)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(answer_to(error).code, status.message)


@contextmanager
def served(
    engine: FlakyEngine | MeasuringEngine | MovingEngine | SharingEngine, address: str = "127.0.0.1:0"
) -> Iterator[str]:
    """The engine's address: on loopback, if no other is given."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield address.replace(":0", f":{port}")
    finally:
        server.stop(grace=None)


_DETAILS = [
    {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "domain": "kvasir", "reason": "MEMORY_UNREADABLE"},
    {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.500s"},
]
_REFUSAL = json.dumps({"error": {"code": 14, "message": "not now", "details": _DETAILS}})
_BEGUN = 'event: started\ndata: {"started":{}}\n\nevent: delta\ndata: {"delta":{"text":"Hel"}}\n\n'


class StandInGateway:
    """Answers by the agent's name. "ada" is UNAVAILABLE twice and then there; "away" never is."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.keys: set[str | None] = set()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.partition("/agents/")[2]
        call = f"{request.command} {name}"
        self.calls[call] += 1
        self.keys.add(request.headers["Authorization"])
        request.rfile.read(int(request.headers["Content-Length"] or 0))
        line = {"version": "1", "token_count": "9"}
        match name.removesuffix("/generate"):
            case "ada" if self.calls[call] > 2:
                _send(request, 200, json.dumps({"agent_id": "ada", "lines": [line]}))
            case "cut":  # a proxy ends the answer as if it were whole
                _send(request, 200, _BEGUN)
            case "broken":
                _send(request, 200, _BEGUN, missing_bytes=100)
            case "refused":
                _send(request, 200, f"{_BEGUN}event: error\ndata: {_REFUSAL}\n\n")
            case "elsewhere":
                _send(request, 307, "")
            case "garbage":
                _send(request, 200, "<html>")
            case "silent":
                request.rfile.read(1)  # until the caller leaves
            case _:
                _send(request, 503, _REFUSAL)


def _send(request: BaseHTTPRequestHandler, status: int, body: str, missing_bytes: int = 0) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(body) + missing_bytes))
    if status == 307:
        request.send_header("Location", "/v1/agents/ada")
    request.end_headers()
    request.wfile.write(body.encode())


@contextmanager
def served_over_http(gateway: StandInGateway) -> Iterator[str]:
    """The gateway's URL on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            gateway.answer(self)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
