"""Runs turns: finds the memory, streams the events, and ends the turn when its reader goes away."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from kvasir.clients import Reply
from kvasir.common.v1 import message_pb2
from kvasir.errors import Cancelled, Internal, InvalidArgument, KvasirError, NotFound
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.operating.log_errors import places
from kvasir.waits import SOON_S
from starlette.types import Receive, Scope, Send

from kvasir_gateway.chunks import ReplyStream
from kvasir_gateway.conversations import Conversations
from kvasir_gateway.engine import CallerAtEngine, sent_messages
from kvasir_gateway.metrics import GatewayNumbers
from kvasir_gateway.reading.known_answers import Chain
from kvasir_gateway.reading.quoting import Quoted
from kvasir_gateway.reading.records import PREFIX, AgentRecords
from kvasir_gateway.reading.side_calls import SUMMARY, SideRule, side_call_of
from kvasir_gateway.reading.titles import TITLE, title_of
from kvasir_gateway.turn import Said, ToolUse, Turn

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
Events = AsyncGenerator[pb.GenerateResponse, None]


class ClientLeft(Cancelled):
    """The reader of an answer has closed its connection."""


@dataclass(slots=True)
class Memory:
    """The memory of one turn. `options`: fields of GenerateOptions for it. `begun`: what of the reply its caller has
    written. `side_call`: the rule that took the turn for one."""

    agent_id: str
    conversations: Conversations | None
    namespace: str
    chain: Chain
    options: Mapping[str, Any] = field(default_factory=dict)
    begun: Said | None = None
    side_call: str = ""

    async def answered(self, reply: Reply) -> None:
        """The turn is done: its conversation goes on from here. To be called before its reader sees the end."""
        if self.conversations is not None and reply.finished.reason != pb.FINISH_REASON_CANCELLED:
            version = reply.finished.snapshot.version
            whole = said(reply)
            if self.begun is not None:
                whole = replace(whole, content=self.begun.content + whole.content)
            self.conversations.answered(self.namespace, self.agent_id, self.chain, whole, version)
            self.left()

    def left(self) -> None:
        """The turn has ended, however it did. A second call does nothing: the agent may be busy with another turn."""
        if self.conversations is not None:
            self.conversations.left(self.namespace, self.agent_id)
            self.conversations = None


@dataclass(slots=True, kw_only=True)
class SideMemory(Memory):
    """What a side call reads: the memory of the conversation that it follows, if there is one. It changes nothing.
    `summarized`: the agent that a summary is of, and its messages."""

    records: AgentRecords
    summarized: str
    messages: Sequence[Said]

    async def answered(self, reply: Reply) -> None:
        """A summary may take the place of its conversation's history."""
        if self.side_call == SUMMARY and self.summarized and self.conversations is not None:
            place, known = (self.namespace, self.summarized), self.conversations
            try:
                async with asyncio.timeout(SOON_S):
                    await known.summarized(place, self.chain, self.messages, reply.text, self.records)
            except TimeoutError:
                _log.warning("conversations.summary_not_kept error=STORE_HANGS")

    def left(self) -> None:
        """Nothing was taken."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A turn, and what is made of its messages: for a long conversation that takes its time."""

    turn: Turn
    chain: Chain
    digest: str
    messages: Sequence[message_pb2.Message]
    side_call: str  # the rule that takes it for one
    if_new: "Ready | None" = None  # in its place, where its agent remembers nothing yet

    def using(self, memory: Memory) -> "Ready":
        return replace(self, turn=replace(self.turn, memory={**self.turn.memory, **memory.options}))


