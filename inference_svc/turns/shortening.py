"""Shortens an agent's memory when it outgrows the model's context.

A turn that does not fit leaves out the oldest messages before it replies. After a reply that fills the memory, the rest
of the conversation is computed in the background, with the reply's own tokens behind it, and becomes the agent's next
version: what the turn would have left, had its prompt been the shorter one. The agent's next turn waits for that and is
hot.

- A retry is answered from the shorter version, and an `expected_version` that names the turn's own is taken for it.
- A summary is asked for on the hot memory, in a turn that only reads; it goes on as a user's message ("Remember: …"),
  which every template takes. A turn that leaves messages out before it replies asks for none: an older one stays.
- `Manifest.shortened` counts what is left out, before and behind the question, so that a client that sends its whole
  list goes on. A list that ends inside what is left out goes as it was sent, and its memory lacks nothing.
- A last question that is too long by itself is refused.
- While the store is away, the label that a hot memory's last turn was given holds.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import structlog
from kvasir import errors, on_full
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.on_full import OnFull, OnFullPolicy

from inference_svc.engine.api import Ended, SamplingParams
from inference_svc.engine.context import ContextExceeded
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_planning import Prepared
from inference_svc.memory.store.patience import Budget
from inference_svc.model.prompting import Tokenized
from inference_svc.text.conversation import dialogue, json_of_messages, render
from inference_svc.text.shortening import (
    FULL_SHARE,
    SUMMARY_REQUEST,
    Messages,
    Shorter,
    as_summary,
    kept_tokens,
    shorter,
    summary_of,
    with_summary,
)
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.prompt_text import prompt_text
from inference_svc.turns.turn_data import MessagesInput, Shortening, TurnRequest
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_state import TurnState, TurnTask, reply_reader

_LOG = structlog.get_logger(__name__)
# A summary may fill an eighth of the context, and that many tokens.
_MOST_SUMMARY_TOKENS = 512
_SUMMARY_SHARE = 8
_FEWEST_SUMMARY_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Serving:
    """The steps of a turn that a turn for shortening goes through too."""

    newest: Callable[[TurnState, Budget], Awaitable[Recollection]]
    plan_and_run: Callable[[TurnState, Recollection, str, Budget], Awaitable[tuple[Recollection, Prepared, Ended]]]
    counted: Callable[[TurnState], AbstractContextManager[None]]


class MemoryShortener:
    """Shortens the conversations of one model's turns."""

    def __init__(self, parts: EngineParts, ending: TurnEnding, serving: Serving) -> None:
        self._parts = parts
        self._ending = ending
        self._serving = serving

    @property
    def _context_tokens(self) -> int:
        return self._parts.engine.model.context_tokens

    def _most_prompt_tokens(self, request: TurnRequest) -> int:
        """Beside the tokens that the turn may generate."""
        return self._context_tokens - (1 if request.clamps_max_tokens else request.sampling.max_tokens)

    def _full_tokens(self, request: TurnRequest) -> int:
        """A memory with more is full: a turn like this one would soon not fit, or does not fit any more."""
        return min(int(self._context_tokens * FULL_SHARE), self._most_prompt_tokens(request))

    @property
    def _most_summary_tokens(self) -> int:
        return min(_MOST_SUMMARY_TOKENS, self._context_tokens // _SUMMARY_SHARE)

    async def before_reply(self, turn: TurnState, recollection: Recollection, refusal: ContextExceeded) -> str:
        """The prompt of a turn that does not fit, without its oldest messages. Raises the refusal where messages may
        not be left out, or where the last question is too long by itself.
        """
        setting = _setting(turn.request, recollection)
        most_tokens = self._most_prompt_tokens(turn.request)
        if not setting.shortens or not isinstance(turn.request.input, MessagesInput) or most_tokens < 1:
            raise refusal
        wanted_tokens = self._kept_tokens(turn.request, setting)
        found = await self._shorter(turn, turn.messages, wanted_tokens, most_tokens)
        if found is None and summary_of(turn.messages, turn.shortened):  # which is kept where it fits
            found = await self._shorter(turn, turn.messages, wanted_tokens, most_tokens, keeps_summary=False)
        if found is None:
            raise refusal
        turn.messages, turn.shortened = found.messages, found.shortened
        turn.shortening = Shortening(setting.policy, found.dropped, len(found.messages), before_reply=True)
        text, turn.dialogue = await prompt_text(self._parts.prompting, turn.request, found.messages, turn.clock)
        return text

    async def after_reply(self, turn: TurnState, recollection: Recollection, memory: AgentMemory) -> None:
        """Decide whether the turns to come go on with fewer messages, and with which."""
        tokens = len(memory.transcript.token_ids)
        if not memory.messages or tokens <= self._full_tokens(turn.request):
            return
        try:
            setting = _setting(turn.request, recollection)
            found = await self._shorter_after(turn, memory, setting) if setting.shortens else None
        except errors.KvasirError as error:  # the reply is there: only the turns to come are concerned
            _LOG.warning("memory.not_shortened", request_id=turn.request.request_id, reason=error.reason)
            return
        if found is not None:
            turn.shorter, turn.whole, turn.on_full = found, memory, setting
            before = turn.shortening
            dropped = found.dropped + (before.dropped_messages if before is not None else 0)
            turn.shortening = Shortening(setting.policy, dropped, len(found.messages), before_reply=before is not None)

    async def shorten(self, turn: TurnState) -> None:
        """Make the shorter memory the agent's next version. The turn's reader has its end already."""
        assert turn.shorter is not None
        assert turn.whole is not None
        setting, budget, kept, memory = turn.on_full, self._parts.budget(), turn.shorter, turn.whole
        if not _is_newest(memory, await self._serving.newest(turn, budget)):
            return
        messages, shortened = kept.messages, manifest_pb2.Shortened()
        shortened.CopyFrom(kept.shortened)
        shortened.is_after_turn = True
        if setting.policy is OnFullPolicy.SUMMARIZE:
            answer = await self._summary(turn, setting, memory)
            summary = as_summary(answer) if answer else summary_of(memory.messages, memory.shortened)
            messages, shortened.has_summary = with_summary(messages, summary), bool(summary)
        again = replace(turn.request.sampling, max_tokens=0, constraint=None)
        follow = self._following(turn, MessagesInput(messages[:-1]), again, is_read_only=False)
        follow.shortened, follow.messages = shortened, messages
        with self._serving.counted(follow):
            newest = await self._serving.newest(follow, budget)
            if not _is_newest(memory, newest):  # a rollback, or another engine, came while the summary was made
                return
            text, follow.dialogue = await prompt_text(self._parts.prompting, follow.request, messages[:-1], turn.clock)
            transcript, said = memory.transcript, memory.turn
            follow.spoken = Tokenized(
                transcript.token_ids[said.prompt_tokens :], tuple(transcript.token_chars[said.prompt_tokens :])
            )
            ran = await self._serving.plan_and_run(follow, newest, text, budget)
            await self._ending.shortened(follow, memory, *ran)

    async def _summary(self, turn: TurnState, setting: OnFull, memory: AgentMemory) -> str:
        """What the agent says it must not forget; empty where that does not fit, or it says nothing."""
        question = manifest_pb2.Message(role="user", content=setting.summary_request or SUMMARY_REQUEST)
        appended, sampling = MessagesInput((question,), is_append=True), SamplingParams(self._most_summary_tokens)
        asking = self._following(turn, appended, sampling, is_read_only=True)
        asking.messages = (*memory.messages, question)
        budget = self._parts.budget()
        try:
            with self._serving.counted(asking):
                newest = await self._serving.newest(asking, budget)
                given = asking.messages
                text, asking.dialogue = await prompt_text(self._parts.prompting, asking.request, given, turn.clock)
                prompting = self._parts.prompting
                asked = await prompting.run(turn.request.namespace, lambda: prompting.tokenize(text))
                room = min(self._most_summary_tokens, self._context_tokens - len(asked.ids))
                if room < _FEWEST_SUMMARY_TOKENS:
                    return ""
                asking.request = replace(asking.request, sampling=SamplingParams(room))
                _, _, ended = await self._serving.plan_and_run(asking, newest, text, budget)
        except errors.KvasirError as error:
            _LOG.warning("memory.no_summary", request_id=turn.request.request_id, reason=error.reason)
            return ""
        reader = reply_reader(asking.request, self._parts.prompting, text)
        return (reader.push(ended.text).answer + reader.end("").answer).strip()

    def _following(
        self, turn: TurnState, given: MessagesInput, sampling: SamplingParams, *, is_read_only: bool
    ) -> TurnState:
        """A turn of the same agent that nobody waits for; one that only reads leaves its agent as it is."""
        request = replace(
            turn.request,
            input=given,
            sampling=sampling,
            clamps_max_tokens=False,
            expected_version=None,
            base_version=None,
            keep_partial=False,
            is_read_only=is_read_only,
            begun=None if is_read_only else turn.request.begun,
        )
        task = TurnTask(self._parts.outbox())
        arrived = self._parts.clock()
        return TurnState(request, task, arrived=arrived, clock=turn.clock, tools_order=turn.tools_order)

    def _kept_tokens(self, request: TurnRequest, setting: OnFull) -> int:
        return kept_tokens(self._context_tokens, self._full_tokens(request), setting.keep)

    async def _shorter_after(self, turn: TurnState, memory: AgentMemory, setting: OnFull) -> Shorter | None:
        """Which messages stay after a reply; None if all do. A new summary will take an older one's place."""
        wanted_tokens, most_tokens = self._kept_tokens(turn.request, setting), len(memory.transcript.token_ids) - 1
        if not (keeps_summary := setting.policy is not OnFullPolicy.SUMMARIZE):
            wanted_tokens -= self._most_summary_tokens
        found = await self._shorter(turn, memory.messages, wanted_tokens, most_tokens, keeps_summary=keeps_summary)
        return found if found is not None and found.dropped else None

    async def _shorter(
        self,
        turn: TurnState,
        messages: Messages,
        wanted_tokens: int,
        most_tokens: int,
        *,
        keeps_summary: bool = True,
    ) -> Shorter | None:
        """Which messages stay. Parses the JSON of them all for the turn."""
        request = turn.request
        objects = request.objects.also(json_of_messages(messages, "remembered_messages"))
        objects.check_size()
        counter = await self._parts.prompting.twin(request.namespace)
        await counter.read(request.namespace, objects)

        template = counter.template_at(turn.clock, request.template_settings)

        def tokens_of(candidate: Messages) -> int:
            text = render(template, dialogue(candidate, request.tools, objects, counter.specials))
            return len(counter.tokenize(text).ids)

        before = turn.shortened
        turn.request = replace(request, objects=objects)
        return await counter.run(
            request.namespace,
            lambda: shorter(
                messages,
                tokens_of,
                wanted_tokens=min(wanted_tokens, most_tokens),
                most_tokens=most_tokens,
                before=before,
                keeps_summary=keeps_summary,
            ),
        )


def _setting(request: TurnRequest, recollection: Recollection) -> OnFull:
    """The turn's own setting, or its agent's. Raises InvalidArgument for a label that says none."""
    if request.on_full is not None:
        return request.on_full
    label = recollection.settings.on_full
    return on_full.from_label(label) if label else OnFull()


def _is_newest(memory: AgentMemory, newest: Recollection) -> bool:
    """Whether the agent still remembers just this, and its history has it, so that nothing is lost with a shorter one.
    An engine without a store keeps no history.
    """
    found = newest.memory
    if found is None or newest.head is None or found.turn != memory.turn:
        return False
    is_same = found.transcript.token_ids == memory.transcript.token_ids
    return is_same and (found.publication.is_head or found.publication.task is None)
