"""One agent at work: asks its turns, breaks some of them, and keeps an account of what must be remembered."""

import asyncio
import contextlib
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvasir.clients import AioInferenceClient
from kvasir.errors import Cancelled, DeadlineExceeded, Internal, KvasirError, ResourceExhausted, Unavailable
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.hammer.agents import Ask, Cut, Script
from tests.campaigns.hammer.arena import Arena
from tests.campaigns.hammer.records import TurnRecord
from tests.made_models.remembered import token_ids
from tools.kvasir_tiny.words import Dice

_ATTEMPTS = 60
_END_OF_MESSAGE = "<|im_end|>"


class _CutError(Exception):
    """The turn was interrupted, as was planned."""


@dataclass
class _Heard:
    """What came of a turn."""

    parent_version: int = 0
    version: int = 0
    state: int = 0
    reason: int = 0
    right_drafts: int = 0


class Actor:
    """Plays one script against the engine under test."""

    def __init__(self, arena: Arena, script: Script, version: int = 0) -> None:
        self._arena = arena
        self._script = script
        self._version = version
        self._parent_version = 0
        self._is_committed = version > 0
        self._last: TurnRecord | None = None
        self._cut: tuple[Ask, TurnRecord] | None = None  # a cut turn of which is not known yet what was kept

    async def act(self) -> bool:
        """One turn, or something else that changes what is remembered. False when the agent's life is over."""
        dice, settled = self._script.dice, self._is_committed and self._cut is None
        if settled and self._parent_version and self._script.before is not None and dice.chance(0.05):
            return await self._roll_back()
        if settled and dice.chance(0.07):
            return await self._fork()
        if dice.chance(0.06):
            return await self._ask_without_agent()
        return await self._turn()

    async def leave(self) -> None:
        """The agent's life is over. What a cut turn said is compared all the same."""
        if self._cut is not None:
            self._not_kept(self._cut[1])
        elif self._is_committed and self._last is not None:
            with contextlib.suppress(KvasirError):
                _, data = await self._arena.store.get_snapshot(self._script.name, version=self._version)
                self._arena.check_stored(self._last, manifests.parse(data))
        self._arena.reference.forget(self._script.name)

    # --- turns ---

    async def _turn(self) -> bool:
        arena, script = self._arena, self._script
        ask = script.next()
        record = self._record(ask, script.name)
        try:
            heard = await self._ask(ask, record)
        except _CutError:
            arena.counts[f"cut {ask.cut.at if ask.cut else ''}"] += 1
            if record.cached_tokens is None or record.source == "REPLAY":
                # It may have run and been kept, and how is not known.
                return self._cut is None and not await self._has_moved()
            if self._cut is None:
                self._cut = (ask, record)
                return True
            return False  # two in a row: which of them was kept is not worth finding out
        if heard is None:
            return False
        asked = await self._settled(ask, record, heard)
        if asked is None:
            return False
        arena.check(record)
        self._remember(asked, record, heard)
        return await self._ask_again(ask, record, heard) if script.dice.chance(0.06) and not ask.cut else True

    def _remember(self, ask: Ask, record: TurnRecord, heard: _Heard) -> None:
        self._last = record
        stopped = heard.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_TOOL_CALLS)
        self._script.answered(ask, record.text, _END_OF_MESSAGE if stopped else "")
        self._parent_version, self._version = self._version, self._version + 1
        self._is_committed = heard.state == pb.SNAPSHOT_STATE_COMMITTED
        if self._is_committed and heard.version != self._version:
            self._arena.problem("version", record, f"committed as {heard.version}, expected {self._version}")
        if heard.state not in (pb.SNAPSHOT_STATE_COMMITTED, pb.SNAPSHOT_STATE_PENDING):
            self._arena.problem("version", record, f"snapshot state {heard.state}")

    async def _settled(self, ask: Ask, record: TurnRecord, heard: _Heard) -> Ask | None:
        """Find out what the turn extended. None when that is an agent whose last turn was lost unacknowledged."""
        arena = self._arena
        if self._cut is not None:
            cut, self._cut = self._cut, None
            if heard.parent_version == self._version + 1:
                await self._kept(*cut)
                if ask.append is not None:
                    ask = replace(ask, messages=[*self._script.messages, *ask.append])
                    record.messages = ask.messages
            else:
                self._not_kept(cut[1])
        if heard.parent_version == self._version:
            return ask
        if heard.parent_version == self._version - 1 and not self._is_committed:
            arena.counts["lost before it was acknowledged"] += 1
        elif record.miss.startswith("STORE_"):
            arena.counts["answered without the store"] += 1
        else:
            what = f"extends version {heard.parent_version}, expected {self._version}"
            arena.problem("version", record, what)
        return None

    async def _kept(self, ask: Ask, record: TurnRecord) -> None:
        """A cut turn became a version: whole after all, or in part as it asked for."""
        _, data = await self._arena.store.get_snapshot(self._script.name, version=self._version + 1)
        stored = manifests.parse(data)
        prompt_tokens = stored.turn.prompt_tokens
        record.kept = token_ids(stored)[prompt_tokens:]
        was_cut = stored.turn.finish_reason == "cancelled"
        if was_cut and not (ask.cut and ask.cut.keep_partial):
            self._arena.problem("version", record, "a cut turn was kept, which nobody asked for")
        record.limit_tokens = len(record.kept) if was_cut else None
        if not was_cut:
            record.heard, record.is_told_again = record.kept, True
        self._arena.counts["kept in part" if was_cut else "cut too late"] += 1
        self._arena.check(record)
        self._script.answered(ask, stored.turn.reply, "")
        self._script.text = stored.text if ask.prompt is not None else ""
        self._parent_version, self._version, self._is_committed = self._version, self._version + 1, True

    def _not_kept(self, record: TurnRecord) -> None:
        record.is_remembered, record.limit_tokens = False, len(record.heard)
        if record.heard:
            self._arena.check(record)

    async def _has_moved(self) -> bool:
        """Whether the store has another version than is known here, or may have soon."""
        await asyncio.sleep(0.5)
        with contextlib.suppress(KvasirError):
            agent = await self._arena.store.get_agent(self._script.name)
            return bool(agent.lines[0].version != self._version)
        return self._version > 0

    async def _ask_again(self, ask: Ask, record: TurnRecord, heard: _Heard) -> bool:
        """The same request once more is told again, not done again."""
        if not self._is_committed:
            return True
        again = replace(record, number=self._arena.began_request(), kind="again")
        answer = await self._ask(ask, again, is_new=False)
        if answer is None:
            return False
        # What only spelled a stop string is not remembered, and not told again.
        told = record.heard[: len(again.heard)] if heard.reason == pb.FINISH_REASON_STOP_SEQUENCE else record.heard
        is_same = (again.heard, again.text, answer.version) == (told, record.text, heard.version)
        if again.source != "REPLAY" or not is_same:
            self._arena.problem("mismatch", again, f"told again as {again.heard} ({again.source}, {answer.version})")
        return True

    async def _ask_without_agent(self) -> bool:
        ask = self._script.nobodys()
        record = self._record(ask, "")
        with contextlib.suppress(_CutError):
            if await self._ask(ask, record) is not None:
                self._arena.check(record)
            return True
        self._not_kept(record)
        return True

    # --- what changes memory beside turns ---

    async def _roll_back(self) -> bool:
        name = self._script.name
        back = await self._arena.store.rollback_agent(name, self._parent_version)
        self._arena.reference.undo(name)
        self._script.undone()
        self._version = back.version
        self._arena.counts["rolled back"] += 1
        return True

    async def _fork(self) -> bool:
        target = f"{self._script.name.partition('-')[0]}-{self._arena.new_name()}"
        forked = await self._arena.store.fork_agent(self._script.name, target)
        self._arena.reference.fork(self._script.name, target)
        script = self._script.fork(target, Dice(f"{self._arena.plan.name} {target}"))
        self._arena.forked.append(Actor(self._arena, script, forked.lines[0].version))
        self._arena.counts["forked"] += 1
        return True

    # --- asking ---

    def _record(self, ask: Ask, agent: str) -> TurnRecord:
        number = self._arena.began_request()
        return TurnRecord(
            agent,
            number,
            request_id=f"request {number}",
            kind=ask.kind,
            prompt=ask.prompt,
            messages=ask.messages,
            sampling=ask.sampling,
        )

    async def _ask(self, ask: Ask, record: TurnRecord, *, is_new: bool = True) -> _Heard | None:
        """Ask until it is answered: while the engine is away, or has no room, ask again with the same id. None: it
        was answered from a turn that is not known here, or not at all.
        """
        arena = self._arena
        source = ""
        for _ in range(_ATTEMPTS):
            await arena.engine_is_up.wait()
            life = arena.lives_of_engine
            cached = record.cached_tokens
            try:
                heard = await self._hear(ask, record)
            except (Unavailable, Internal, Cancelled) as error:
                if life == arena.lives_of_engine and arena.engine_is_up.is_set():
                    if not isinstance(error, Unavailable):
                        arena.problem("error", record, f"{type(error).__name__}: {error.message}")
                        return None
                    await asyncio.sleep(0.1)
                source = record.source or source
                arena.counts["asked again"] += 1
                continue
            except ResourceExhausted as full:
                arena.counts["refused for room"] += 1
                await asyncio.sleep(full.retry_after_s or 0.2)
                continue
            except KvasirError as error:
                arena.problem("error", record, f"{type(error).__name__}: {error.message}")
                return None
            if record.source == "REPLAY" and is_new:
                # The engine died after the turn and before it could say so.
                arena.counts["done, and not heard"] += 1
                record.source, record.cached_tokens, record.is_told_again = source, cached, True
                return heard if cached is not None else None
            self._count(record, heard)
            return heard
        arena.problem("error", record, f"no answer in {_ATTEMPTS} attempts")
        return None

    async def _hear(self, ask: Ask, record: TurnRecord) -> _Heard:
        """One attempt. Raises _CutError when the turn was interrupted as its plan says."""
        record.heard, record.text = [], ""
        record.began_s = self._arena.now_s()
        cut = ask.cut
        own = cut is not None and cut.how == "disconnect"
        sends_messages = ask.prompt is None and ask.append is None
        client = AioInferenceClient.connect(self._arena.house.engine.address) if own else self._arena.client
        heard = _Heard()
        try:
            events = client.generate(
                agent_id=record.agent,
                request_id=record.request_id,
                prompt=ask.prompt,
                messages=ask.messages if sends_messages else None,
                append_messages=ask.append,
                replace_memory=sends_messages and record.agent != "",  # with an edited beginning: another conversation
                sampling=ask.sampling,
                priority=pb.PRIORITY_BACKGROUND if ask.is_background else pb.PRIORITY_INTERACTIVE,
                keep_partial=cut is not None and cut.keep_partial,
                timeout_s=cut.after_s if cut is not None and cut.at == "deadline" else None,
            )
            async with aclosing(events):
                async for event in events:
                    _note(event, record, heard)
                    if cut is not None and _is_time(cut, event, record):
                        if own:
                            await client.close()
                        raise _CutError
        except DeadlineExceeded:
            if cut is None or cut.at != "deadline":
                raise
            raise _CutError from None
        finally:
            record.ended_s = self._arena.now_s()
            if own:
                await client.close()
        return heard

    def _count(self, record: TurnRecord, heard: _Heard) -> None:
        counts = self._arena.counts
        counts[record.source] += 1
        counts[record.match] += 1
        counts[f"kind: {record.kind}"] += 1
        if record.miss.startswith(("STORE_", "BLOB_")):
            counts[f"miss {record.miss}"] += 1
        if record.sampling.get("temperature"):
            counts["sampled"] += 1
        if heard.state == pb.SNAPSHOT_STATE_PENDING:
            counts["pending"] += 1
        if heard.right_drafts:
            counts["right drafts"] += 1


def _note(event: pb.GenerateResponse, record: TurnRecord, heard: _Heard) -> None:
    match event.WhichOneof("event"):
        case "started":
            started = event.started
            heard.parent_version = started.parent_version
            record.prompt_tokens = started.prompt_tokens
            record.cached_tokens = started.cached_tokens
            record.source = pb.CacheSource.Name(started.source).removeprefix("CACHE_SOURCE_")
            record.match = pb.PrefixMatch.Name(started.match).removeprefix("PREFIX_")
            record.miss = pb.MissReason.Name(started.miss).removeprefix("MISS_REASON_")
        case "delta":
            record.heard += event.delta.token_ids
            record.text += event.delta.text
        case "finished":
            heard.version, heard.state = event.finished.snapshot.version, event.finished.snapshot.state
            heard.reason = event.finished.reason
            heard.right_drafts = event.finished.usage.accepted_draft_tokens
        case _:
            pass


def _is_time(cut: Cut, event: pb.GenerateResponse, record: TurnRecord) -> bool:
    kind = event.WhichOneof("event")
    if cut.at == "tokens":
        return kind == "delta" and len(record.heard) >= cut.tokens
    return kind == {"started": "started", "prefill": "prefill_progress"}.get(cut.at)