class Turns:
    def __init__(
        self, conversations: Conversations, ended: Callable[[str, pb.Finished], None] = lambda *_: None
    ) -> None:
        """`ended`: is given each turn's namespace and end."""
        self._conversations = conversations
        self._ended = ended
        self._beside: set[asyncio.Task[Any]] = set()  # what no turn waits for

    def ready(self, turn: Turn, side_rules: Sequence[SideRule] = (), *, is_exact: bool = False) -> Ready:
        """May run in any thread. `is_exact`: another time makes another conversation. Raises InvalidArgument."""
        chain = self._conversations.chain(turn.messages, turn.hint, is_exact=is_exact)
        *_, digest = self._conversations.digests_of(turn.messages)
        return Ready(turn, chain, digest, sent_messages(turn), side_call_of(turn, side_rules))

    def appended(self, ready: Ready) -> Ready:
        """The turn with its newest messages alone: the agent remembers those before them. One that remembers nothing
        yet gets all of them. May run in any thread. Raises InvalidArgument."""
        turn, tail = ready.turn, newest_messages(ready.turn.messages)
        if not tail:
            raise InvalidArgument.of("messages", "expected a message behind the last reply, to append")
        if len(tail) == len(turn.messages):
            return ready
        whole = replace(turn, is_append=False, memory={**turn.memory, "expected_version": 0})
        newest = replace(turn, messages=tail, memory={**turn.memory, "expect_existing": True})
        return replace(self.ready(newest), if_new=replace(ready, turn=whole))

    async def memory(
        self, ready: Ready, caller: CallerAtEngine, namespace: str, agent_id: str, *, keeps_partial: bool = False
    ) -> Memory:
        """The turn's memory. The caller must report when it has `left`. `keeps_partial`: a conversation
        remembers a reply whose reader leaves, as far as it came: what follows would compute its prompt again."""
        turn, chain = ready.turn, ready.chain
        is_aside = turn.memory.get("memory_mode") == pb.MEMORY_MODE_NONE or turn.sampling.get("n", 1) > 1
        if agent_id or not turn.messages or is_aside:
            return Memory(agent_id, None, namespace, chain)
        known, records = self._conversations, caller.records
        self._do_beside(known.tidy(namespace, records), "not_tidied")
        # First: what clients write around a summary may read like a request for one.
        is_side_call = bool(ready.side_call)
        if compacted := await known.compacted(namespace, chain, turn.messages, records, is_side_call=is_side_call):
            return Memory(compacted, known, namespace, chain, {"replace_memory": True}, turn.begun)
        if ready.side_call:
            read = await known.agent_behind(namespace, chain, turn.messages, records)
            is_summary = ready.side_call == SUMMARY
            # Where the turn does not follow the conversation, its text quotes it.
            quoted = await known.quoted_by(chain, turn.messages, records) if is_summary and not read else Quoted()
            return SideMemory(
                *(read, known, namespace, chain),
                options={"memory_mode": pb.MEMORY_MODE_READ_ONLY if read else pb.MEMORY_MODE_NONE},
                side_call=ready.side_call,
                records=records,
                summarized=read or quoted.agent_id,
                messages=(*turn.messages, *quoted.messages) if is_summary else (),
            )
        found = await known.agent_for(namespace, chain, turn.messages, records)
        # A cut reply in a fork would be a second memory of the conversation.
        options = {"keep_partial": True} if keeps_partial and (namespace, found) not in known.forks else {}
        return Memory(found, known, namespace, chain, options, turn.begun)

    def digests_of(self, messages: Iterable[Said]) -> Iterator[str]:
        return self._conversations.digests_of(messages)

    async def events(self, ready: Ready, caller: CallerAtEngine, memory: Memory, request_id: str) -> Events:
        """A turn's events. Closing the generator cancels the turn."""
        reply = Reply()
        async with aclosing(_generated(ready, caller, memory.agent_id, request_id)) as events:
            async for event in events:
                reply.add(event)
                if event.HasField("finished"):
                    self._ended(memory.namespace, event.finished)
                    self._entitle(ready, caller, memory, reply)
                    await memory.answered(reply)
                yield event

    def _entitle(self, ready: Ready, caller: CallerAtEngine, memory: Memory, reply: Reply) -> None:
        """Give a new conversation of a caller who named no agent the title by which people find it."""
        if memory.conversations is None or memory.side_call or not memory.agent_id.startswith(PREFIX):
            return
        was_cut = memory.conversations.cut.get((memory.namespace, memory.chain.points[0].alike)) == memory.agent_id
        is_new = was_cut or reply.started.continuation == pb.CONTINUATION_NEW
        if title := title_of(ready.turn.messages) if is_new else "":
            update = caller.at(memory.agent_id).update_agent(memory.agent_id, labels={TITLE: title})
            self._do_beside(update, "not_entitled")

    def _do_beside(self, work: Coroutine[Any, Any, object], failed: str) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(partial(self._done_beside, failed))

    def _done_beside(self, failed: str, task: "asyncio.Task[Any]") -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("conversations.%s error=%s", failed, getattr(error, "reason", type(error).__name__))


