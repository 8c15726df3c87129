"""Finds an agent's newest memory, or the version that a turn goes on from, in RAM or in the store. Hot memory counts
only where the store's answer or a lease proves it current; a failure of the store is a miss with its reason.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument, KvasirError, NotFound, Unavailable
from kvasir.formats.block_file import MAX_HEADER_BYTES
from kvasir.formats.block_hash import BLOCK_TOKENS, differing_field
from kvasir.waits import RETRY_S

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import (
    AgentMemory,
    Publication,
    PublicationTask,
    StoredFiles,
    from_manifest,
    parsed,
)
from inference_svc.memory.lines.line import Line
from inference_svc.memory.lines.line_lease import MOVED
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.store.answers import NO_HEAD, NO_SETTINGS, AgentHeads, AgentSettings, Head, StoreMiss, Version
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache


@dataclass(frozen=True, slots=True)
class Recollection:
    """An agent's newest memory. `head` None: the store was not called; `kv_from` COLD: only its transcript serves."""

    memory: AgentMemory | None
    kv_from: Source
    head: Head | None
    miss: Miss | None = None
    base: "Recollection | None" = None  # the version that goes on, where that is an older one
    # What the line of this KV identity has, where the newest memory is of another: its KV serves what both begin with.
    own_line: "Recollection | None" = None
    settings: AgentSettings = NO_SETTINGS
    unproven: AgentMemory | None = None  # hot, and perhaps no longer the newest: the store did not answer

    @property
    def version(self) -> int:
        """The newest version's number; 0 if there is none, or it is not known."""
        return self.head.version if self.head is not None else 0

    @property
    def is_unread(self) -> bool:
        """Whether the agent remembers something, or may do so, that cannot be read now."""
        return self.memory is None and self.miss is not None and self.miss.reason is not MissReason.NEW_AGENT

    @property
    def continued(self) -> AgentMemory | None:
        return self.memory if self.base is None else self.base.memory

    @property
    def is_text_own(self) -> bool:
        """Whether neither the agent's newest version nor the one that goes on came as an archive or a copy."""
        heads = (self.head, self.base.head if self.base is not None else None)
        return all(head is None or head.is_text_own for head in heads)


NOTHING_REMEMBERED = Recollection(None, Source.COLD, NO_HEAD)
_NOTHING = Miss(MissReason.NEW_AGENT, "nothing is remembered")


