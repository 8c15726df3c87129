"""The end of a turn: the agent's new memory, its publication, and the last message.

A retry begins and ends here: its reply is replayed from memory.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import structlog
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.server.traces import told

from inference_svc.engine.api import AgentKey, Ended, FinishReason, Timings
from inference_svc.memory.agent_memory import AgentMemory, Ahead, PublicationState, nothing_yet
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState, Source
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_planning import Prepared
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model.model_host import MemoriesLeft
from inference_svc.model.prompting import RememberedReply
from inference_svc.text.literal_text import without_guards
from inference_svc.text.prefix_matching import Outcome, RememberedText
from inference_svc.text.replies.remembered_reply import Said, reply_message
from inference_svc.text.template_names import REASONING
from inference_svc.turns.continuing import Continuation
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.turn_data import TurnDelta, TurnFinished, TurnStarted, Warmed
from inference_svc.turns.turn_state import TurnState, may_follow, reply_reader

_LOG = structlog.get_logger(__name__)
_LOOK_S = 0.5  # how often it is looked whether bulk data still moves
_TELL_EVERY_S = 5.0  # `kvasir up` and `kvasir down` wait for a service whose log grows


class TurnEnding:
    """Ends turns of one engine."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    async def store_hot(self, patience_s: float) -> MemoriesLeft:
        """Store the hot memories that are not in the store, until nothing has moved for `patience_s`. No turn runs.
        The log says that it goes on."""
        hot = {key: self._parts.engine.hot_tag(key) for key in self._parts.engine.hot_keys()}
        memories = {key: tag for key, tag in hot.items() if isinstance(tag, AgentMemory)}
        storing = [
            asyncio.create_task(self._store_owed(key, memory, store))
            for key, memory in memories.items()
            if not memory.publication.is_safe and (store := self._parts.stores.get(key.namespace)) is not None
        ]
        began = told_at = self._parts.clock()
        give_up = began + patience_s
        while (rest := [task for task in storing if not task.done()]) and self._parts.clock() < give_up:
            await asyncio.wait(rest, timeout=min(_LOOK_S, patience_s))
            if any(store.has_moved_within(_LOOK_S) for store in self._parts.stores.values()):
                give_up = self._parts.clock() + patience_s
                if self._parts.clock() - told_at >= _TELL_EVERY_S:
                    told_at = self._parts.clock()
                    _LOG.warning("engine.storing", memories_left=len(rest), since_s=round(told_at - began))
        for task in storing:
            task.cancel()
        stored = sum(memory.publication.is_safe for memory in memories.values())
        return MemoriesLeft(stored, len(memories) - stored)

    async def _store_owed(self, key: AgentKey, memory: AgentMemory, store: RemoteCache) -> None:
        """Store a memory, after the try that may run: two at once would be two versions."""
        answers = store.is_reachable or await store.answers()
        if memory.publication.task is not None:
            await asyncio.wait({memory.publication.task})
        if answers:
            await self._parts.publisher.publish_owed(key, memory, store)

    def close(self) -> None:
        """Nothing is tried again from now on."""
        self._parts.publisher.close()

    async def drain(self, patience_s: float) -> None:
        """Wait for the running publications."""
        await self._parts.publisher.drain(patience_s)

    async def remember(
        self, turn: TurnState, recollection: Recollection, prepared: Prepared, ended: Ended
    ) -> AgentMemory | None:
        """Make the agent's new memory and attach it to its hot KV. None where the turn leaves none."""
        if turn.key is None or not turn.is_kept:
            return None
        request, calls = turn.request, turn.reader.calls
        is_trusted = turn.is_text_own and recollection.is_text_own
        said, messages = await self._parts.prompting.run(
            request.namespace,
            lambda: self._said(turn, prepared.text, ended, calls, is_trusted=is_trusted),
        )
        made_by = manifest_pb2.Turn(
            request_id=request.request_id,
            prompt_tokens=ended.prompt_tokens,
            prompt_chars=len(prepared.text),
            finish_reason=_finish_reason(ended, calls),
            input_digest=request.input_digest,
            reply=ended.text,
            matched_stop=ended.matched_stop,
        )
        return self._attach(turn, turn.key, recollection, prepared, ended, said.transcript, messages, made_by)

    async def shortened(
        self, turn: TurnState, whole: AgentMemory, recollection: Recollection, prepared: Prepared, ended: Ended
    ) -> None:
        """Make and store the memory that `whole` became with fewer messages: `turn` has computed it, with the reply
        that `whole` ends with behind its prompt.
        """
        assert turn.key is not None
        assert turn.spoken is not None
        said = whole.turn
        text = prepared.text + whole.transcript.text[said.prompt_chars :]
        transcript = RememberedText(text, ended.state.token_ids, ended.state.token_chars)
        made_by = manifest_pb2.Turn()
        made_by.CopyFrom(said)
        made_by.prompt_tokens = len(ended.state.token_ids) - len(turn.spoken.ids)
        made_by.prompt_chars = len(prepared.text)
        memory = self._attach(turn, turn.key, recollection, prepared, ended, transcript, turn.messages, made_by)
        outcome = await self._keep(turn, turn.key, recollection, memory)
        _LOG.info(
            "memory.shortened",
            request_id=turn.request.request_id,
            tokens_before=len(whole.transcript.token_ids),
            tokens=len(transcript.token_ids),
            dropped_messages=memory.shortened.dropped_messages if memory.shortened is not None else 0,
            snapshot=outcome.state.value,
        )

    async def finish(
        self,
        turn: TurnState,
        recollection: Recollection,
        prepared: Prepared,
        ended: Ended,
        memory: AgentMemory | None,
    ) -> None:
        """Publish the new memory, and tell the reader how the turn ended."""
        calls, ended_s = turn.reader.calls, self._parts.clock()
        snapshot = self._unkept(turn)
        if turn.key is not None and memory is not None:
            snapshot = await self._keep(turn, turn.key, recollection, memory)
        reason = _finish_reason(ended, calls)
        timings = ended.timings
        turn.running.tell(
            TurnFinished(
                finish_reason=reason,
                matched_stop=ended.matched_stop,
                prompt_tokens=ended.prompt_tokens,
                cached_tokens=ended.cached_tokens,
                completion_tokens=ended.completion_tokens,
                timings=Timings(
                    queue_s=turn.queue_s + timings.queue_s,
                    restore_s=turn.restore_s + timings.restore_s,
                    prefill_s=timings.prefill_s,
                    first_token_s=(turn.first_token_at or self._parts.clock()) - turn.arrived,
                    decode_s=timings.decode_s,
                ),
                snapshot=snapshot,
                tool_calls=tuple(calls),
                memory_tokens=len(memory.transcript.token_ids) if memory is not None else 0,
                context_tokens=self._parts.engine.model.context_tokens,
                shortening=turn.shortening,
            )
        )
        if turn.last_token_at is not None:
            self._parts.publisher.told(turn.request.namespace, self._parts.clock() - turn.last_token_at)
        self._trace(turn, prepared, ended, self._parts.clock() - ended_s)
        _LOG.info(
            "turn.finished",
            request_id=turn.request.request_id,
            reason=reason,
            source=prepared.source.value,
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            completion_tokens=ended.completion_tokens,
            snapshot=snapshot.state.value,
        )

    def _trace(self, turn: TurnState, prepared: Prepared, ended: Ended, ended_ago_s: float) -> None:
        """Tell the parts of a turn, which ended so long ago; since then its memory was stored."""
        timings, queue_s = ended.timings, turn.queue_s + ended.timings.queue_s
        told("queue", self._parts.clock() - turn.arrived - queue_s, queue_s, {})
        told("commit", 0.0, ended_ago_s, {})
        told("decode", ended_ago_s, timings.decode_s, {"completion_tokens": ended.completion_tokens})
        ended_ago_s += timings.decode_s
        computed = {"prompt_tokens": ended.prompt_tokens, "cached_tokens": ended.cached_tokens}
        told("prefill", ended_ago_s, timings.prefill_s, computed)
        ended_ago_s += timings.prefill_s
        told("restore", ended_ago_s, turn.restore_s + timings.restore_s, {"source": prepared.source.value})

    def stopped(self, turn: TurnState) -> TurnFinished:
        """The last message of a turn that was cancelled and leaves no memory."""
        first_token_s = 0.0 if turn.first_token_at is None else turn.first_token_at - turn.arrived
        return TurnFinished(
            finish_reason=FinishReason.CANCELLED.value,
            matched_stop="",
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.cached_tokens,
            completion_tokens=turn.completion_tokens,
            timings=Timings(queue_s=turn.queue_s, restore_s=turn.restore_s, first_token_s=first_token_s),
            snapshot=self._unkept(turn, "the turn was cancelled"),
        )

    @staticmethod
    def _unkept(turn: TurnState, reason: str = "") -> SnapshotOutcome:
        """The outcome where nothing of the turn is remembered: the agent stays at the version before."""
        if turn.request.is_read_only:
            reason = reason or "the memory was only read"
        elif turn.continuation is Continuation.BRANCHED:
            found = turn.recollection
            miss = found.miss if found is not None and found.is_unread else None
            why = "another conversation" if miss is None else f"the memory cannot be read ({miss.detail})"
            reason = reason or f"{why}: a branch, which is not remembered"
        return SnapshotOutcome(SnapshotState.NONE, turn.parent_version, reason)

    def warmed(self, turn: TurnState, recollection: Recollection, prepared: Prepared, ended: Ended) -> None:
        """Attach the agent's memory to the KV that was computed ahead of its turn."""
        state, memory = ended.state, recollection.memory
        if memory is None or memory.transcript.token_ids != state.token_ids:
            transcript = RememberedText(prepared.text, state.token_ids, state.token_chars)
            base = memory or nothing_yet(recollection.head, self._parts.engine.model.tokenizer_digest)
            memory = replace(
                base, ahead=Ahead(transcript, prepared.stored_blocks, state.shareable_tokens, state.rewind_points)
            )
        elif recollection.kv_from is not Source.HOT or memory.ahead is not None:
            # The KV is the memory's own again. What was not reused is computed anew, and is not what the store has.
            stored, windows = list(prepared.stored_blocks), dict(prepared.stored_windows)
            memory = replace(
                memory,
                ahead=None,
                shareable_tokens=state.shareable_tokens,
                rewind_points=state.rewind_points,
                publication=replace(memory.publication, blocks=stored, windows=windows),
            )
        if turn.key is not None:
            if memory.publication.is_elsewhere:
                # It follows no version of its own line. Only events since it was made can prove it outdated.
                publication = replace(
                    memory.publication, event_cursor=turn.event_cursor, generation=self._generation(turn.key)
                )
                memory = replace(memory, publication=publication)
            self._tag(turn.key, replace(memory, settings=recollection.settings))
        restore_s = turn.restore_s + ended.timings.restore_s
        tokens, version = len(state.token_ids), turn.parent_version
        turn.running.tell(Warmed(tokens, ended.cached_tokens, version, restore_s, ended.timings.prefill_s))

    def _attach(
        self,
        turn: TurnState,
        key: AgentKey,
        recollection: Recollection,
        prepared: Prepared,
        ended: Ended,
        transcript: RememberedText,
        messages: tuple[manifest_pb2.Message, ...],
        made_by: manifest_pb2.Turn,
    ) -> AgentMemory:
        """The agent's new memory, attached to its hot KV."""
        request, state = turn.request, ended.state
        stored = turn.stream.stored if turn.stream is not None else list(prepared.stored_blocks)
        previous = (
            recollection.memory.publication if recollection.kv_from is Source.HOT and recollection.memory else None
        )
        memory = AgentMemory(
            transcript=transcript,
            messages=messages,
            turn=made_by,
            shareable_tokens=state.shareable_tokens,
            tokenizer_digest=self._parts.engine.model.tokenizer_digest,
            publication=PublicationState(
                head=previous.head if previous is not None else recollection.head,
                is_head=False,
                expected_version=request.expected_version,
                base_version=request.base_version or 0,
                # An unstored memory counts under the lease under which it was made, and so does one that extends it.
                generation=self._generation(key) if previous is None or previous.is_head else previous.generation,
                event_cursor=turn.event_cursor,
                may_follow=partial(may_follow, request) if turn.continuation is Continuation.UNDECIDED else None,
                # A stop string may have removed tokens of a block that was sent already.
                blocks=stored[: len(state.token_ids) // BLOCK_TOKENS],
                windows=dict(prepared.stored_windows),
            ),
            rewind_points=state.rewind_points,
            is_brought=turn.is_brought or is_brought(recollection, prepared),
            shortened=turn.shortened,
            template_time_ms=turn.clock.told_ms if turn.dialogue is not None else 0,
            tools_order=turn.tools_order if turn.dialogue is not None else None,
            settings=recollection.settings,
        )
        self._tag(key, memory)
        return memory

    def _tag(self, key: AgentKey, memory: AgentMemory) -> None:
        """Attach the memory to its hot KV."""
        store, publication = self._parts.stores.get(key.namespace), memory.publication
        if store is not None and publication.owing is None:
            self._parts.publisher.owe(key, publication, store)
        self._parts.engine.tag_hot(key, memory, publication.owing)

    def _said(
        self, turn: TurnState, prompt: str, ended: Ended, calls: Sequence[manifest_pb2.ToolCall], *, is_trusted: bool
    ) -> tuple[RememberedReply, tuple[manifest_pb2.Message, ...]]:
        """Text and messages to remember. On the tokenizer's thread."""
        prompting = self._parts.prompting
        said = prompting.remembered_reply(prompt, ended.prompt_tokens, ended.generated_text, ended.text, ended.state)
        if turn.dialogue is None:
            return said, ()
        told = Said(said.reply, calls)
        if turn.reader.has_reasoned:
            stop_text = ended.generated_text.removeprefix(ended.text)
            part = reply_reader(turn.request, prompting, prompt).whole(said.reply, stop_text)
            told = Said(said.reply, calls, True, part.answer, part.reasoning)
        if turn.dialogue.begun is not None:
            begun = turn.dialogue.begun
            text = begun["content"]
            is_trimmed = not without_guards(prompt).endswith(without_guards(text))
            told = told.behind(text.rstrip() if is_trimmed else text, begun.get(REASONING, ""))
        reply = reply_message(
            prompting.template_at(turn.clock, turn.request.template_settings),
            turn.dialogue,
            said=told,
            rendered_text=said.transcript.text,
            tool_start=prompting.tool_start,
            is_trusted=is_trusted,
        )
        return said, (*turn.messages, reply)

    def _generation(self, key: AgentKey) -> int:
        leases = self._parts.leases.get(key.namespace)
        return leases.generation(key.agent_id) if leases is not None else 0

    async def _keep(
        self, turn: TurnState, key: AgentKey, recollection: Recollection, memory: AgentMemory
    ) -> SnapshotOutcome:
        """Publish a memory; the outcome, as far as the reader is made to wait for it."""
        store = self._parts.stores.get(key.namespace)
        if store is None:
            reason = "this engine has no store for the namespace; a new one wants `kvasir reload`"
            return SnapshotOutcome(SnapshotState.NONE, reason=reason)
        previous = (
            recollection.memory.publication if recollection.kv_from is Source.HOT and recollection.memory else None
        )
        publication = memory.publication
        # The engine takes it before it begins another turn of the agent, for which it is asked later.
        asked = turn.pinning or self._parts.copies.pin(key, len(publication.blocks), publication.windows)
        turn.pinning = None
        self._parts.publisher.publish(key, memory, asked, store, previous, turn.stream)
        return await self._parts.publisher.outcome(key.namespace, memory, store)

    async def replay(self, turn: TurnState, recollection: Recollection, memory: AgentMemory) -> None:
        """Send the reply and the outcome of a turn that was done before. Nothing is computed or stored twice."""
        request, remembered = turn.request, memory.turn
        token_ids = tuple(memory.transcript.token_ids[remembered.prompt_tokens :])
        head = memory.publication.head
        is_head = memory.publication.is_head and head is not None
        parent = (head.parent_version if is_head else head.version) if head is not None else 0
        prompt_tokens = remembered.prompt_tokens
        ids = memory.transcript.token_ids[: prompt_tokens if request.returns_prompt_ids else 0]
        began = TurnStarted(prompt_tokens, prompt_tokens, Source.REPLAY, Outcome.EXACT, parent, prompt_ids=ids)
        turn.running.tell(began)
        transcript = memory.transcript.text
        reader = reply_reader(request, self._parts.prompting, transcript[: remembered.prompt_chars])
        behind = without_guards(transcript[remembered.prompt_chars :]).removeprefix(remembered.reply)
        part = reader.whole(remembered.reply, behind)
        turn.running.tell(TurnDelta(part.answer, token_ids, part.reasoning))
        snapshot = await self._outcome_again(turn, recollection, memory)
        elapsed_s = self._parts.clock() - turn.arrived
        turn.running.tell(
            TurnFinished(
                finish_reason=remembered.finish_reason,
                matched_stop=remembered.matched_stop,
                prompt_tokens=prompt_tokens,
                cached_tokens=prompt_tokens,
                completion_tokens=len(token_ids),
                timings=Timings(queue_s=turn.queue_s, first_token_s=elapsed_s),
                snapshot=snapshot,
                tool_calls=tuple(reader.calls),
            )
        )
        _LOG.info("turn.replayed", request_id=request.request_id, version=snapshot.version)

    async def _outcome_again(self, turn: TurnState, recollection: Recollection, memory: AgentMemory) -> SnapshotOutcome:
        """The outcome of a turn that is replayed. A memory that was never stored is published now."""
        key, publication = turn.key, memory.publication
        store = self._parts.stores.get(key.namespace) if key is not None else None
        if publication.is_head and publication.head is not None:
            return SnapshotOutcome(SnapshotState.COMMITTED, publication.head.version, "", publication.head.manifest)
        if store is None or key is None:
            return SnapshotOutcome(SnapshotState.NONE)
        if publication.is_being_published:
            return await self._parts.publisher.outcome(key.namespace, memory, store)
        return await self._keep(turn, key, replace(recollection, memory=None), memory)


def _finish_reason(ended: Ended, calls: Sequence[manifest_pb2.ToolCall]) -> str:
    """The word of manifest.proto's Turn: a reply that stops after tool calls ends for them."""
    return "tool_calls" if calls and ended.finish_reason is FinishReason.STOP else ended.finish_reason.value


def is_brought(recollection: Recollection, prepared: Prepared) -> bool:
    """Whether a turn's KV came by an archive or another store, or was computed on such KV. The store marks its copies;
    this mark outlives them.
    """
    own_line = recollection.own_line.memory if recollection.own_line is not None else None
    memories = (recollection.memory, recollection.continued, own_line)
    return prepared.source in (Source.HOT, Source.WARM) and any(memory and memory.is_brought for memory in memories)
