"""The inference service's asynchronous client. A turn's request id lets a caller retry: nothing is done twice."""

import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Self, Unpack, cast

import grpc
import grpc.aio

from kvasir.clients import inference_client_turns as turns
from kvasir.clients.aio.agent_client import AioAgentClient
from kvasir.clients.aio.large_requests import LargeRequests
from kvasir.clients.aio.service_client import Making, at_once
from kvasir.clients.channel import Metadata, Tls, aio_channel, calls_of
from kvasir.clients.generate_options import GenerateOptions, OptionArguments, with_named
from kvasir.errors import KvasirError, NotFound, Unavailable
from kvasir.inference.v1 import handover_pb2_grpc, inference_pb2_grpc
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1.handover_pb2 import HandOverTurnRequest, HandOverTurnResponse
from kvasir.waits import LOOK_S, SOON_S


class AioInferenceClient(AioAgentClient):
    """An inference service and the agents of its store, over one channel. It belongs to the event loop that runs
    when it is made. Close it with `async with` or close()."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        large: LargeRequests | None = None,
    ) -> None:
        """`large`: sends large requests beside the event loop. It is not closed with the client."""
        stubs: Any = (inference_pb2_grpc.InferenceServiceStub, handover_pb2_grpc.HandOverServiceStub)
        super().__init__(channel, calls_of(channel, *stubs, **_written_calls(channel, large)), token, timeout_s)
        self._known = turns.KnownVersions()
        self.making: Making = at_once
        """Makes requests with prompts, and their bytes. A server sets one that does it beside its event loop."""
        self.peers: dict[str, AioInferenceClient] = {}
        """Clients of other engines, by the names that this engine gives them. A turn that moves to one of them is
        followed there; of any other, this engine reads the rest. Addresses come from here alone, never from an engine.
        """
        self.engines: Sequence[AioInferenceClient] = ()
        """Clients of the other engines of this engine's store. A turn whose agent one of them holds is made there."""
        self._lease_owner = ""

    @classmethod
    def connect(
        cls, address: str, *, token: str | None = None, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Self:
        """A client of the engine at unix:/path or host:port. Connects with the first call. Raises InvalidArgument,
        and Unauthenticated for a token that no header can hold."""
        return cls(aio_channel(address, tls, turns.READS), token=token, timeout_s=timeout_s)

    def with_token(self, token: str) -> Self:
        other = super().with_token(token)
        other._known = turns.KnownVersions()  # one caller's versions are in no error of another's
        other.peers, other.engines = {}, ()  # their tokens are this caller's
        return other

    def _place(self, request: Any) -> Metadata:
        """That of the agent that is read: the engine where it is hot may know a turn that is not stored yet."""
        return turns.place_of(getattr(request, "source_agent_id", "") or getattr(request, "agent_id", ""))

    async def generate(
        self,
        *,
        prompt: turns.Prompt | None = None,
        messages: turns.Messages | None = None,
        append_messages: turns.Messages | None = None,
        options: GenerateOptions | None = None,
        timeout_s: float | None = None,
        **named: Unpack[OptionArguments],
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Continue a text, and stream the events: started, prefill_progress, delta…, finished.

        If the turn moves to another engine, the rest comes through this one; or, if `peers` has that engine, from
        there, behind `moved`. If this engine stops meanwhile, Unavailable (TURN_MOVED) is raised; its metadata has the
        peer's name and the resume_token.

        Give exactly one of `prompt` (a text, or token ids), `messages` and `append_messages`, which follow what the
        agent remembers. GenerateOptions has what else a turn takes, as a value in `options` or as arguments of the
        call. Closing the generator cancels the turn. Raises the types of `kvasir.errors`. When an agent's turn breaks,
        the error's metadata has the turn's request_id (retry with it: nothing is done twice) and
        remembered_version."""
        options = with_named(options, named)
        request_id = options.request_id or str(uuid.uuid4())
        make = partial(turns.turn_request, turns.Input(prompt, messages, append_messages), options, request_id)
        written = await self.making(lambda: make().SerializeToString())
        unfinished = options.choices
        try:
            async with aclosing(self._turn(written, timeout_s, turns.place_of(options.agent_id))) as responses:
                async for response in responses:
                    self._known.note(options.agent_id, response)
                    unfinished -= response.HasField("finished")
                    yield response
            if unfinished > 0:
                raise _cut()
        except KvasirError as error:
            raise self._known.explained(error, options.agent_id, request_id) from None

    def resume(self, resume_token: str, *, timeout_s: float | None = None) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The events after `moved` of a reply that another engine began. Raises NotFound (RESUME_TOKEN_UNKNOWN)."""
        return self._turn(pb.GenerateRequest(resume_token=resume_token).SerializeToString(), timeout_s)

    async def _turn(
        self, written: bytes, timeout_s: float | None, place: Metadata = ()
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """A turn's events, wherever its agent is, and wherever it goes."""
        has_begun, ends_s = False, None if timeout_s is None else time.monotonic() + timeout_s
        try:
            async with aclosing(self._turn_here(written, timeout_s, place)) as responses:
                async for response in responses:
                    has_begun = True
                    yield response
            return
        except Unavailable as error:
            holder = None if has_begun else await self._holder(error, ends_s)
            if holder is None:
                raise
        async with aclosing(holder._turn_here(written, _left_s(ends_s), place)) as responses:
            async for response in responses:
                yield response

    async def _holder(self, error: Unavailable, ends_s: float | None) -> "AioInferenceClient | None":
        """The engine that has the agent of a refused turn, if it is known here and answers before the turn must end."""
        if error.reason != "AGENT_HELD_ELSEWHERE" or not (owner := error.metadata.get("owner")):
            return None
        for engine in self.engines:
            if engine._lease_owner == owner:  # an engine that starts again keeps its name
                return engine
        for engine in self.engines:
            left_s = _left_s(ends_s)
            if left_s is not None and left_s < LOOK_S:  # calls end early by a little: one more might just succeed
                return None
            with suppress(KvasirError):
                # One that hangs, as a Mac that sleeps, must not keep the turn from those behind it.
                soon_s = min(engine._timeout_s, SOON_S, math.inf if left_s is None else left_s)
                engine._lease_owner = (await engine.get_capabilities(timeout_s=soon_s)).lease_owner
            if engine._lease_owner == owner:
                return engine
        return None

    async def _turn_here(
        self, written: bytes, timeout_s: float | None, place: Metadata
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """A turn's events from this engine on, wherever it goes."""
        if self.peers:  # a message's bytes behind another's add their fields to it
            written += pb.GenerateRequest(followed_peers=list(self.peers)).SerializeToString()
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        has_finished = False
        moved: turns.Moved | None = None
        lost: Unavailable | None = None
        try:
            async with aclosing(self._responses(self._stub.Generate, written, timeout_s, place)) as responses:
                async for response in responses:
                    yield response
                    has_finished = has_finished or response.HasField("finished")
                    moved = turns.moved_by(response)
        except Unavailable as error:
            if moved is None:  # else the engine ended after it had reported where the turn is
                moved = turns.lost_by(error)
                if moved is None or self._peer(moved.peer) is None:
                    raise
                lost = error
        if moved is None:
            if not has_finished:
                raise _cut()
            return
        peer = self._peer(moved.peer)
        if peer is None:
            raise moved.unknown()
        try:
            async with aclosing(peer.resume(moved.resume_token, timeout_s=_left_s(ends_s))) as rest:
                async for response in rest:
                    lost = None
                    yield response
        except NotFound as error:
            if lost is None or error.reason != "RESUME_TOKEN_UNKNOWN":
                raise
            raise lost from None  # the peer never heard that the turn is its own: asking again does it

    def _peer(self, name: str) -> "AioInferenceClient | None":
        return self.peers.get(name)

    async def reply(
        self,
        *,
        prompt: turns.Prompt | None = None,
        messages: turns.Messages | None = None,
        append_messages: turns.Messages | None = None,
        options: GenerateOptions | None = None,
        timeout_s: float | None = None,
        **named: Unpack[OptionArguments],
    ) -> turns.Reply:
        """As generate, to its end."""
        reply = turns.Reply()
        turn = self.generate(
            prompt=prompt,
            messages=messages,
            append_messages=append_messages,
            options=options,
            timeout_s=timeout_s,
            **named,
        )
        async with aclosing(turn) as events:
            async for event in events:
                reply.add(event)
        return reply

    async def list_turns(self) -> Sequence[pb.Turn]:
        """The turns of the caller's namespace that wait or run, the oldest first."""
        return (await self._call(pb.ListTurnsResponse, pb.ListTurnsRequest())).turns

    async def cancel_turn(self, request_id: str, *, timeout_s: float | None = None) -> Sequence[pb.Finished]:
        """End the turns of a request, whoever reads them; how each choice ended. Raises NotFound."""
        request = pb.CancelTurnRequest(request_id=request_id)
        return (await self._call(pb.CancelTurnResponse, request, timeout_s)).finished

    async def hand_over(
        self, peer: str, *, agent_id: str | None = None, request_id: str | None = None, timeout_s: float = 180.0
    ) -> HandOverTurnResponse:
        """Give a running turn to a peer of the engine; its reader follows. Raises NotFound, and the peer's refusals."""
        request = HandOverTurnRequest(peer=peer, agent_id=agent_id, request_id=request_id)  # type: ignore[arg-type]
        return await self._call(HandOverTurnResponse, request, timeout_s)

    async def list_hot_memories(self, agent_ids: Sequence[str]) -> Sequence[pb.HotMemory]:
        """Those of the agents' memories that are hot; at most 1000 agents are listed."""
        return (await self._call(pb.ListHotMemoriesResponse, pb.ListHotMemoriesRequest(agent_ids=agent_ids))).memories

    async def warm(
        self,
        *,
        agent_id: str,
        prompt: turns.Prompt | None = None,
        messages: turns.Messages | None = None,
        append_messages: turns.Messages | None = None,
        tools: Sequence[pb.Tool] = (),
        model: str = "",
        timeout_s: float | None = None,
        **named: Unpack[turns.ThinkingArguments],
    ) -> pb.WarmResponse:
        """Put an agent's memory into the engine ahead of its next turn, and with an input compute that prompt too."""
        given = turns.Input(prompt, messages, append_messages)
        request = turns.warm_request(given, agent_id=agent_id, tools=tools, model=model, **named)
        return await self._call(pb.WarmResponse, request, timeout_s, has_deadline=False)

    async def sleep(self, agent_id: str, *, model: str = "", timeout_s: float | None = None) -> pb.SleepResponse:
        """Let an agent's KV go and keep its tokens. Raises FailedPrecondition (CANNOT_SLEEP): it stays as it is."""
        request = turns.sleep_request(agent_id, model)
        return await self._call(pb.SleepResponse, request, timeout_s, has_deadline=False)

    async def count_tokens(
        self,
        *,
        prompt: turns.Prompt | None = None,
        messages: turns.Messages | None = None,
        tools: Sequence[pb.Tool] = (),
        model: str = "",
        continue_final_message: bool = False,
        **named: Unpack[turns.ThinkingArguments],
    ) -> int:
        """Tokens of a prompt, or of messages after the chat template."""
        given = turns.Input(prompt, messages, None)
        make = partial(turns.count_request, continue_final_message=continue_final_message, **named)
        written = await self.making(lambda: make(given, tools=tools, model=model).SerializeToString())
        return (await self._call(pb.CountTokensResponse, written)).tokens

    async def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        dimensions: int | None = None,
        truncate: bool = False,
        priority: pb.Priority = pb.PRIORITY_UNSPECIFIED,
        timeout_s: float | None = None,
    ) -> pb.EmbedResponse:
        """Embeddings of texts, or of their tokens. Without a model's name: by the embedding model if there is one."""
        make = partial(turns.embed_request, dimensions=dimensions, truncate=truncate, priority=priority)
        written = await self.making(lambda: make(texts, model=model).SerializeToString())
        return await self._call(pb.EmbedResponse, written, timeout_s, has_deadline=False)

    async def list_models(self) -> Sequence[pb.Model]:
        """The models that the engine may load; one at most is loaded."""
        return (await self._call(pb.ListModelsResponse, pb.ListModelsRequest())).models

    async def get_model(self, name: str = "") -> pb.Model:
        """One model; the loaded one when no name is given. Raises NotFound."""
        return (await self._call(pb.GetModelResponse, pb.GetModelRequest(model=name))).model

    async def load_model(
        self,
        name: str,
        *,
        drop_unstored: bool = False,
        on_progress: Callable[[pb.LoadProgress], None] | None = None,
        timeout_s: float | None = None,
    ) -> pb.LoadedModel:
        """Load this model instead of another. Raises NotFound, and FailedPrecondition if memories cannot be stored."""
        request = pb.LoadModelRequest(model=name, drop_unstored=drop_unstored)
        steps = self._steps(self._stub.LoadModel, request, timeout_s)
        return cast("pb.LoadedModel", await self._until_done("load", steps, on_progress))

    async def unload_model(
        self, name: str = "", *, drop_unstored: bool = False, timeout_s: float | None = None
    ) -> pb.UnloadModelResponse:
        """Store the hot memories, and free the model. Raises as load_model does."""
        request = pb.UnloadModelRequest(model=name, drop_unstored=drop_unstored)
        return await self._call(pb.UnloadModelResponse, request, timeout_s, has_deadline=False)

    async def get_capabilities(self, *, timeout_s: float | None = None) -> pb.GetCapabilitiesResponse:
        """What the engine is, and its limits."""
        return await self._call(pb.GetCapabilitiesResponse, pb.GetCapabilitiesRequest(), timeout_s)

    async def get_stats(self) -> pb.GetStatsResponse:
        """Counters since the start, what is under way, and whether the store answers."""
        return await self._call(pb.GetStatsResponse, pb.GetStatsRequest())


def _cut() -> Unavailable:
    """The end of a reply whose stream ended as if it were whole, as a proxy may end it."""
    return Unavailable("the reply was cut", reason="STREAM_CUT")


def _left_s(ends_s: float | None) -> float | None:
    """What is left until then; None: no deadline."""
    return None if ends_s is None else max(0.0, ends_s - time.monotonic())


def _written_calls(channel: Any, large: LargeRequests | None) -> dict[str, Any]:
    """The calls that take prompts: they are given requests' bytes."""
    path = f"/{pb.DESCRIPTOR.services_by_name['InferenceService'].full_name}"
    calls: dict[str, Any] = {}
    for name, response in (("CountTokens", pb.CountTokensResponse), ("Embed", pb.EmbedResponse)):
        small = channel.unary_unary(f"{path}/{name}", response_deserializer=response.FromString)
        calls[name] = large.unary(small, f"{path}/{name}", response.FromString) if large is not None else small
    parse = pb.GenerateResponse.FromString
    small = channel.unary_stream(f"{path}/Generate", response_deserializer=parse)
    calls["Generate"] = large.stream(small, f"{path}/Generate", parse) if large is not None else small
    return calls
