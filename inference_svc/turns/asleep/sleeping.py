"""Lets an agent's KV go, and computes it again as it was computed first. Nothing is let go whose bytes did not come
back from the tokens alone. A memory that wakes is hot; the store gets its KV with the agent's next version.
"""

import asyncio
from dataclasses import replace

import structlog
from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.waits import PATIENCE_S

from inference_svc.engine.api import (
    AgentKey,
    Cold,
    Ended,
    Hot,
    HotMemoryGone,
    Replay,
    SamplingParams,
    TurnPlan,
)
from inference_svc.memory.agent_memory import AgentMemory, Publication, StoredFiles, from_manifest, parsed
from inference_svc.memory.lines.line import Line
from inference_svc.memory.lines.line_states import Standing
from inference_svc.memory.outcomes import Source
from inference_svc.memory.publishing.copies import await_copy, files_of
from inference_svc.memory.recall import Recollection, unreadable
from inference_svc.memory.replaying import ReplayStep, replay_steps
from inference_svc.memory.store.answers import EventCursor, Head, StoreMiss
from inference_svc.memory.store.blobs import digests_of
from inference_svc.memory.store.patience import Budget
from inference_svc.text.token_ids import SequenceState
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.progress import Progress, TurnPhase
from inference_svc.turns.turn_data import Slept, Work
from inference_svc.turns.turn_reporter import HandOff, run_to_end

_LOG = structlog.get_logger(__name__)
_MOST_TRIES = 3  # between two steps the memory may leave the engine, because others want its room


