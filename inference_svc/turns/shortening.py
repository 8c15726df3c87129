"""Shortens an agent's memory when it outgrows the model's context.

A turn that does not fit leaves out the oldest messages before it replies. After a reply that fills the memory, the rest
of the conversation is computed in the background, with the reply's own tokens behind it, and becomes the agent's next
version: the memory that the turn would have left, had its prompt been the shorter one. The agent's next turn waits for
that and is hot.

- A retry is answered from the shorter version, and an `expected_version` that names the turn's own is taken for it.
- A summary is made on the hot memory, in a turn that only reads; it goes on as a user's message ("Remember: …"),
  which every template takes. A turn that leaves messages out before it replies makes none: an older one stays.
- `Manifest.shortened` counts what is left out, before and behind the question, so that a client that sends its whole
  list goes on. A list that ends inside what is left out goes as it was sent, and its memory lacks nothing.
- A last question that is too long by itself is refused.
- While the store is away, the label that a hot memory's last turn was given holds.
"""

from dataclasses import replace

import structlog
from kvasir import errors, on_full
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.on_full import DEFAULT_KEEP, OnFull, OnFullPolicy

from inference_svc.engine.api import ContextExceeded, SamplingParams
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.recall import Recollection
from inference_svc.model.prompting import Tokenized
from inference_svc.text.conversation import Dialogue
from inference_svc.text.kept_messages import FULL_SHARE, SUMMARY_REQUEST, as_summary, summary_of, with_summary
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import LaterShortening, Prompted, Recalled, Remembered
from inference_svc.turns.plan_running import PlanRunner
from inference_svc.turns.progress import Progress, TurnTiming
from inference_svc.turns.prompts.texts import prompt_text, reply_reader, shorter_of, with_messages
from inference_svc.turns.turn_data import MessagesInput, Shortening, TurnRequest
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_reporter import counted

_LOG = structlog.get_logger(__name__)
# A summary may fill an eighth of the context, and that many tokens.
_MOST_SUMMARY_TOKENS = 512
_SUMMARY_SHARE = 8
_FEWEST_SUMMARY_TOKENS = 16


class MemoryShortener:
    def __init__(self, parts: EngineParts, plans: PlanRunner, ending: TurnEnding) -> None:
        self._parts = parts
        self._plans = plans
        self._ending = ending

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

    async def before_reply(self, prompted: Prompted, refusal: ContextExceeded) -> Prompted:
        """The prompt of a turn that does not fit, without its oldest messages. Raises the refusal if it cannot be."""
        setting, most_tokens = _setting(prompted), self._most_prompt_tokens(prompted.request)
        if not setting.shortens or not isinstance(prompted.request.input, MessagesInput) or most_tokens < 1:
            raise refusal
        wanted_tokens = self._kept_tokens(prompted.request, setting)
        prompted = await with_messages(self._parts.prompting, prompted, prompted.recalled.messages)
        found = await shorter_of(self._parts.prompting, prompted, wanted_tokens, most_tokens)
        if found is None:
            raise refusal
        shortening = Shortening(setting.policy, found.dropped, len(found.messages), before_reply=True)
        request, clock = prompted.request, prompted.clock
        text, conversation = await prompt_text(self._parts.prompting, request, found.messages, clock)
        recalled = replace(prompted.recalled, messages=found.messages, shortened=found.shortened)
        return replace(prompted, recalled=recalled, text=text, dialogue=conversation, shortening=shortening)

    async def after_reply(self, remembered: Remembered) -> Remembered:
        """Decide whether the turns to come go on with fewer messages, and with which."""
        memory, prompted = remembered.memory, remembered.ran.planned.prompted
        if memory is None or not memory.messages:
            return remembered
        if len(memory.transcript.token_ids) <= self._full_tokens(prompted.request):
            return remembered
        try:
            setting = _setting(prompted, remembered.ran.planned.recollection)
            later = await self._shorter_after(prompted, memory, setting) if setting.shortens else None
        except errors.KvasirError as error:  # the reply is there: only the turns to come are concerned
            _LOG.warning("memory.not_shortened", request_id=prompted.request.request_id, reason=error.reason)
            return remembered
        if later is None:
            return remembered
        before, found = remembered.shortening, later.found
        dropped = found.dropped + (before.dropped_messages if before is not None else 0)
        shortening = Shortening(setting.policy, dropped, len(found.messages), before_reply=before is not None)
        return replace(remembered, shortening=shortening, later=later)

    async def shorten(self, remembered: Remembered) -> None:
        """Make the shorter memory the agent's next version. The turn's reader has its end already."""
        memory, later, prompted = remembered.memory, remembered.later, remembered.ran.planned.prompted
        assert memory is not None
        assert later is not None
        budget, request = self._parts.budget(), later.request
        newest = await self._parts.recall.of_turn(request.key, budget, extends=request.extends)
        if not _is_newest(memory, newest):
            return
        messages, shortened = later.found.messages, manifest_pb2.Shortened()
        shortened.CopyFrom(later.found.shortened)
        shortened.is_after_turn = True
        if later.setting.policy is OnFullPolicy.SUMMARIZE:
            answer = await self._summary(prompted, later, memory)
            summary = as_summary(answer) if answer else summary_of(memory.messages, memory.shortened)
            messages, shortened.has_summary = with_summary(messages, summary), bool(summary)
        again = replace(request.sampling, max_tokens=0, constraint=None)
        request = _following(request, MessagesInput(messages[:-1]), again, is_read_only=False)
        cursor, turn = self._parts.event_cursor(request), self._progress(request)
        with counted(turn):
            newest = await self._parts.recall.of_turn(request.key, budget, extends=request.extends)
            if not _is_newest(memory, newest):  # a rollback, or another engine, came while the summary was made
                return
            text, conversation = await prompt_text(self._parts.prompting, request, messages[:-1], prompted.clock)
            transcript, said = memory.transcript, memory.turn
            recalled = Recalled(request, newest, messages=messages, shortened=shortened, event_cursor=cursor)
            said_before = slice(said.prompt_tokens, None)
            reply = Tokenized(transcript.token_ids[said_before], transcript.token_chars[said_before])
            made = _beside(prompted, recalled, text, conversation, reply)
            await self._ending.shortened(await self._plans.plan_and_run(made, turn, budget), memory)

    async def _summary(self, prompted: Prompted, later: LaterShortening, memory: AgentMemory) -> str:
        """The agent's summary of what it must not forget; empty where that does not fit, or there is none."""
        question = manifest_pb2.Message(role="user", content=later.setting.summary_request or SUMMARY_REQUEST)
        appended, sampling = MessagesInput((question,), is_append=True), SamplingParams(self._most_summary_tokens)
        request = _following(later.request, appended, sampling, is_read_only=True)
        turn, budget, prompting = self._progress(request), self._parts.budget(), self._parts.prompting
        messages = (*memory.messages, question)
        try:
            with counted(turn):
                newest = await self._parts.recall.of_turn(request.key, budget, extends=request.extends)
                text, conversation = await prompt_text(prompting, request, messages, prompted.clock)
                asked = await prompting.run(request.namespace, lambda: prompting.tokenize(text))
                room = min(self._most_summary_tokens, self._context_tokens - len(asked.ids))
                if room < _FEWEST_SUMMARY_TOKENS:
                    return ""
                request = replace(request, sampling=SamplingParams(room))
                recalled = Recalled(request, newest, messages=messages)
                made = _beside(prompted, recalled, text, conversation)
                ran = await self._plans.plan_and_run(made, turn, budget)
        except errors.KvasirError as error:
            _LOG.warning("memory.no_summary", request_id=request.request_id, reason=error.reason)
            return ""
        reader = reply_reader(request, prompting, text)
        return (reader.push(ran.ended.text).answer + reader.end("").answer).strip()

    def _progress(self, request: TurnRequest) -> Progress:
        counters = self._parts.stats.of(request.namespace)
        return Progress(request, self._parts.outbox(), TurnTiming(self._parts.clock()), counters)

    def _kept_tokens(self, request: TurnRequest, setting: OnFull) -> int:
        return kept_tokens(self._context_tokens, self._full_tokens(request), setting.keep)

    async def _shorter_after(self, prompted: Prompted, memory: AgentMemory, setting: OnFull) -> LaterShortening | None:
        """Which messages stay after a reply; None if all do. A new summary will take an older one's place."""
        wanted_tokens, most_tokens = self._kept_tokens(prompted.request, setting), len(memory.transcript.token_ids) - 1
        if not (keeps_summary := setting.policy is not OnFullPolicy.SUMMARIZE):
            wanted_tokens -= self._most_summary_tokens
        prompted = await with_messages(self._parts.prompting, prompted, memory.messages)
        found = await shorter_of(
            self._parts.prompting, prompted, wanted_tokens, most_tokens, keeps_summary=keeps_summary
        )
        return LaterShortening(found, setting, prompted.request) if found is not None and found.dropped else None