async def _generated(ready: Ready, caller: CallerAtEngine, agent_id: str, request_id: str) -> Events:
    """The engine knows what is remembered in RAM alone, so it decides whether the agent is new."""
    has_begun = False
    try:
        async with aclosing(caller.generate(ready.turn, ready.messages, agent_id, request_id)) as events:
            async for event in events:
                has_begun = True
                yield event
            return
    except NotFound as error:
        if has_begun or ready.if_new is None or error.reason != "AGENT_NOT_FOUND":
            raise
    async with aclosing(_generated(ready.if_new, caller, agent_id, request_id)) as events:
        async for event in events:
            yield event


def newest_messages(messages: Sequence[Said]) -> tuple[Said, ...]:
    """Those behind the last reply; where there is none, all but the system's at the beginning."""
    replies = [number for number, message in enumerate(messages, 1) if message.role == "assistant"]
    begin = replies[-1] if replies else 0
    while not replies and begin < len(messages) and messages[begin].role == "system":
        begin += 1
    return tuple(messages[begin:])


def said(reply: Reply) -> Said:
    """The reply as a client repeats it in its next request."""
    calls = tuple(ToolUse(call.id, call.name, call.arguments_json) for call in reply.finished.tool_calls)
    return Said("assistant", reply.text, tool_calls=calls)


async def unless_left(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """The result of `work`, which is cancelled when the client closes its connection: raises ClientLeft then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft("the client closed its connection")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def gather(events: Events) -> Reply:
    """A turn to its end."""
    reply = Reply()
    async with aclosing(events):
        async for event in events:
            reply.add(event)
    return reply


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How an API has a stream written."""

    chunks: ReplyStream
    error_event: Callable[[KvasirError, int], str]  # behind so many events
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EventStream:
    """A turn's answer as a stream, once its first event has come. It ends the turn when its reader leaves."""

    first: pb.GenerateResponse
    events: Events
    form: StreamForm
    left: Callable[[], None]  # it has ended, however it did
    numbers: GatewayNumbers
    clock: Callable[[], float]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        given = {"cache-control": "no-cache", **self.form.headers}
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()]
        self.numbers.open_streams += 1
        try:
            async with aclosing(self.events):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await unless_left(receive, self._write(send))
                await send({"type": "http.response.body", "body": b""})
        except (ClientLeft, OSError):
            self.numbers.disconnects += 1  # the turn ended with its events
        finally:
            self.numbers.open_streams -= 1
            self.left()

    async def _write(self, send: Send) -> None:
        chunks = self.form.chunks
        try:
            await _piece(send, chunks.frames(self.first))
            async for event in self.events:
                received_s = self.clock()
                if text := chunks.frames(event):
                    await _piece(send, text)
                self.numbers.written.add(self.clock() - received_s)
            await _piece(send, chunks.end())
        except KvasirError as error:
            await _piece(send, self.form.error_event(error, chunks.sent))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours; the status line is sent already
            _log.error("answer.failed error=%s at=%s", type(error).__name__, places(error))
            bug = Internal("the answer ended by a bug of the gateway")
            await _piece(send, self.form.error_event(bug, chunks.sent))


async def _piece(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
