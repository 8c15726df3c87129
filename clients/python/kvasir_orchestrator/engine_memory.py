"""The engine's memory: each turn appends what its agent has not seen to what it remembers."""

import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from kvasir.clients import AioInferenceClient, GenerateOptions, Reply, enum_word
from kvasir.errors import Cancelled, Conflict, InvalidArgument, NotFound, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb

from kvasir_orchestrator.memory import Answer, ReplyRequest
from kvasir_orchestrator.transcript import Message


class EngineMemory:
    """Agents of one engine, with a client for each other namespace; an empty `model` is the loaded one."""

    def __init__(
        self,
        client: AioInferenceClient,
        clients: Mapping[str, AioInferenceClient] | None = None,
        *,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = {"": client, **(clients or {})}
        self._model, self._clock = model, clock
        # What turns cost whose memory was not stored at once: repeated, they are answered from memory.
        self._unstored: dict[str, Answer] = {}

    async def ask(self, asked: ReplyRequest) -> AsyncGenerator[str | Answer, None]:
        """One turn. Raises Conflict if somebody else has changed the agent since its last turn of this run, and
        Unavailable if its memory is not durable: repeated, the turn is not done twice."""
        if asked.version is not None:
            async with aclosing(self._turn(asked, append=asked.new, version=asked.version or None)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        # Version 0: whoever remembers an earlier run goes on from it, and knows its persona.
        try:
            async with aclosing(self._turn(asked, whole=[*asked.transcript, *asked.new], version=0)) as pieces:
                async for piece in pieces:
                    yield piece
        except Conflict:
            await self._check_not_behind(asked)
            async with aclosing(self._turn(asked, append=asked.new, version=None)) as pieces:
                async for piece in pieces:
                    yield piece

    async def forget(self, agent_id: str, namespace: str) -> None:
        """Delete the agent's memory."""
        with suppress(NotFound):
            await self._client(namespace).delete_agent(agent_id)

    async def _check_not_behind(self, asked: ReplyRequest) -> None:
        """Raises Conflict where the memory has the turn already, behind it others': it would be done twice."""
        requests: list[str] = []
        with suppress(NotFound):
            versions = self._client(asked.namespace).every_snapshot(asked.agent_id)
            requests.extend([version.request_id async for version in versions])
        if asked.request_id in requests and requests[0] != asked.request_id:
            raise Conflict("the agent remembers this turn already, and somebody else's behind it: begin a new run")

    async def _turn(
        self,
        asked: ReplyRequest,
        *,
        append: Sequence[Message] | None = None,
        whole: Sequence[Message] | None = None,
        version: int | None,
    ) -> AsyncGenerator[str | Answer, None]:
        on_full = None
        if asked.on_full is not None:
            on_full = pb.OnFull(policy=f"ON_FULL_POLICY_{asked.on_full.policy.name}", keep=asked.on_full.keep)
        options = replace(
            options_of(asked), model=self._model, agent_id=asked.agent_id, expected_version=version, on_full=on_full
        )
        client = self._client(asked.namespace)
        async with aclosing(streamed(client, options, self._clock, append=append, whole=whole)) as pieces:
            async for piece in pieces:
                yield piece if isinstance(piece, str) else self._kept(asked.request_id, *piece)

    def _client(self, namespace: str) -> AioInferenceClient:
        if namespace not in self._clients:
            known = ", ".join(sorted(self._clients)[1:]) or "none"
            raise InvalidArgument(f"no credential of namespace {namespace!r}: expected one of {known}")
        return self._clients[namespace]

    def _kept(self, request_id: str, answer: Answer, snapshot: pb.SnapshotOutcome) -> Answer:
        """The answer of a turn that is durable; else Unavailable."""
        if before := self._unstored.pop(request_id, None):
            answer = replace(before, text=answer.text, version=answer.version)
        if snapshot.state in (pb.SNAPSHOT_STATE_PENDING, pb.SNAPSHOT_STATE_FAILED):
            self._unstored[request_id] = answer
            state = enum_word(snapshot, "state")
            raise Unavailable(f"the memory of the turn is {state}: {snapshot.reason}", reason="MEMORY_NOT_STORED")
        return answer


def options_of(asked: ReplyRequest) -> GenerateOptions:
    """How a turn is to be done, but for the memory that it uses."""
    return GenerateOptions(
        request_id=asked.request_id,
        max_tokens=asked.max_tokens,
        sampling={"temperature": asked.temperature, "seed": asked.seed},
        regex=asked.regex,
    )


async def streamed(
    client: AioInferenceClient,
    options: GenerateOptions,
    clock: Callable[[], float],
    *,
    append: Sequence[Message] | None = None,
    whole: Sequence[Message] | None = None,
) -> AsyncGenerator[str | tuple[Answer, pb.SnapshotOutcome], None]:
    """One turn: its pieces, and at the end the answer and what became of the memory. Raises Cancelled for a turn that
    another call ended, and InvalidArgument for a reply that is cut before it has its form."""
    began, first_token_s, reply = clock(), 0.0, Reply()
    async with aclosing(client.generate(append_messages=append, messages=whole, options=options)) as events:
        async for event in events:
            reply.add(event)
            if event.HasField("delta"):
                first_token_s = first_token_s or clock() - began
                if event.delta.text:
                    yield event.delta.text
    # What there is of these is no agent's answer.
    if reply.finished.reason == pb.FINISH_REASON_CANCELLED:
        raise Cancelled("the turn was cancelled by another call")
    is_cut = reply.finished.reason == pb.FINISH_REASON_LENGTH
    if is_cut and options.regex is not None and re.fullmatch(options.regex, reply.text) is None:
        raise InvalidArgument.of("max_tokens", "the reply ended before it matched its reply_regex: expected more")
    yield _answer(reply, first_token_s, clock() - began), reply.finished.snapshot


def _answer(reply: Reply, first_token_s: float, total_s: float) -> Answer:
    started, snapshot = reply.started, reply.finished.snapshot
    return Answer(
        text=reply.text,
        prompt_tokens=started.prompt_tokens,
        cached_tokens=started.cached_tokens,
        completion_tokens=reply.finished.usage.completion_tokens,
        source=enum_word(started, "source"),
        match=enum_word(started, "match"),
        reason=started.reason,
        first_token_s=first_token_s,
        total_s=total_s,
        version=snapshot.version if snapshot.state == pb.SNAPSHOT_STATE_COMMITTED else 0,
        left_out=reply.finished.shortening.dropped_messages,
        model=started.model,
    )