class Sleeper:
    """Made on the event loop that will run it; called in order with the agent's turns."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._handoff = HandOff(asyncio.get_running_loop())

    async def awake(self, turn: Progress, found: Recollection, budget: Budget) -> Recollection:
        """The agent's newest memory with its KV: one that is asleep becomes hot. Raises as the turn itself would."""
        key, memory = turn.request.key, found.memory
        if key is None:
            return found
        sleeping = memory if memory is not None and memory.files.asleep and found.kv_from is Source.WARM else None
        is_shared = sleeping is not None and await self._is_shared(key, sleeping)
        if turn.request.work is Work.REPLY:
            self._count(turn, key, found, is_asleep=sleeping is not None and not is_shared)
        if sleeping is None:
            return found
        if not is_shared:
            if not self._has_room(sleeping):
                return found  # it came from a larger engine: its text is computed in cells
            await self._wake(turn, key, sleeping)
        if turn.request.work in (Work.WARM, Work.WAKE):
            self._parts.woken.ready[key] = self._parts.clock()
        return await self._parts.recall.newest(key, budget)

    def served(self, turn: Progress) -> None:
        if (key := turn.request.extended) is not None:
            self._parts.woken.returns.served(key, turn.request.request_id)

    async def _is_shared(self, key: AgentKey, memory: AgentMemory) -> bool:
        """Take over the KV of an agent that has the same version, and is hot: a fork, or whom it was forked from."""
        memories = self._parts.engine.memories
        tags = {other: memories.tag_of(other) for other in memories.sizes() if other.namespace == key.namespace}
        for other, twin in tags.items():
            if not isinstance(twin, AgentMemory) or not _is_same_version(twin, memory):
                continue
            if await asyncio.wrap_future(memories.fork(other, key, twin)):
                self._parts.tag(key, replace(memory, rewind_points=twin.rewind_points))
                return True
        return False

    async def _wake(self, turn: Progress, key: AgentKey, memory: AgentMemory) -> None:
        """Compute its KV. Raises as the turn itself would."""
        assert memory.files.asleep is not None
        began_s = self._parts.clock()
        state = await self._computed(turn, key, memory, borrows=True)
        try:
            is_same = set(await self._files(key)) == set(map(Digest.from_proto, memory.files.asleep.files))
        except BaseException:
            self._parts.engine.memories.drop(key)  # without a tag no turn finds it, and an idle engine keeps its room
            raise
        self._parts.tag(key, replace(memory, rewind_points=state.rewind_points))
        took_ms = round(1e3 * (self._parts.clock() - began_s))
        log = _LOG.info if is_same else _LOG.warning  # its rows have other roundings, as on another machine
        turn.source = Source.WOKEN
        log("memory.woken", request_id=turn.request.request_id, tokens=len(state.token_ids), ms=took_ms, same=is_same)

    def _count(self, turn: Progress, key: AgentKey, found: Recollection, *, is_asleep: bool) -> None:
        is_hot, arrived_s = found.kv_from is Source.HOT, turn.times.arrived
        wake = self._parts.woken.came(key, arrived_s, is_hot=is_hot, is_asleep=is_asleep)
        if wake is not None:
            turn.counters.wakes[wake] += 1

    async def sleep(self, turn: Progress, found: Recollection, cursor: EventCursor | None, budget: Budget) -> None:
        """Raises NotFound, FailedPrecondition (CANNOT_SLEEP, NO_STORE) and Unavailable; all is as it was then."""
        key = turn.request.key
        assert key is not None
        line, memory = self._line(key), found.memory
        if memory is None:
            why = f"agent {key.agent_id!r} remembers nothing"
            raise errors.NotFound(why, reason="AGENT_NOT_FOUND", metadata={"agent_id": key.agent_id})
        if found.kv_from is Source.COLD:
            raise cannot_sleep(key, found.miss.detail if found.miss is not None else "its KV is nowhere")
        await line.publications.until_stored(PATIENCE_S)
        head = memory.publication.standing.head
        assert head is not None
        stored = await self._stored(line, head, budget)
        if stored.files.asleep is None:
            stored, head = await self._let_go(turn, line, stored, cursor)
        self._parts.engine.memories.drop(key)
        asleep = stored.files.asleep
        assert asleep is not None
        freed_bytes = sum(digest.size_bytes for digest in asleep.files)
        assert head.manifest is not None
        kept_bytes = head.manifest.size_bytes
        tokens = len(stored.transcript.token_ids)
        turn.emit(Slept(head.version, tokens, kept_bytes, freed_bytes, asleep.wake_ms / 1e3))

    async def _let_go(
        self, turn: Progress, line: Line, stored: AgentMemory, cursor: EventCursor | None
    ) -> tuple[AgentMemory, Head]:
        """Prove that the KV comes back, and commit the memory without it."""
        began_s = self._parts.clock()
        files = await self._proven(turn, line.key, stored)
        wake_ms = max(1, round(1e3 * (self._parts.clock() - began_s)))
        asleep = manifest_pb2.Asleep(files=[digest.to_proto() for digest in files], wake_ms=wake_ms)
        standing = Standing(stored.publication.standing.head, event_cursor=cursor)
        memory = replace(
            stored,
            publication=Publication(standing),
            files=StoredFiles(runs=stored.files.runs, asleep=asleep, pending=stored.files.pending),
            rewind_points=(),
        )
        # No cancel ends it now: the store may commit what was sent, and the agent's next turn must know of that.
        turn.begin(TurnPhase.ENDING)
        try:
            head = await line.publications.fall_asleep(memory)
        except BaseException:
            if memory.publication.standing.sent is not None:  # it may be the newest version all the same
                self._parts.engine.memories.drop(line.key)
            raise
        _LOG.info("memory.asleep", request_id=turn.request.request_id, version=head.version, wake_ms=wake_ms)
        return memory, head

    async def _proven(self, turn: Progress, key: AgentKey, stored: AgentMemory) -> list[Digest]:
        """The digests of the memory's files, computed from its tokens beside it. Raises FailedPrecondition."""
        if self._parts.engine.model.mask_window is not None:
            raise cannot_sleep(key, "its model (WeDLM) computes rows beside masks, which are not kept")
        if stored.files.runs is None:
            raise cannot_sleep(key, "it is not known how its rows were computed")
        if not self._has_room(stored):
            raise cannot_sleep(key, "it fills the context or the KV memory, and to compute it again takes a token more")
        proof = AgentKey(key.namespace, f"{key.agent_id}\n")  # no agent has a name with a line break
        try:
            await self._computed(turn, proof, stored, borrows=False)
            again = await self._files(proof)
        finally:
            self._parts.engine.memories.drop(proof)
        if other := len(set(again) - _named(stored.files)):
            raise cannot_sleep(key, f"{other} of {len(again)} files have other bytes when they are computed again")
        return again

    def _has_room(self, memory: AgentMemory) -> bool:
        """For the memory and one token more, which is drawn behind a reply and not computed."""
        count, engine = len(memory.transcript.token_ids) + 1, self._parts.engine
        return count <= engine.model.context_tokens and engine.needed_bytes(count) <= engine.memory_budget_bytes

    async def _computed(self, turn: Progress, key: AgentKey, memory: AgentMemory, *, borrows: bool) -> SequenceState:
        """Make the memory's KV the key's hot memory, computed from its tokens. `borrows`: also rows of others."""
        assert memory.files.runs is not None  # a sleeping manifest has them
        for tries_left in reversed(range(_MOST_TRIES)):
            try:
                for step in replay_steps(memory.computed_ids, memory.files.runs):
                    state = (await self._run(turn, self._plan(turn, key, memory, step, borrows=borrows))).state
            except HotMemoryGone:
                if not tries_left:
                    raise errors.Unavailable("other turns want the memory's room", retry_after_s=1.0) from None
            except BaseException:
                self._parts.engine.memories.drop(key)
                raise
            else:
                return state
        raise AssertionError("each try returns or raises")

    def _plan(self, turn: Progress, key: AgentKey, memory: AgentMemory, step: ReplayStep, *, borrows: bool) -> TurnPlan:
        transcript = memory.transcript
        return TurnPlan(
            token_ids=transcript.token_ids[: step.prompt],
            token_chars=transcript.token_chars[: step.prompt],
            sampling=SamplingParams(max_tokens=len(step.reply)),
            reuse=Hot(step.keep) if step.keep else Cold(),
            key=key,
            pace=turn.request.pace,
            namespace=turn.request.namespace,
            replay=Replay(step.reply, borrows),
        )

    async def _run(self, turn: Progress, plan: TurnPlan) -> Ended:
        if turn.is_cancelled:
            raise errors.Cancelled("the turn was cancelled")
        return await run_to_end(self._parts.engine, plan, self._handoff)

    async def _files(self, key: AgentKey) -> list[Digest]:
        """Digests of the key's hot memory, of one piece after the other."""
        copies, found, blocks = self._parts.copies, list[Digest](), 0
        await copies.held.wait_for(key.namespace, copies.piece_bytes)
        try:
            if (pinned := await await_copy(copies.pin(key, 0, {}))) is None:
                raise errors.Unavailable("other turns want the memory's room", retry_after_s=1.0)
            try:
                piece = pinned.take_first()
                while piece is not None:
                    found += await digests_of(files_of(piece))
                    blocks += len(piece.blocks)
                    piece = None if copies.is_whole(piece) else await copies.piece(pinned, blocks, {})
            finally:
                pinned.release()
        finally:
            copies.held.give_back(key.namespace, copies.piece_bytes)
        return found

    async def _stored(self, line: Line, head: Head, budget: Budget) -> AgentMemory:
        """The newest version as the store has it: a hot memory may name fewer files."""
        try:
            manifest = await parsed(await line.store.blobs.manifest(line.key.agent_id, head, budget))
        except StoreMiss as error:
            raise unreadable(line.key.agent_id, error.miss.detail) from None
        return from_manifest(manifest, head, self._parts.engine.model.tokenizer_digest)

    def _line(self, key: AgentKey) -> Line:
        if (line := self._parts.recall.line(key)) is None:
            raise errors.FailedPrecondition("this engine has no store for the caller's namespace", reason="NO_STORE")
        return line


def cannot_sleep(key: AgentKey, why: str) -> errors.FailedPrecondition:
    return errors.FailedPrecondition.of(
        "agent_id", f"{key.agent_id!r} stays awake: {why}", reason="CANNOT_SLEEP", agent_id=key.agent_id
    )


def _is_same_version(hot: AgentMemory, stored: AgentMemory) -> bool:
    """Whether the hot memory is what the manifest of the stored one describes, and no more."""
    here, there = hot.publication.standing, stored.publication.standing
    return hot.ahead is None and here.is_stored and here.parent.manifest == there.parent.manifest


def _named(files: StoredFiles) -> set[Digest]:
    named = {*files.blocks, *files.states.values(), *(() if files.tail is None else (files.tail,))}
    return named.union(*(window.files.values() for window in files.windows.values()))
