"""Which memory a conversation has that names no agent: the one that ends where the conversation's known part ends.

Chat APIs send the whole conversation each time and name no agent. A digest of its first messages, keyed so that nobody
can guess texts from names, finds the agent that remembers them. A turn that goes on from an agent's newest version
extends this agent; one that goes on from an older point, or while the agent is busy, gets a fork: a branch. One that
goes on from a turn that is not answered yet was sent behind an interrupt, and waits a little for that turn's end.

What is in RAM here is only a shortcut. After a restart the agents' own messages, in the store, are compared: an agent's
name begins with the digest of its conversation's opening. A digest found shows where to look; what is truly reused is
decided by the engine, character by character.

Dates and clocks of the systems' texts and of the opening do not distinguish conversations, unless nothing else does: a
conversation that continues at another time is found, and its memory goes on."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from blake3 import blake3
from kvasir.errors import KvasirError
from kvasir.waits import SOON_S

from kvasir_gateway.reading.compaction import Summaries
from kvasir_gateway.reading.comparing import at_any_time, canonical, common_messages
from kvasir_gateway.reading.known_answers import DIGEST_CHARS, Answer, Chain, KnownAnswers, Point, Tip
from kvasir_gateway.reading.made_calls import MadeCalls
from kvasir_gateway.reading.quoting import Quoted, chars_in_common, newest
from kvasir_gateway.reading.records import PREFIX, AgentRecords, Kept
from kvasir_gateway.turn import Said

_log = logging.getLogger(__name__)
_MAX_TIPS = 100_000
_MAX_LOOKED_AT = 8
_MAX_CUT = 1000
_NO_ANSWERS = KnownAnswers()


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A turn that keeps its agent busy."""

    opening: str
    messages: Sequence[Said]
    ended: asyncio.Event


