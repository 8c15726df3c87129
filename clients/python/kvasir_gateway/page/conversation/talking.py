"""A person talks with an agent in the page: a conversation, its turns as streams, and its branches."""

import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvasir.clients import GenerateOptions
from kvasir.errors import AlreadyExists, Conflict, Internal, InvalidArgument, KvasirError, NotFound
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.names import MAX_NAME_BYTES, check_agent_id, check_request_id

from kvasir_gateway.answering import Events, EventStream, StreamForm, gather, unless_left
from kvasir_gateway.chunks import ReplyStream
from kvasir_gateway.engine import sent_messages
from kvasir_gateway.errors import plain
from kvasir_gateway.metrics import GatewayNumbers
from kvasir_gateway.page import looking
from kvasir_gateway.page.conversation.transcript import Place, facts, transcript, version_with
from kvasir_gateway.page.look import Answer, Handler, Look, Sources, version_of
from kvasir_gateway.page.numbers.history import History
from kvasir_gateway.page.rendering import HEADERS, difference_words, reuse_words
from kvasir_gateway.reading.titles import TITLE, first_words
from kvasir_gateway.turn import Asked, Said, Turn, sse

SAY_BYTES = 1 << 20  # of a form: somebody's message, as URL-encoded text
_BEGUN_HERE = "chat/"
_MOST_NAMES_TRIED = 50
_NEARLY_FULL = 0.8
_STORED = {pb.SNAPSHOT_STATE_PENDING: "not stored yet", pb.SNAPSHOT_STATE_FAILED: "not stored"}


@dataclass(frozen=True, slots=True)
class Saying:
    """Somebody's message to an agent. `head`: its newest version as the page had it; None: not known. `base`: the
    version that is gone on from, if it is another. `keep`: how many of its messages stay; None: all."""

    agent_id: str
    text: str
    system: str
    request_id: str
    head: int | None
    base: Place | None
    keep: int | None

    @classmethod
    def of(cls, form: Mapping[str, str], new_id: str) -> "Saying":
        """`new_id`: of a request that names none. Raises InvalidArgument."""
        text = form.get("text", "").replace("\r\n", "\n")  # as browsers send a form's lines
        if not text.strip():
            raise InvalidArgument.of("text", "expected a message")
        version = form.get("version", "")
        return cls(
            agent_id=check_agent_id(form.get("name", "").strip() or form.get("id", ""), "name"),
            text=text,
            system=form.get("system", "").strip(),
            request_id=check_request_id(form.get("request_id", "") or new_id),
            head=_count(form, "head"),
            base=version_of(version) if version else None,
            keep=_count(form, "keep"),
        )

    @property
    def is_first(self) -> bool:
        return self.head == 0


