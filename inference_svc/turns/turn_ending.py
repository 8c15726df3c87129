"""The end of a turn: the agent's new memory, its publication, the last message; and retries, answered from memory."""

import asyncio
from dataclasses import replace
from enum import Enum
from functools import partial

import structlog
from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.server.operating.traces import told

from inference_svc.engine.api import AgentKey, FinishReason, Timings
from inference_svc.memory.agent_memory import AgentMemory, Ahead, Publication, StoredFiles, nothing_yet
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState, Source
from inference_svc.memory.recall import Recollection
from inference_svc.memory.replaying import Runs
from inference_svc.text.prefix_matching import Outcome, RememberedText
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import Planned, Ran, Remembered
from inference_svc.turns.progress import Progress, TurnTiming
from inference_svc.turns.prompts.continuing import may_follow
from inference_svc.turns.prompts.texts import remembered_reply, reply_again
from inference_svc.turns.turn_data import Continuation, TurnDelta, TurnFinished, TurnRequest, TurnStarted, Warmed

_LOG = structlog.get_logger(__name__)


class Retry(Enum):
    REPLAYED = "replayed"
    REPEATED = "repeated"  # it was cut (keep_partial), or was made under another KV identity


class TurnEnding:
    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    async def remember(self, ran: Ran) -> Remembered:
        """Make the agent's new memory and attach it to its hot KV, if the turn leaves one."""
        planned, ended, request = ran.planned, ran.ended, ran.planned.request
        if not planned.recalled.is_kept:
            return Remembered(ran, shortening=planned.prompted.shortening)
        said, messages = await remembered_reply(self._parts.prompting, ran)
        made_by = manifest_pb2.Turn(
            request_id=request.request_id,
            prompt_tokens=ended.prompt_tokens,
            prompt_chars=len(ran.prepared.text),
            finish_reason=_finish_reason(ran),
            input_digest=request.input_digest,
            reply=ended.text,
            matched_stop=ended.matched_stop,
        )
        memory = self._attach(ran, said.transcript, messages, made_by)
        return Remembered(ran, memory, planned.prompted.shortening)

    async def shortened(self, ran: Ran, whole: AgentMemory) -> None:
        """Make and store the memory that `whole` became with fewer messages, as a turn has computed it."""
        prompted, said, state = ran.planned.prompted, whole.turn, ran.ended.state
        key, reply = prompted.request.key, prompted.reply
        assert key is not None
        assert reply is not None
        text = ran.prepared.text + whole.transcript.text[said.prompt_chars :]
        transcript = RememberedText(text, state.token_ids, state.token_chars)
        made_by = manifest_pb2.Turn()
        made_by.CopyFrom(said)
        made_by.prompt_tokens = len(state.token_ids) - len(reply.ids)
        made_by.prompt_chars = len(ran.prepared.text)
        memory = self._attach(ran, transcript, prompted.recalled.messages, made_by)
        outcome = await self._keep(key, memory, ran)
        _LOG.info(
            "memory.shortened",
            request_id=prompted.request.request_id,
            tokens_before=len(whole.transcript.token_ids),
            tokens=len(transcript.token_ids),
            dropped_messages=memory.shortened.dropped_messages if memory.shortened is not None else 0,
            snapshot=outcome.state.value,
        )

    async def finish(self, remembered: Remembered, turn: Progress) -> None:
        ran, memory, ended_s = remembered.ran, remembered.memory, self._parts.clock()
        key, ended, times = turn.request.key, ran.ended, turn.times
        snapshot = unkept(turn, ran.planned)
        if key is not None and memory is not None:
            snapshot = await self._keep(key, memory, ran)
        turn.emit(
            TurnFinished(
                finish_reason=_finish_reason(ran),
                matched_stop=ended.matched_stop,
                prompt_tokens=ended.prompt_tokens,
                cached_tokens=ended.cached_tokens,
                completion_tokens=ended.completion_tokens,
                timings=replace(
                    ended.timings,
                    queue_s=times.queue_s + ended.timings.queue_s,
                    restore_s=times.restore_s + ended.timings.restore_s,
                    first_token_s=(times.first_token_at or self._parts.clock()) - times.arrived,
                ),
                snapshot=snapshot,
                tool_calls=ran.calls,
                memory_tokens=len(memory.transcript.token_ids) if memory is not None else 0,
                context_tokens=self._parts.engine.model.context_tokens,
                shortening=remembered.shortening,
                drafted_tokens=ended.drafted_tokens,
                accepted_draft_tokens=ended.accepted_draft_tokens,
                mask_passes=ended.mask_passes,
            )
        )
        turn.counters.tokens["drafted"] += ended.drafted_tokens
        turn.counters.tokens["accepted_draft"] += ended.accepted_draft_tokens
        if times.last_token_at is not None:
            turn.counters.times.last_event.add(self._parts.clock() - times.last_token_at)
        source, now_s = (turn.source or ran.prepared.source).value, self._parts.clock()
        # Behind the reader, whose turn on the loop comes first.
        soon = asyncio.get_running_loop().call_soon
        soon(self._trace, ran, times, source, now_s - ended_s)
        soon(self._log, ran, snapshot, times, source, (ended_s, now_s))

    def _log(
        self, ran: Ran, snapshot: SnapshotOutcome, times: TurnTiming, source: str, ended_stored_s: tuple[float, float]
    ) -> None:
        ended, (ended_s, stored_s) = ran.ended, ended_stored_s
        last_token_s = times.last_token_at or ended_s
        _LOG.info(
            "turn.finished",
            request_id=ran.planned.request.request_id,
            reason=_finish_reason(ran),
            source=source,
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            completion_tokens=ended.completion_tokens,
            snapshot=snapshot.state.value,
            prefill_ms=round(1e3 * ended.timings.prefill_s, 1),
            # Since its last token: until the engine ended the turn, and until its memory was stored.
            ended_ms=round(1e3 * (ended_s - last_token_s), 1),
            stored_ms=round(1e3 * (stored_s - last_token_s), 1),
        )

    def _trace(self, ran: Ran, times: TurnTiming, source: str, ended_ago_s: float) -> None:
        """Record the parts of a turn, which ended so long ago; since then its memory was stored."""
        ended, timings = ran.ended, ran.ended.timings
        queue_s = times.queue_s + timings.queue_s
        told("queue", self._parts.clock() - times.arrived - queue_s, queue_s, {})
        told("commit", 0.0, ended_ago_s, {})
        told("decode", ended_ago_s, timings.decode_s, {"completion_tokens": ended.completion_tokens})
        ended_ago_s += timings.decode_s
        computed = {"prompt_tokens": ended.prompt_tokens, "cached_tokens": ended.cached_tokens}
        told("prefill", ended_ago_s, timings.prefill_s, computed)
        ended_ago_s += timings.prefill_s
        told("restore", ended_ago_s, times.restore_s + timings.restore_s, {"source": source})

    def warmed(self, ran: Ran, turn: Progress) -> None:
        """Attach the agent's memory to the KV that was computed ahead of its turn."""
        state, recollection, prepared = ran.ended.state, ran.planned.recollection, ran.prepared
        memory = recollection.memory
        if memory is None or memory.computed_ids != state.token_ids:
            transcript = RememberedText(prepared.text, state.token_ids, state.token_chars)
            base = memory or nothing_yet(recollection.head, self._parts.engine.model.tokenizer_digest)
            memory = replace(
                base,
                ahead=Ahead(
                    transcript, prepared.stored_blocks, state.shareable_tokens, state.rewind_points, self._runs(ran)
                ),
            )
        elif recollection.kv_from is not Source.HOT or memory.ahead is not None:
            # The KV is the memory's own again. Rows that were not reused are computed again, and are not the store's.
            stored, windows = list(prepared.stored_blocks), dict(prepared.stored_windows)
            memory = replace(
                memory,
                ahead=None,
                shareable_tokens=state.shareable_tokens,
                rewind_points=state.rewind_points,
                files=replace(memory.files, blocks=stored, windows=windows, runs=self._runs(ran)),
            )
        if turn.request.key is not None:
            standing = memory.publication.standing
            if standing.stage is Stage.ELSEWHERE:
                # It follows no version of its own line. Only events since it was made can prove it outdated.
                cursor, generation = ran.planned.recalled.event_cursor, self._generation(turn.request.key)
                standing = replace(standing, event_cursor=cursor, generation=generation)
                memory = replace(memory, publication=Publication(standing))
            self._parts.tag(turn.request.key, replace(memory, settings=recollection.settings))
        restore_s, prefill_s = turn.times.restore_s + ran.ended.timings.restore_s, ran.ended.timings.prefill_s
        turn.emit(Warmed(len(state.token_ids), ran.ended.cached_tokens, turn.parent_version, restore_s, prefill_s))

    def _attach(
        self,
        ran: Ran,
        transcript: RememberedText,
        messages: tuple[manifest_pb2.Message, ...],
        made_by: manifest_pb2.Turn,
    ) -> AgentMemory:
        planned, prompted, state = ran.planned, ran.planned.prompted, ran.ended.state
        recalled, request, standing = planned.recalled, planned.request, self._standing(ran)
        assert request.key is not None
        stored = ran.stream.stored if ran.stream is not None else list(ran.prepared.stored_blocks)
        windows = dict(ran.prepared.stored_windows)
        memory = AgentMemory(
            transcript=transcript,
            messages=messages,
            turn=made_by,
            shareable_tokens=state.shareable_tokens,
            tokenizer_digest=self._parts.engine.model.tokenizer_digest,
            publication=Publication(standing, partial(may_follow, request) if standing.is_undecided else None),
            # A stop string may have removed tokens of a block that was sent already.
            files=StoredFiles(
                stored[: len(state.computed.token_ids) // BLOCK_TOKENS],
                windows=windows,
                runs=self._runs(ran),
                pending=state.pending,
            ),
            rewind_points=state.rewind_points,
            is_brought=planned.has_brought_kv,
            shortened=recalled.shortened,
            template_time_ms=prompted.clock.told_ms if prompted.dialogue is not None else 0,
            tools_order=prompted.tools_order if prompted.dialogue is not None else None,
            settings=planned.recollection.settings,
        )
        self._parts.tag(request.key, memory)
        return memory

    def _runs(self, ran: Ran) -> Runs | None:
        """How the rows that the turn left were computed. Windows of masks are computed in another way."""
        return ran.prepared.runs_after(ran.ended) if self._parts.engine.model.mask_window is None else None

    def _standing(self, ran: Ran) -> Standing:
        planned, key, previous = ran.planned, ran.planned.request.key, ran.extended
        assert key is not None
        known, asked = previous.publication.standing if previous is not None else None, planned.request.memory
        return Standing(
            head=known.head if known is not None else planned.recollection.head,
            # An unstored memory counts under the lease under which it was made, and so does one that extends it.
            generation=self._generation(key) if known is None or known.is_stored else known.generation,
            event_cursor=planned.recalled.event_cursor,
            is_undecided=planned.recalled.continuation is Continuation.UNDECIDED,
            expected_version=asked.expected_version,
            base_version=asked.base_version or 0,
            handed_over_by=planned.handed_over_by,
        )

    def _generation(self, key: AgentKey) -> int:
        line = self._parts.recall.line(key)
        return line.lease.generation if line is not None else 0

    async def _keep(self, key: AgentKey, memory: AgentMemory, ran: Ran | None = None) -> SnapshotOutcome:
        """Publish a memory; the outcome, as far as the reader waits. `ran`: the turn that made it now, or None."""
        if (line := self._parts.recall.line(key)) is None:
            reason = "this engine has no store for the namespace; a new one wants `kvasir reload`"
            return SnapshotOutcome(SnapshotState.NONE, reason=reason)
        previous, stream, pinning = (ran.extended, ran.stream, ran.pinning.take()) if ran is not None else (None,) * 3
        return await line.publications.keep(memory, pinning, previous, stream)

    async def replay(self, memory: AgentMemory, turn: Progress) -> None:
        """Send the reply and the outcome of a turn that was done before. Nothing is computed or stored twice."""
        request, remembered = turn.request, memory.turn
        token_ids = tuple(memory.transcript.token_ids[remembered.prompt_tokens :])
        standing = memory.publication.standing
        parent = standing.head.parent_version if standing.is_stored and standing.head is not None else standing.version
        prompt_tokens = remembered.prompt_tokens
        ids = memory.transcript.token_ids[: prompt_tokens if request.prompt.returns_ids else 0]
        turn.emit(TurnStarted(prompt_tokens, prompt_tokens, Source.REPLAY, Outcome.EXACT, parent, prompt_ids=ids))
        part, calls = reply_again(request, self._parts.prompting, memory)
        turn.emit(TurnDelta(part.answer, token_ids, part.reasoning))
        snapshot = SnapshotOutcome(SnapshotState.NONE)
        if request.key is not None:  # a memory that was never stored is published now
            snapshot = await self._keep(request.key, memory)
        elapsed_s = self._parts.clock() - turn.times.arrived
        turn.emit(
            TurnFinished(
                finish_reason=remembered.finish_reason,
                matched_stop=remembered.matched_stop,
                prompt_tokens=prompt_tokens,
                cached_tokens=prompt_tokens,
                completion_tokens=len(token_ids),
                timings=Timings(queue_s=turn.times.queue_s, first_token_s=elapsed_s),
                snapshot=snapshot,
                tool_calls=calls,
            )
        )
        _LOG.info("turn.replayed", request_id=request.request_id, version=snapshot.version)


def retried(request: TurnRequest, recollection: Recollection) -> Retry | None:
    """None: it is another turn. Raises Conflict as `check_parent`."""
    memory = recollection.memory
    if memory is None or request.memory.is_read_only or not is_retry(request, memory):
        check_parent(request, recollection)
        return None
    was_cut = memory.turn.finish_reason == FinishReason.CANCELLED.value
    return Retry.REPEATED if was_cut or recollection.kv_from is Source.COLD else Retry.REPLAYED


def is_retry(request: TurnRequest, memory: AgentMemory) -> bool:
    """Whether the request repeats the turn that made this memory: a retry has the request id and the input of the
    agent's last turn, and the same parent version. The same id with another input is another turn: ids name requests
    for people, the input is the question.
    """
    turn, head = memory.turn, memory.publication.standing.head
    if turn.request_id != request.request_id or turn.input_digest != request.input_digest:
        return False
    if request.memory.expected_version is None or head is None:
        return True
    # A request with the same input that extends this memory is a new turn, not a retry.
    extended = head.parent_version if memory.publication.standing.is_stored else head.version
    if memory.shortened is None and memory.files.asleep is None:
        return request.memory.expected_version == extended
    # Its caller knows no version that only became shorter, or fell asleep.
    return request.memory.expected_version <= extended - _versions_before(memory)


def check_parent(request: TurnRequest, recollection: Recollection) -> None:
    """Raise Conflict when the newest version is not the one named. Without an answer, the commit decides."""
    head, memory = recollection.head, recollection.memory
    if request.memory.expected_version is None or head is None or request.memory.expected_version == head.version:
        return
    before = _versions_before(memory) if memory is not None and head.is_of_turn else 0
    if head.parent_version - before < request.memory.expected_version <= head.parent_version:
        return  # the version that its caller knows became shorter since, or fell asleep
    raise errors.Conflict.of(
        "expected_version",
        f"{request.memory.expected_version} was named, the agent's newest version is {head.version}",
        head_version=head.version,
    )


def _versions_before(memory: AgentMemory) -> int:
    """Versions before the memory that are of its turn, too: it became shorter since, or fell asleep, or both."""
    is_shorter = memory.shortened is not None and memory.shortened.is_after_turn
    return is_shorter + (memory.files.asleep is not None)


def stopped(turn: Progress) -> TurnFinished:
    """The last message of a turn that was cancelled and leaves no memory."""
    times, tokens = turn.times, turn.tokens
    return TurnFinished(
        finish_reason=FinishReason.CANCELLED.value,
        matched_stop="",
        prompt_tokens=tokens.prompt,
        cached_tokens=tokens.cached,
        completion_tokens=tokens.completion,
        timings=Timings(queue_s=times.queue_s, restore_s=times.restore_s, first_token_s=times.first_token_s or 0.0),
        snapshot=SnapshotOutcome(SnapshotState.NONE, turn.parent_version, "the turn was cancelled"),
    )


def unkept(turn: Progress, planned: Planned) -> SnapshotOutcome:
    """The outcome where nothing of the turn is remembered: the agent stays at the version before."""
    reason = ""
    if planned.request.memory.is_read_only:
        reason = "the memory was only read"
    elif planned.recalled.continuation is Continuation.BRANCHED:
        miss = planned.recollection.miss if planned.recollection.is_unread else None
        why = "another conversation" if miss is None else f"the memory cannot be read ({miss.detail})"
        reason = f"{why}: a branch, which is not remembered"
    return SnapshotOutcome(SnapshotState.NONE, turn.parent_version, reason)


def _finish_reason(ran: Ran) -> str:
    """The word of manifest.proto's Turn: a reply that stops after tool calls ends for them."""
    reason = ran.ended.finish_reason
    return "tool_calls" if ran.calls and reason is FinishReason.STOP else reason.value