class Conversations:
    """The conversations of all callers, by namespace."""

    def __init__(
        self,
        key: bytes,
        *,
        new_name: Callable[[], str],
        now: Callable[[], datetime],
        max_kept: int = 1000,
    ) -> None:
        """`key`: 32 bytes. `max_kept`: anonymous agents of a namespace beyond these are deleted."""
        self._key = key
        self._new_name = new_name
        self._now = now
        self._max_kept = max_kept
        self._known = defaultdict[str, KnownAnswers](KnownAnswers)  # by namespace
        self._busy: dict[tuple[str, str], _UnderWay] = {}
        self.forks: dict[tuple[str, str], tuple[AgentRecords, int]] = {}
        """Forks that were made for a turn that is not answered yet, with their version."""
        self.cut: dict[tuple[str, str], str] = {}
        """By namespace and opening an agent whose first turn was not answered. The next that begins so takes it."""
        self._begun: dict[tuple[str, str], tuple[str, str]] = {}  # by new agent its key in `cut`, until it is answered
        self._dropping: set[asyncio.Task[None]] = set()
        self._tidied: dict[str, datetime] = {}
        self._summaries = Summaries(key)
        self._made_calls = MadeCalls(now())

    def chain(self, messages: Sequence[Said], hint: str, *, is_exact: bool = False) -> Chain:
        """For the other calls. Reads every message; changes nothing, and may run in any thread."""
        digest = alike = session = blake3(hint.encode("utf-8", "surrogatepass"), key=self._key).digest()
        points: list[Point] = []
        timeless = messages if is_exact else at_any_time(messages)
        for number, message in enumerate(messages, 1):
            is_same = digest == alike and timeless[number - 1] is message
            digest = self._next(digest, message)
            alike = digest if is_same else self._next(alike, timeless[number - 1])
            is_last = number == len(messages)
            is_opening = not points and (message.role != "system" or is_last)
            if is_opening or (points and message.role == "assistant"):
                calls = [call.id for call in message.tool_calls if call.id]
                points.append(Point(digest.hex(), alike.hex(), number, calls))
        names = list({each: None for point in points[1:] for each in (point.digest, point.alike)})
        call_ids = [call for point in reversed(points) for call in point.call_ids]
        return Chain(points, names, call_ids, digest, alike, len(messages), session, is_exact)

    async def agent_for(self, namespace: str, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> str:
        """The agent that a turn with these messages shall extend: found, forked, or new. It is busy from now on."""
        await self._end_of_interrupted(namespace, chain, messages, records)
        name, opening = f"{PREFIX}{chain.opening}/{self._new_name()}", (namespace, chain.points[0].alike)
        found = self._answers_of(namespace).tip(chain) or await self._stored_tip(chain, messages, records)
        cut = await self._cut(opening, chain, messages, records) if found is None else ""
        if found is not None:
            if found.is_newest and (namespace, found.agent_id) not in self._busy:
                name = found.agent_id
            elif version := await _fork(found, name, records):
                self.forks[namespace, name] = records, version
        elif cut and self.cut.get(opening) == cut and (namespace, cut) not in self._busy:
            name = cut
        else:
            self._begun[namespace, name] = opening
        self._take(namespace, name, chain, messages)
        return name

    def _answers_of(self, namespace: str) -> KnownAnswers:
        return self._known.get(namespace, _NO_ANSWERS)

    def _take(self, namespace: str, agent_id: str, chain: Chain, messages: Sequence[Said]) -> None:
        self._busy[namespace, agent_id] = _UnderWay(chain.points[0].alike, messages, asyncio.Event())

    def _free(self, place: tuple[str, str]) -> None:
        if (turn := self._busy.pop(place, None)) is not None:
            turn.ended.set()

    async def _end_of_interrupted(
        self, namespace: str, chain: Chain, messages: Sequence[Said], records: AgentRecords
    ) -> None:
        """Wait a little for the end of the turn that these messages go on from, if it is still under way."""
        opening, busy = chain.points[0].alike, self._busy.items()
        alike = [turn for (theirs, _), turn in busy if theirs == namespace and turn.opening == opening]
        # Behind one of several answers to the same messages nobody waits for the others.
        if alike and (tip := self._answers_of(namespace).tip(chain)) is not None:
            alike = [turn for turn in alike if len(turn.messages) > tip.messages]
        if shorter := [turn for turn in alike if len(turn.messages) < len(messages)]:
            found = await records.beside(partial(_followed, shorter, messages, is_exact=chain.is_exact))
            if found is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(found.ended.wait(), SOON_S)

    async def _cut(
        self, opening: tuple[str, str], chain: Chain, messages: Sequence[Said], records: AgentRecords
    ) -> str:
        """The agent in `cut`; none if its name was used to go on with it, or if it moved to another store: that memory
        is no other turn's."""
        agent_id = self.cut.get(opening, "")
        if not agent_id:
            return ""
        with contextlib.suppress(KvasirError):
            if any(each.is_elsewhere for each in await records.kept(agent_id)):
                self.cut.pop(opening, None)
                return ""
        remembered = await records.messages(agent_id)
        if not await records.beside(partial(_begin_so, messages, remembered, is_exact=chain.is_exact)):
            self.cut.pop(opening, None)
            return ""
        return agent_id

    async def agent_behind(self, namespace: str, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> str:
        """The agent that remembers the conversation so far, for a turn that changes nothing of it; else nothing."""
        found = self._answers_of(namespace).tip(chain)
        if found is None and (maker := self._answers_of(namespace).maker_of(chain.call_ids)):
            return maker
        found = found or await self._stored_tip(chain, messages, records)
        return found.agent_id if found is not None else ""

    async def quoted_by(self, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> Quoted:
        """The agent of this session whose conversation these messages quote in texts of their own."""
        try:
            known = await newest(records)
        except KvasirError:
            return Quoted()
        return await records.beside(lambda: self._most_quoted(known, chain, messages))

    def _most_quoted(
        self, known: Sequence[tuple[Kept, Sequence[Said]]], chain: Chain, messages: Sequence[Said]
    ) -> Quoted:
        """In any thread."""
        counts = [(chars_in_common(said, messages), agent, said) for agent, said in known]
        ours = [each for each in counts if each[0] and self._is_of(*each[1:], chain)]
        if not ours:
            return Quoted()
        _, agent, said = max(ours, key=lambda each: each[0])  # of equal ones the newest
        return Quoted(agent.agent_id, said)

    async def compacted(
        self,
        namespace: str,
        chain: Chain,
        messages: Sequence[Said],
        records: AgentRecords,
        *,
        is_side_call: bool = False,
    ) -> str:
        """The agent whose history these messages take the place of, by its summary or its newest calls; else nothing.
        It is busy from now on, and found under the new opening, too."""
        agent_id = ""
        if self._answers_of(namespace).tip(chain) is None:
            agent_id = "" if is_side_call else self._answers_of(namespace).maker_of(chain.call_ids)
            agent_id = agent_id or await self._summarized(namespace, chain, messages, records)
            if not agent_id and not is_side_call:
                agent_id = await self._stored_maker_of_calls(namespace, chain, records)
        if not agent_id or (namespace, agent_id) in self._busy:
            return ""
        self._take(namespace, agent_id, chain, messages)
        try:
            await records.note(agent_id, opening=chain.opening, summary="")
        except KvasirError:
            self._free((namespace, agent_id))
            return ""  # it is gone, or nobody knows
        except BaseException:
            self._free((namespace, agent_id))
            raise
        self._summaries.used(namespace, agent_id)
        return agent_id

    async def summarized(
        self, place: tuple[str, str], chain: Chain, messages: Sequence[Said], text: str, records: AgentRecords
    ) -> None:
        """A client was given a summary of these messages, which an agent remembers: its namespace and name."""
        if summary := self._summaries.add(*place, chain.session, messages, text):
            try:
                await records.note(place[1], summary=summary)
            except KvasirError as error:  # then a restart of the gateway forgets it
                _log.warning("conversations.summary_not_kept error=%s", error.reason)

    def answered(self, namespace: str, agent_id: str, chain: Chain, reply: Said, version: int) -> None:
        """The agent remembers these messages and the reply, as this version; 0: it is not known which."""
        self.forks.pop((namespace, agent_id), None)
        self._begun.pop((namespace, agent_id), None)
        if self.cut.get(opening := (namespace, chain.points[0].alike)) == agent_id:
            del self.cut[opening]
        calls = [call.id for call in reply.tool_calls if call.id]
        answer = Answer(agent_id, version, chain.points[0].alike, self._next(chain.alike, reply).hex(), calls)
        self._known[namespace].add(self._next(chain.digest, reply).hex(), answer)
        if sum(map(len, self._known.values())) > _MAX_TIPS:
            max(self._known.values(), key=len).forget_oldest()

    def left(self, namespace: str, agent_id: str) -> None:
        """The turn has ended, however it did. A fork that it did not use is deleted, and busy until then."""
        place = (namespace, agent_id)
        if (opening := self._begun.pop(place, None)) is not None:
            self.cut[opening] = agent_id
            if len(self.cut) > _MAX_CUT:
                del self.cut[next(iter(self.cut))]
        if place not in self.forks:
            self._free(place)
            return
        dropping = asyncio.create_task(self._drop(place, *self.forks.pop(place)))
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, place: tuple[str, str], records: AgentRecords, version: int) -> None:
        try:
            with contextlib.suppress(KvasirError):  # it is tidied up one day
                await records.delete(place[1], only_version=version)
        finally:
            self._free(place)

    def digests_of(self, messages: Iterable[Said]) -> Iterator[str]:
        """Short digests, by this gateway's key, of all beginnings of the messages, from that of none on."""
        hashed = blake3(key=self._key)
        yield hashed.hexdigest(6)
        for message in messages:
            hashed.update(canonical(message))
            yield hashed.hexdigest(6)

    async def tidy(self, namespace: str, records: AgentRecords, every: timedelta = timedelta(minutes=10)) -> int:
        """Now and then delete what is too much, and let the others expire; returns the number of agents deleted."""
        now = self._now()
        if timedelta() <= now - self._tidied.get(namespace, datetime.min.replace(tzinfo=UTC)) < every:
            return 0
        self._tidied[namespace] = now
        deleted = 0
        for place, agent in enumerate(await records.kept(PREFIX)):
            if (namespace, agent.agent_id) in self._busy:
                continue
            with contextlib.suppress(KvasirError):  # a pinned one stays, and keeps no other
                if place >= self._max_kept:
                    # By its version: since the list was read it may have had a turn.
                    await records.delete(agent.agent_id, only_version=agent.version)
                    deleted += 1
                elif not agent.expires:
                    await records.let_expire(agent.agent_id)
        return deleted

    async def _summarized(self, namespace: str, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> str:
        """The agent whose summary these messages repeat; else nothing."""
        if not self._summaries.is_read(namespace):
            with contextlib.suppress(KvasirError):
                kept = [each for each in await records.kept(PREFIX) if each.summary and not each.is_copy]
                self._summaries.read(namespace, {each.agent_id: each.summary for each in reversed(kept)})
        return await self._summaries.agent_of(namespace, chain.session, messages, records.beside)

    async def _stored_maker_of_calls(self, namespace: str, chain: Chain, records: AgentRecords) -> str:
        """The agent of this session that made a call of the conversation before the gateway started; else nothing, and
        if there is an agent that begins as the conversation does."""
        try:
            makers = await self._made_calls.makers(namespace, {*chain.call_ids}, records)
            if not makers or await _kept_of(chain.opening, records):
                return ""
        except KvasirError:
            return ""
        for maker in makers:
            if await records.beside(partial(self._is_of, maker, await records.messages(maker.agent_id), chain)):
                return maker.agent_id
        return ""

    def _is_of(self, agent: Kept, said: Sequence[Said], chain: Chain) -> bool:
        """Whether the agent, which remembers this, is of the chain's session. In any thread."""
        first = next((index for index, message in enumerate(said) if message.role != "system"), len(said))
        head, digest = said[: first + 1], chain.session
        for message in head if chain.is_exact else at_any_time(head):
            digest = self._next(digest, message)
        opening = digest.hex()[:DIGEST_CHARS]
        return opening == agent.opening or agent.agent_id.startswith(f"{PREFIX}{opening}/")

    async def _stored_tip(self, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> Tip | None:
        if not any(message.role == "assistant" for message in messages):
            return None
        try:
            kept = await _kept_of(chain.opening, records)
        except KvasirError:
            return None  # a store that does not answer is a miss, here as in the engine
        # Whoever may read agents' names could give a memory that looks like the conversation's.
        kept = sorted((each for each in kept if not each.is_copy), key=lambda agent: agent.used_at, reverse=True)
        remembered = [(agent, await records.messages(agent.agent_id)) for agent in kept[:_MAX_LOOKED_AT]]
        return await records.beside(partial(_tip_among, remembered, messages, is_exact=chain.is_exact))

    def _next(self, digest: bytes, message: Said) -> bytes:
        return blake3(digest, key=self._key).update(canonical(message)).digest()


async def _kept_of(opening: str, records: AgentRecords) -> list[Kept]:
    """The agents whose conversations begin so."""
    return [*await records.kept(f"{PREFIX}{opening}/"), *await records.kept(PREFIX, opening=opening)]


def _tip_among(
    remembered: Sequence[tuple[Kept, Sequence[Said]]], messages: Sequence[Said], *, is_exact: bool
) -> Tip | None:
    """The agent that begins with the most of these messages. In any thread."""
    best, common, is_whole = _most_in_common(remembered, messages)
    # Beyond the opening, which all of these have.
    if not is_exact and all(message.role != "assistant" for message in messages[:common]):
        at_a_time = [(agent, at_any_time(said)) for agent, said in remembered]
        best, _, is_whole = _most_in_common(at_a_time, at_any_time(messages))
    # A memory that went on otherwise is forked, and the fork is cut by the engine.
    return Tip(best.agent_id, 0, is_whole) if best is not None else None


def _followed(turns: Sequence[_UnderWay], messages: Sequence[Said], *, is_exact: bool) -> _UnderWay | None:
    """The turn that these messages go on from. In any thread: of many, each costs a comparison."""
    return next((turn for turn in turns if _begin_so(messages, turn.messages, is_exact=is_exact)), None)


def _begin_so(messages: Sequence[Said], remembered: Sequence[Said], *, is_exact: bool) -> bool:
    """Whether the messages begin with all that is remembered. In any thread."""
    if not is_exact:
        messages, remembered = at_any_time(messages), at_any_time(remembered)
    return common_messages(messages, remembered) == len(remembered)


def _most_in_common(
    remembered: Sequence[tuple[Kept, Sequence[Said]]], messages: Sequence[Said]
) -> tuple[Kept | None, int, bool]:
    """The agent that begins with the most of these messages, their number, and whether it remembers no more."""
    best, most, is_whole = None, 0, False
    for agent, said in remembered:
        if (common := common_messages(said, messages)) > most:
            best, most, is_whole = agent, common, common == len(said)
    return best, most, is_whole


async def _fork(found: Tip, name: str, records: AgentRecords) -> int:
    """Begin a branch, and return its version; 0: the version is gone, and the newest may share a part."""
    for version in (found.version, None) if found.version else (None,):
        forking = asyncio.ensure_future(records.fork(found.agent_id, name, version))
        with contextlib.suppress(KvasirError):
            try:
                return await asyncio.shield(forking)
            except asyncio.CancelledError:
                with contextlib.suppress(KvasirError):
                    await records.delete(name, only_version=await forking)
                raise
    return 0
