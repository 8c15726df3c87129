"""Which memory a conversation has that names no agent: the one that ends where the conversation's known part ends.

Chat APIs send the whole conversation each time and say not who speaks. A digest of its first messages, keyed so that
nobody can guess texts from names, finds the agent that remembers them. A turn that goes on from an agent's newest
version extends this agent; one that goes on from an older point, or while the agent is busy, gets a fork: a branch.

What is in RAM here is only a shortcut. After a restart the agents' own messages, in the store, say the same: an agent's
name begins with the digest of its conversation's opening. A digest found says where to look; what is truly reused is
decided by the engine, character by character.
"""

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from blake3 import blake3
from kvasir.errors import KvasirError

from kvasir_gateway.reading.compaction import Summaries
from kvasir_gateway.turn import Said

PREFIX = "conversation/"
_DIGEST_CHARS = 24
_MAX_TIPS = 100_000
_MAX_LOOKED_AT = 8


@dataclass(frozen=True, slots=True)
class Kept:
    """An agent of the store, as far as conversations need it."""

    agent_id: str
    used_at: datetime


class AgentRecords(Protocol):
    """What the store knows about a caller's agents."""

    async def kept(self, name_prefix: str, opening: str = "") -> list[Kept]: ...

    async def open_anew(self, agent_id: str, opening: str) -> None: ...

    async def messages(self, agent_id: str) -> Sequence[Said]: ...

    async def fork(self, source: str, name: str, version: int | None) -> None: ...

    async def delete(self, agent_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Tip:
    """The point of an agent's memory at which a conversation was answered."""

    agent_id: str
    version: int  # 0: it is not known which
    is_newest: bool


@dataclass(frozen=True, slots=True)
class Point:
    """A prefix of a conversation that may be remembered: its digest and the number of its messages."""

    digest: str
    messages: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A conversation's digests: of its opening (to the first message that is not the system's), then of each prefix
    that ends with a reply; and of all its messages, from which the next one's follows. `session`: of the caller's
    hint."""

    points: Sequence[Point]
    digest: bytes
    messages: int
    session: bytes


class Conversations:
    """The conversations of all callers, by namespace."""

    def __init__(
        self,
        key: bytes,
        *,
        new_name: Callable[[], str],
        now: Callable[[], datetime],
        max_kept: int = 1000,
        expiry: timedelta = timedelta(days=7),
    ) -> None:
        """`key`: 32 bytes. `max_kept`, `expiry`: anonymous agents of a namespace beyond these are deleted."""
        self._key = key
        self._new_name = new_name
        self._now = now
        self._max_kept = max_kept
        self._expiry = expiry
        # By namespace and digest the agent and its version, and by agent the digest of its newest answer.
        self._answers: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self._newest: dict[tuple[str, str], str] = {}
        self._busy: set[tuple[str, str]] = set()
        self._tidied: dict[str, datetime] = {}
        self._summaries = Summaries()

    def chain(self, messages: Sequence[Said], hint: str) -> Chain:
        """For the other calls. Reads every message; changes nothing, and may run in any thread."""
        digest = session = blake3(hint.encode("utf-8", "surrogatepass"), key=self._key).digest()
        points: list[Point] = []
        for number, message in enumerate(messages, 1):
            digest = self._next(digest, message)
            is_last = number == len(messages)
            is_opening = not points and (message.role != "system" or is_last)
            if is_opening or (points and message.role == "assistant"):
                points.append(Point(digest.hex(), number))
        return Chain(points, digest, len(messages), session)

    async def agent_for(self, namespace: str, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> str:
        """The agent that a turn with these messages shall extend: found, forked, or new. It is busy from now on."""
        points = chain.points
        name = f"{PREFIX}{points[0].digest[:_DIGEST_CHARS]}/{self._new_name()}"
        found = self._tip(namespace, points) or await self._stored_tip(points[0], messages, records)
        if found is not None:
            if found.is_newest and (namespace, found.agent_id) not in self._busy:
                name = found.agent_id
            else:
                await _fork(found, name, records)
        self._busy.add((namespace, name))
        return name

    async def agent_behind(self, namespace: str, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> str:
        """The agent that remembers the conversation so far, for a turn that changes nothing of it; else nothing."""
        points = chain.points
        found = self._tip(namespace, points) or await self._stored_tip(points[0], messages, records)
        return found.agent_id if found is not None else ""

    async def compacted(self, namespace: str, chain: Chain, messages: Sequence[Said], records: AgentRecords) -> str:
        """The agent whose history a summary in these messages takes the place of; else nothing. It is busy from now
        on, and found under the new opening, too."""
        agent_id = ""
        if self._tip(namespace, chain.points) is None:
            agent_id = await self._summaries.agent_of(namespace, chain.session, messages)
        if not agent_id or (namespace, agent_id) in self._busy:
            return ""
        self._busy.add((namespace, agent_id))
        try:
            await records.open_anew(agent_id, chain.points[0].digest[:_DIGEST_CHARS])
        except BaseException as error:
            self._busy.discard((namespace, agent_id))
            if not isinstance(error, KvasirError):
                raise
            return ""  # it is gone, or nobody can say
        return agent_id

    def summarized(self, namespace: str, agent_id: str, chain: Chain, text: str) -> None:
        """A client was given a summary of what the agent remembers."""
        self._summaries.add(namespace, agent_id, chain.session, text)

    def answered(self, namespace: str, agent_id: str, chain: Chain, reply: Said, version: int) -> None:
        """The agent remembers these messages and the reply, as this version; 0: it is not known which."""
        digest = self._next(chain.digest, reply).hex()
        place = (namespace, digest)
        self._forget(place)  # another agent may have answered the same
        self._answers[place] = (agent_id, version)
        self._newest[namespace, agent_id] = digest
        if len(self._answers) > _MAX_TIPS:
            self._forget(next(iter(self._answers)))

    def left(self, namespace: str, agent_id: str) -> None:
        """The turn has ended, however it did."""
        self._busy.discard((namespace, agent_id))

    def digest_of(self, messages: Sequence[Said]) -> str:
        """A short digest of what was said, keyed: who has it cannot guess the text."""
        hashed = blake3(key=self._key)
        for message in messages:
            hashed.update(_canonical(message))
        return hashed.hexdigest(6)

    async def tidy(self, namespace: str, records: AgentRecords, every: timedelta = timedelta(minutes=10)) -> int:
        """Delete what is expired or too much, now and then; returns the number of agents deleted."""
        now = self._now()
        if now - self._tidied.get(namespace, datetime.min.replace(tzinfo=UTC)) < every:
            return 0
        self._tidied[namespace] = now
        kept = sorted(await records.kept(PREFIX), key=lambda agent: agent.used_at, reverse=True)
        deleted = 0
        for place, agent in enumerate(kept):
            is_gone = place >= self._max_kept or now - agent.used_at > self._expiry
            if is_gone and (namespace, agent.agent_id) not in self._busy:
                with contextlib.suppress(KvasirError):  # a pinned one stays, and keeps no other
                    await records.delete(agent.agent_id)
                    deleted += 1
        return deleted

    def _forget(self, place: tuple[str, str]) -> None:
        agent_id, _ = self._answers.pop(place, ("", 0))
        newest = (place[0], agent_id)
        if self._newest.get(newest) == place[1]:
            del self._newest[newest]

    def _tip(self, namespace: str, points: Sequence[Point]) -> Tip | None:
        """The longest known prefix that ends with a reply. The opening is none: equal ones are different talks."""
        for point in reversed(points[1:]):
            if (answer := self._answers.get((namespace, point.digest))) is not None:
                agent_id, version = answer
                return Tip(agent_id, version, self._newest.get((namespace, agent_id)) == point.digest)
        return None

    async def _stored_tip(self, opening: Point, messages: Sequence[Said], records: AgentRecords) -> Tip | None:
        if not any(message.role == "assistant" for message in messages):
            return None
        try:
            digest = opening.digest[:_DIGEST_CHARS]
            kept = [*await records.kept(f"{PREFIX}{digest}/"), *await records.kept(PREFIX, opening=digest)]
        except KvasirError:
            return None  # a store that does not answer is a miss, here as in the engine
        kept.sort(key=lambda agent: agent.used_at, reverse=True)
        best, best_common, is_whole = None, 0, False
        for agent in kept[:_MAX_LOOKED_AT]:
            remembered = await records.messages(agent.agent_id)
            common = common_messages(remembered, messages)
            if common > best_common:
                best, best_common, is_whole = agent, common, common == len(remembered)
        if best is None:
            return None
        # A memory that went on otherwise is forked, and the fork is cut by the engine.
        return Tip(best.agent_id, 0, is_whole)

    def _next(self, digest: bytes, message: Said) -> bytes:
        return blake3(digest + _canonical(message), key=self._key).digest()


def common_messages(ones: Sequence[Said], others: Sequence[Said]) -> int:
    """How many messages two conversations begin with in common."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if _canonical(one) != _canonical(other):
            break
        count += 1
    return count


async def _fork(found: Tip, name: str, records: AgentRecords) -> None:
    """Begin a branch. A version that is not kept any more is a miss: the newest may still share a part."""
    for version in (found.version, None) if found.version else (None,):
        try:
            await records.fork(found.agent_id, name, version)
        except KvasirError:
            continue
        return


def _canonical(message: Said) -> bytes:
    """The message as clients repeat it: without ids, the space around a text, and the form of arguments."""
    calls = [[call.name, _arguments(call.arguments_json)] for call in message.tool_calls]
    said = [message.role, message.name, message.content.strip(), calls]
    return json.dumps(said, ensure_ascii=True).encode() + b"\n"


def _arguments(text: str) -> object:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text