class TalkEvents(ReplyStream):
    """A turn as the page's script reads it: server-sent events with texts that are ready to be shown."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._started = pb.Started()

    def frames(self, event: pb.GenerateResponse) -> str:
        match event.WhichOneof("event"):
            case "started":
                self._started = event.started
                return sse({"id": self._asked.agent_id}, "begun")
            case "prefill_progress":
                done, total = event.prefill_progress.tokens_done, event.prefill_progress.tokens_total
                return sse({"done": done, "total": total}, "reading")
            case "delta":
                return sse({"text": event.delta.text, "thought": event.delta.reasoning_text}, "delta")
            case "finished" if not self._started.request_id:
                return sse({"problem": "it was cancelled before it began"}, "refused")
            case "finished":
                return sse(_ended(self._started, event.finished), "ended")
        return ""


class Talking:
    """The handlers of conversations."""

    def __init__(self, numbers: GatewayNumbers, history: History, sources: Sources) -> None:
        self._numbers = numbers
        self._history = history
        self._clock = sources.clock
        self._new_id = sources.new_id

    def pages(self) -> Mapping[str, Handler]:
        return {"chat": self._chat, "said": self._said, "facts": self._facts}

    def writes(self) -> Mapping[str, Handler]:
        return {"say": self._say, "branch": self._branch}

    async def _chat(self, look: Look) -> Answer:
        """A conversation; without an agent's name a new one."""
        place, keep = _place(look), _count(look.request.query_params, "keep")
        if not look.query("id"):
            return look.shown("chat.html", name=self._new_name(look), new=True, facts=None, seen=None, **_composer())
        name = check_agent_id(look.query("id"), "id")
        known = await facts(look.caller.at(name), name)
        seen = await looking.panel(transcript(look.caller, name, place))
        text = ""
        if seen.value is not None and keep is not None and look.query("edit"):
            text = _text_at(seen.value.messages, keep).content
        composer = _composer(known.newest.version, place, keep, text)
        return look.shown("chat.html", name=name, new=False, facts=known, seen=seen, **composer)

    async def _said(self, look: Look) -> Answer:
        """The newest messages alone, for the script that has followed them."""
        name, after = check_agent_id(look.query("id"), "id"), _count(look.request.query_params, "after") or 0
        seen = await transcript(look.caller, name, None)
        return look.shown("said.html", name=name, messages=seen.shown(after), place=None)

    async def _facts(self, look: Look) -> Answer:
        name = check_agent_id(look.query("id"), "id")
        return look.shown("facts.html", name=name, facts=await facts(look.caller.at(name), name))

    async def _say(self, look: Look) -> Answer:
        """A turn: for a script as a stream, else the conversation with it."""
        saying = Saying.of(look.form, self._new_id())
        events = self._noted(look, saying, _turn(look, saying, await _input(look, saying)))
        if not look.is_scripts:
            await unless_left(look.request.receive, gather(events))
            return look.goto("chat", id=saying.agent_id)
        try:
            first = await unless_left(look.request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        asked = Asked(request_id=saying.request_id, created=int(look.now), model="", agent_id=saying.agent_id)
        form = StreamForm(TalkEvents(asked), _broken, {**HEADERS, "content-type": "text/event-stream"})
        return EventStream(first, events, form, lambda: None, self._numbers, self._clock)

    async def _noted(self, look: Look, saying: Saying, turn: Events) -> Events:
        async with aclosing(turn) as events:
            async for event in events:
                if event.HasField("started"):
                    self._history.began(look.namespace, saying.agent_id, event.started)
                elif event.HasField("finished"):
                    self._history.ended(look.namespace, event.finished)
                yield event

    async def _branch(self, look: Look) -> Answer:
        """A new agent that remembers a conversation up to one of its replies."""
        name, keep = look.named(), _count(look.form, "keep") or 0
        place = version_of(look.form["version"]) if look.form.get("version") else None
        (line, version), is_whole = await version_with(look.caller, name, place, keep)
        made = await self._forked(look, name, line, version)
        # Of a version that is no longer kept the fork remembers more, and its next turn goes back to the reply.
        rest = {} if is_whole else {"keep": str(keep)}
        return look.goto("chat", id=made, done="branch", **rest)

    async def _forked(self, look: Look, name: str, line: str, version: int) -> str:
        """A new agent from a version, named after the old one. Raises AlreadyExists, NotFound."""
        title = (await look.caller.at(name).get_agent(name)).labels.get(TITLE, "")
        for number in range(2, _MOST_NAMES_TRIED):
            made = f"{name}-{number}"
            if name.startswith(_BEGUN_HERE) or len(made.encode()) > MAX_NAME_BYTES:
                made = self._new_name(look)
            with suppress(AlreadyExists):
                await look.caller.at(name).fork_agent(name, made, line, version)
                if title:
                    await look.caller.at(made).update_agent(made, labels={TITLE: f"{title} ({number})"})
                return made
        raise AlreadyExists(f"{name}-2 to {name}-{_MOST_NAMES_TRIED - 1} exist: fork it by a name of your own")

    def _new_name(self, look: Look) -> str:
        """For a conversation that begins in the page without a name."""
        return f"{_BEGUN_HERE}{datetime.fromtimestamp(look.now, UTC):%Y-%m-%d}-{self._new_id()[:8]}"


async def _input(look: Look, saying: Saying) -> Mapping[str, Any]:
    """The engine's request. Raises InvalidArgument, NotFound, DataLoss."""
    own = {"role": "user", "content": saying.text}
    if saying.is_first and saying.system:
        return {"messages": [{"role": "system", "content": saying.system}, own]}
    if saying.keep is None:
        return {"append_messages": [own]}
    seen = await transcript(look.caller, saying.agent_id, saying.base)
    turn = Turn(model="", messages=(*seen.messages[: saying.keep], Said("user", saying.text)))
    return {"messages": await look.caller.records.beside(lambda: sent_messages(turn))}


async def _turn(look: Look, saying: Saying, given: Mapping[str, Any]) -> Events:
    """The events of a turn. One that somebody stops is remembered as far as it was read."""
    options = GenerateOptions(
        agent_id=saying.agent_id,
        request_id=saying.request_id,
        expected_version=saying.head,
        base_version=saying.base[1] if saying.base is not None and saying.base[1] != saying.head else None,
        expect_existing=saying.head != 0,
        replace_memory=saying.keep is not None,
        keep_partial=True,
    )
    try:
        async with aclosing(look.caller.events(given, options)) as events:
            async for event in events:
                if event.HasField("moved"):  # it is followed here
                    continue
                if event.HasField("finished") and saying.is_first and saying.agent_id.startswith(_BEGUN_HERE):
                    with suppress(KvasirError):  # it is found by its name
                        await look.caller.at(saying.agent_id).update_agent(
                            saying.agent_id, labels={TITLE: first_words(saying.text)}
                        )
                yield event
    except Conflict as error:
        told = f"an agent named {saying.agent_id} exists: choose another name, or go on in its own conversation"
        if not saying.is_first:
            told = "the conversation has changed meanwhile: reload, and send it again"
        raise Conflict(told, reason=error.reason, metadata=error.metadata) from None


def _ended(started: pb.Started, finished: pb.Finished) -> dict[str, Any]:
    """What is shown under a reply."""
    snapshot, left_out = finished.snapshot, finished.shortening.dropped_messages
    notes = [
        reuse_words(started.source, started.cached_tokens, started.prompt_tokens, started.reason),
        f"first token after {finished.timings.first_token.ToMilliseconds():,} ms",
    ]
    if (why := _STORED.get(snapshot.state)) is not None:
        notes.append(f"{why}: {snapshot.reason}" if snapshot.reason else why)
    elif snapshot.version:
        notes.append(f"version {snapshot.version}")
    if finished.reason == pb.FINISH_REASON_CANCELLED:
        notes.append("stopped")
    elif finished.reason == pb.FINISH_REASON_LENGTH:
        notes.append("cut at its longest")
    if left_out:
        notes.append(f"the memory is full: oldest messages left out from now on: {left_out}")
    elif finished.context_tokens and finished.memory_tokens >= _NEARLY_FULL * finished.context_tokens:
        notes.append(f"the memory is {finished.memory_tokens / finished.context_tokens:.0%} full")
    parted = difference_words(started.difference) if started.HasField("difference") else ""
    return {"notes": notes, "parted": parted, "head": snapshot.version or None}


def _broken(error: KvasirError, _number: int) -> str:
    """A stream's last event, when it breaks."""
    told = plain(error) if not isinstance(error, Internal) else "the reply ended by a fault; see the logs"
    return sse({"problem": told}, "refused")


def _composer(head: int = 0, place: Place | None = None, keep: int | None = None, text: str = "") -> dict[str, Any]:
    """A form's settings beside its text. `place`: the version that is looked at, where that is not the newest."""
    is_newest = place is None or place[1] == head
    return {"head": head, "place": None if is_newest else place, "keep": keep, "text": text}


def _text_at(messages: Sequence[Said], number: int) -> Said:
    if number >= len(messages):
        raise NotFound("there is no message of that number")
    return messages[number]


def _place(look: Look) -> Place | None:
    chosen = look.query("version")
    return version_of(chosen) if chosen else None


def _count(given: Mapping[str, str], name: str) -> int | None:
    """A number of a form or query; None where there is none. Raises InvalidArgument."""
    text = given.get(name, "")
    if text and re.fullmatch("[0-9]{1,18}", text) is None:
        raise InvalidArgument.of(name, "expected a number")
    return int(text) if text else None