def kept_tokens(context_tokens: int, full_tokens: int, keep: float) -> int:
    """How many tokens a memory that is full from `full_tokens` on shrinks to: the share `keep` of the context. Where
    long replies leave less than that, it counts from what they leave, and is the default share at least.
    """
    return int(min(context_tokens * keep, full_tokens * max(keep, DEFAULT_KEEP) / FULL_SHARE))


def _following(
    request: TurnRequest, given: MessagesInput, sampling: SamplingParams, *, is_read_only: bool
) -> TurnRequest:
    """A turn of the same agent that nobody waits for; one that only reads leaves its agent as it is."""
    memory = request.memory
    return replace(
        request,
        input=given,
        sampling=sampling,
        clamps_max_tokens=False,
        memory=replace(memory, expected_version=None, base_version=None, keep_partial=False, is_read_only=is_read_only),
        prompt=replace(request.prompt, begun=None) if is_read_only else request.prompt,
    )


def _beside(
    prompted: Prompted, recalled: Recalled, text: str, conversation: Dialogue | None, reply: Tokenized | None = None
) -> Prompted:
    """The prompt of a turn that nobody waits for, at the time and with the tools of another."""
    clock, tools_order = prompted.clock, prompted.tools_order
    return Prompted(recalled, text, conversation, None, clock, tools_order, reply=reply)


def _setting(prompted: Prompted, recollection: Recollection | None = None) -> OnFull:
    """The turn's own setting, or its agent's. Raises InvalidArgument for a label that has none."""
    if prompted.request.memory.on_full is not None:
        return prompted.request.memory.on_full
    label = (recollection or prompted.recalled.recollection).settings.on_full
    return on_full.from_label(label) if label else OnFull()


def _is_newest(memory: AgentMemory, newest: Recollection) -> bool:
    """Whether the agent still remembers just this, and its history keeps it. Without a store there is no history."""
    found = newest.memory
    if found is None or newest.head is None or found.turn != memory.turn:
        return False
    is_same = found.transcript.token_ids == memory.transcript.token_ids
    return is_same and (found.publication.standing.is_stored or found.publication.task is None)
