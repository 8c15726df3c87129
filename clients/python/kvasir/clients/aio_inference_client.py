"""The inference service's asynchronous client: turns as streams of events, typed errors, and what was kept when one
breaks.

`inference_client.py` is this file with the awaits taken out, by `tools/make_sync_client.py`; change this one. Every
turn has a request id, so that it can be asked again after a break without being done twice.
"""

import copy
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

from kvasir.clients.channel import Metadata, Tls, aio_channel, bearer
from kvasir.clients.generate_options import GenerateOptions, OptionArguments, merged_options
from kvasir.clients.inference_client_turns import (
    READS,
    Input,
    KnownVersions,
    Messages,
    Reply,
    count_request,
    turn_request,
    warm_request,
)
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.status import from_rpc_error

_Response = TypeVar("_Response")


class AioInferenceClient:
    """An inference service, over one channel. Close it with `async with` or close()."""

    def __init__(self, channel: grpc.aio.Channel, *, token: str | None = None, timeout_s: float = 10.0) -> None:
        self._channel = channel
        self._owns_channel = True
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._metadata: Metadata = bearer(token) if token else ()
        self._timeout_s = timeout_s
        self._known = KnownVersions()

    @classmethod
    def connect(
        cls, address: str, *, token: str | None = None, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Self:
        """A client of the engine at unix:/path or host:port. Connects with the first call. Raises InvalidArgument."""
        return cls(aio_channel(address, tls, READS), token=token, timeout_s=timeout_s)

    def with_token(self, token: str) -> Self:
        """The same service for another caller, over the same channel. A gateway hands on its callers' tokens with it.

        The channel is all that the two clients share, and it stays this one's: closing the new one leaves it open.
        Raises Unauthenticated without a token, because on a Unix socket a call without a token is the owner's.
        """
        other = copy.copy(self)
        other._metadata = bearer(token)
        other._owns_channel = False
        other._known = KnownVersions()
        return other

    async def close(self) -> None:
        if self._owns_channel:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        append_messages: Messages | None = None,
        options: GenerateOptions | None = None,
        timeout_s: float | None = None,
        **named: Unpack[OptionArguments],
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Continue a text, and stream the events: started, prefill_progress, delta…, finished.

        Give exactly one of `prompt`, `messages` and `append_messages` (which follow the messages that the agent
        remembers). GenerateOptions says what else a turn takes, as a value in `options` or as arguments of the call.
        Closing the generator cancels the turn. Raises the types of `kvasir.errors`. When an agent's turn breaks, the
        error's metadata has the turn's request_id (ask again with it: nothing is done twice) and remembered_version.
        """
        options = merged_options(options, named)
        request = turn_request(
            Input(prompt, messages, append_messages), options, options.request_id or str(uuid.uuid4())
        )
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                self._known.note(request.agent_id, response)
                yield response
        except grpc.RpcError as error:
            raise self._known.explained(from_rpc_error(error), request) from None
        finally:
            call.cancel()

    async def reply(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        append_messages: Messages | None = None,
        options: GenerateOptions | None = None,
        timeout_s: float | None = None,
        **named: Unpack[OptionArguments],
    ) -> Reply:
        """As generate, to its end."""
        reply = Reply()
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

    async def warm(
        self,
        *,
        agent_id: str,
        prompt: str | None = None,
        messages: Messages | None = None,
        append_messages: Messages | None = None,
        tools: Sequence[pb.Tool] = (),
        model: str = "",
        timeout_s: float | None = None,
    ) -> pb.WarmResponse:
        """Put an agent's memory into the engine ahead of its next turn, and with an input compute that prompt too."""
        request = warm_request(Input(prompt, messages, append_messages), agent_id=agent_id, tools=tools, model=model)
        return await self._call(pb.WarmResponse, request, timeout_s)

    async def count_tokens(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        tools: Sequence[pb.Tool] = (),
        model: str = "",
    ) -> int:
        """Tokens of a prompt, or of messages after the chat template."""
        request = count_request(Input(prompt, messages, None), tools=tools, model=model)
        return (await self._call(pb.CountTokensResponse, request, self._timeout_s)).tokens

    async def list_models(self) -> Sequence[pb.Model]:
        """The models that the engine may load; one at most is loaded."""
        return (await self._call(pb.ListModelsResponse, pb.ListModelsRequest(), self._timeout_s)).models

    async def get_model(self, name: str = "") -> pb.Model:
        """One model; the loaded one when no name is given. Raises NotFound."""
        return (await self._call(pb.GetModelResponse, pb.GetModelRequest(model=name), self._timeout_s)).model

    async def load_model(
        self, name: str, *, drop_unstored: bool = False, timeout_s: float | None = None
    ) -> pb.LoadModelResponse:
        """Make this the loaded model; another is unloaded first. Takes as long as loading does. Raises NotFound, and
        FailedPrecondition when hot memories could not be stored.
        """
        request = pb.LoadModelRequest(model=name, drop_unstored=drop_unstored)
        return await self._call(pb.LoadModelResponse, request, timeout_s)

    async def unload_model(
        self, name: str = "", *, drop_unstored: bool = False, timeout_s: float | None = None
    ) -> pb.UnloadModelResponse:
        """Store what is hot, and free the model. Raises as load_model does."""
        request = pb.UnloadModelRequest(model=name, drop_unstored=drop_unstored)
        return await self._call(pb.UnloadModelResponse, request, timeout_s)

    async def get_capabilities(self) -> pb.GetCapabilitiesResponse:
        """Limits of the engine, whether it reaches its store, and misses since its start."""
        return await self._call(pb.GetCapabilitiesResponse, pb.GetCapabilitiesRequest(), self._timeout_s)

    async def get_stats(self) -> pb.GetStatsResponse:
        """Counters since the start, and what is under way."""
        return await self._call(pb.GetStatsResponse, pb.GetStatsRequest(), self._timeout_s)

    async def _call(self, response_type: type[_Response], request: Any, timeout_s: float | None) -> _Response:
        """One round trip of the RPC that is answered by this type: XResponse belongs to X."""
        method = getattr(self._stub, response_type.__name__.removesuffix("Response"))
        try:
            return cast("_Response", await method(request, timeout=timeout_s, metadata=self._metadata))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