class Recall:
    def __init__(self, engine: Engine, lines: Mapping[str, Lines]) -> None:
        """`lines`: by namespace; a namespace without a store has none, and hot memory only. More may come later."""
        self.lines = lines
        self._engine = engine

    def line(self, key: AgentKey | None) -> Line | None:
        lines = self.lines.get(key.namespace) if key is not None else None
        return lines.line(key.agent_id) if lines is not None and key is not None else None

    def is_wanted(self, key: AgentKey) -> bool:
        """Whether another engine waits for the lease that this engine has of the agent's line."""
        line = self.line(key)
        return line is not None and line.lease.is_wanted_now

    async def of_turn(self, key: AgentKey | None, budget: Budget, *, extends: bool, takes: bool = True) -> Recollection:
        """The newest memory of a turn's agent and, if the turn extends its line, the right to do so. Raises Unavailable
        (AGENT_HELD_ELSEWHERE) if another engine has that right, and FailedPrecondition (AGENT_MOVED, AGENT_MOVING) if
        another store has: a turn that is computed all the same would lose against that engine. `takes`: an engine
        that has the line and does not use it lets go.
        """
        if key is None:
            return NOTHING_REMEMBERED
        line = self.line(key) if extends else None
        if line is not None:
            line.lease.request(takes=takes)
        found = await self.newest(key, budget)
        if line is not None and not takes:
            await line.lease.answered(budget)
        if line is None or not line.lease.is_elsewhere or found.head is None:
            return found
        try:
            # Another engine releases a line within milliseconds of the request, unless a turn of it still runs.
            await line.lease.obtain(RETRY_S if takes else 0.0, takes=takes)
        except KvasirError as error:
            if error.reason in ("AGENT_HELD_ELSEWHERE", *MOVED):
                raise
        return await self.newest(key, budget)

    async def newest(self, key: AgentKey, budget: Budget) -> Recollection:
        """The agent's newest memory. The hot memory is used if it is the store's newest version or extends it, or, when
        the store cannot be reached, if a lease of this engine proves so. Otherwise it is not used: a rollback may have
        been acknowledged. Nor is it without the key of its namespace.
        """
        hot = self._hot(key)
        if (line := self.line(key)) is None:
            if hot is not None:
                return Recollection(hot, Source.HOT, hot.publication.standing.head)
            return Recollection(None, Source.COLD, NO_HEAD, _NOTHING)
        store = line.store
        # Of a memory that had to leave RAM, too.
        running = hot.publication.task if hot is not None else line.publications.last
        if running is not None and store.connection.is_reachable:
            await _wait(running, budget)
        try:
            heads = await self._heads(line, budget)
            newest = heads.newest
            if hot is not None and await line.may_use(hot.publication.standing, newest.identity, budget):
                if not hot.publication.is_running:
                    hot.publication.standing = hot.publication.standing.found(newest)
                return Recollection(hot, Source.HOT, newest, settings=heads.settings)
            standing = hot.publication.standing if hot is not None else None
            is_begun = standing is not None and standing.is_begun and newest == NO_HEAD
            is_undecided = standing is None or standing.follows is None or is_begun
            if running is not None and not running.done() and is_undecided:
                # It may soon become the newest version: a turn without it now would lose it.
                detail = "the agent's turn before this one is being stored"
                miss = Miss(MissReason.STORE_TIMEOUT, detail)
                return Recollection(None, Source.COLD, None, miss, unproven=_followed(hot))
            if hot is not None:
                self._engine.memories.drop(key)
            if newest.manifest is not None:
                return await self._newest_of(heads, store, key, budget)
        except StoreMiss as error:
            hot = self._hot(key)
            # A key that is not here may have been destroyed, so that nobody reads the memory again.
            if hot is not None and not error.miss.is_sealed and line.proves(hot.publication.standing):
                return Recollection(hot, Source.HOT, hot.publication.standing.head, settings=hot.settings)
            return Recollection(None, Source.COLD, None, error.miss, unproven=_followed(hot))
        return Recollection(None, Source.COLD, NO_HEAD, _NOTHING)

    async def with_base(self, key: AgentKey, newest: Recollection, version: int, budget: Budget) -> Recollection:
        """With the version that is to go on instead. Raises NotFound, Unavailable, FailedPrecondition."""
        # A memory that extends that version, and is not stored yet, would go on with more.
        is_stored = newest.memory is not None and newest.memory.publication.standing.is_stored
        if is_stored and newest.head is not None and newest.head.version == version:
            return newest
        if (line := self.line(key)) is None:
            raise NotFound.of(
                "base_version", f"version {version} is not kept", reason="VERSION_NOT_FOUND", agent_id=key.agent_id
            )
        try:
            head = await line.store.agents.version(key.agent_id, version, budget)
            base = await self._warm(line.store, key, head, budget)
        except StoreMiss as error:
            base = Recollection(None, Source.COLD, None, error.miss)
        if base.memory is None:
            detail = base.miss.detail if base.miss is not None else ""
            raise Unavailable.of(
                "base_version",
                f"version {version} cannot be read now ({detail})",
                reason="MEMORY_UNREADABLE",
                agent_id=key.agent_id,
                retry_after_s=1.0,
            )
        went_back = newest.miss.went_back if newest.miss is not None else None
        # The caller may accept the newest version of a store that lacks a newer one.
        return base if went_back is not None and went_back[1] == version else replace(newest, base=base)

    async def _heads(self, line: Line, budget: Budget) -> AgentHeads:
        """As the store has them. Raises StoreMiss, also (HEAD_WENT_BACK) where that cannot be: this engine read or
        committed a newer version, and nobody took it back.
        """
        known, events, agent_id = line.known, line.store.events, line.key.agent_id
        before, since = known.now, events.cursor
        heads = await line.store.agents.heads(agent_id, self._engine.model.kv_identity_hash, budget)
        is_behind = before.is_ahead_of(heads) and not await events.was_surely_taken_back(budget, agent_id, since)
        if not is_behind or before.newest is None:
            known.found(heads, before)
            return heads
        if line.lease.held is not None:  # the store may lack it, too: it proves nothing
            line.lease.give_back()
            line.lease.request()
        raise StoreMiss(_went_back(before.newest, heads.newest))

    def _hot(self, key: AgentKey) -> AgentMemory | None:
        hot = self._engine.memories.get(key)  # which counts as a use
        return hot.tag if hot is not None and isinstance(hot.tag, AgentMemory) else None

    async def _warm(self, store: RemoteCache, key: AgentKey, head: Head, budget: Budget) -> Recollection:
        try:
            manifest = await parsed(await store.blobs.manifest(key.agent_id, head, budget))
        except StoreMiss as error:
            # The head is known, but not its memory: this turn may still become the next version.
            return Recollection(None, Source.COLD, head, error.miss)
        except InvalidArgument as error:
            return Recollection(None, Source.COLD, head, Miss(MissReason.MANIFEST_INVALID, error.message))
        if difference := differing_field(self._engine.model.kv_identity, manifest.kv_identity):
            miss = Miss(MissReason.KV_IDENTITY_DIFFERS, difference)
            elsewhere = Publication(Standing(head, Stage.ELSEWHERE))
            memory = replace(self._read(manifest, head), publication=elsewhere, files=StoredFiles())
            return Recollection(memory, Source.COLD, head, miss)
        memory = self._read(manifest, head)
        if unfit := unknown_token(memory, self._engine.vocabulary_size) or self._too_large(memory.files):
            # Its text can be read all the same.
            return Recollection(memory, Source.COLD, head, Miss(MissReason.MANIFEST_INVALID, unfit))
        return Recollection(memory, Source.WARM, head)

    async def _newest_of(self, heads: AgentHeads, store: RemoteCache, key: AgentKey, budget: Budget) -> Recollection:
        """The newest memory, with the part of it that the line of this KV identity has, if that can be read."""
        found = replace(await self._warm(store, key, heads.newest, budget), settings=heads.settings)
        if heads.own_line is None or found.memory is None:
            return found
        own_line = await self._warm(store, key, heads.own_line, budget)
        return found if own_line.kv_from is Source.COLD else replace(found, own_line=replace(own_line, miss=found.miss))

    def _read(self, manifest: manifest_pb2.Manifest, head: Head) -> AgentMemory:
        return from_manifest(manifest, head, self._engine.model.tokenizer_digest)

    def _too_large(self, files: StoredFiles) -> str | None:
        """Why a blob is too large for this layout, or None. A manifest may name any size; such a blob is not read."""
        model = self._engine.model
        bounded = [(model.kv_bytes_per_token * BLOCK_TOKENS, digest) for digest in files.rows]
        for window, stored in files.windows.items():
            most = model.window_bytes_per_token[window] * BLOCK_TOKENS
            bounded += [(most, digest) for digest in stored.files.values()]
        bounded += [(model.state_bytes, digest) for digest in files.states.values()]
        for most, digest in bounded:
            if digest.size_bytes > most + MAX_HEADER_BYTES:
                return f"blob {digest}: expected at most {most + MAX_HEADER_BYTES} bytes"
        return None


def _followed(hot: AgentMemory | None) -> AgentMemory | None:
    """The hot memory, if it follows a version that is known. Else it could not read its agent's memory itself."""
    return hot if hot is not None and hot.publication.standing.head is not None else None


def _went_back(known: Version, newest: Head) -> Miss:
    detail = (
        f"its newest version in the store is {newest.version}, and this engine knows version {known.number}: an older "
        "copy of the store was put back, or the store lies"
    )
    return Miss(MissReason.HEAD_WENT_BACK, detail, went_back=(known.number, newest.version))


def unreadable(agent_id: str, why: str) -> Unavailable:
    problem, metadata = f"the agent's memory cannot be read now ({why})", {"agent_id": agent_id}
    return Unavailable(problem, reason="MEMORY_UNREADABLE", metadata=metadata, retry_after_s=1.0)


def unknown_token(memory: AgentMemory, vocabulary_size: int) -> str:
    """Why the memory's token ids are invalid, or empty. An imported manifest may name any number as a token."""
    largest = memory.transcript.token_ids.largest
    return f"token_ids: expected ids below {vocabulary_size}, found {largest}" if largest >= vocabulary_size else ""


async def _wait(running: PublicationTask, budget: Budget) -> None:
    with budget.spending():
        await asyncio.wait({running}, timeout=budget.remaining_s)
