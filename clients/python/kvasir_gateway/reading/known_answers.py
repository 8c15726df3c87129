"""Where agents' memories stood when conversations were answered, by digests of the conversations. Pure, and in RAM."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DIGEST_CHARS = 24


@dataclass(frozen=True, slots=True)
class Tip:
    """The point of an agent's memory at which a conversation was answered."""

    agent_id: str
    version: int  # 0: it is not known which
    is_newest: bool
    messages: int = 0  # up to this point; 0: it is not known how many


@dataclass(frozen=True, slots=True)
class Point:
    """A prefix of a conversation: its digest, now and at any time, its number of messages, and the ids of the calls
    that it ends with: clients complete calls, and keep their ids."""

    digest: str
    alike: str
    messages: int
    call_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Digests of a conversation's opening, of each prefix that ends with a reply, and of all its messages, as it is
    and at any time. `session`: of the caller's hint. `names`: of all points but the opening. `call_ids`: the newest
    first."""

    points: Sequence[Point]
    names: Sequence[str]
    call_ids: Sequence[str]
    digest: bytes
    alike: bytes
    messages: int
    session: bytes
    is_exact: bool

    @property
    def opening(self) -> str:
        """What the name of its agent begins with."""
        return self.points[0].alike[:DIGEST_CHARS]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a conversation with this opening and, with the reply, this digest at any time."""

    agent_id: str
    version: int
    opening: str
    alike: str
    call_ids: Sequence[str]  # that the reply made


class KnownAnswers:
    """The answers of one namespace."""

    def __init__(self) -> None:
        self._answers = OrderedDict[str, Answer]()  # by digest, the oldest first
        # The digest of the newest answer: of an agent, of a conversation at any time, and that made a call.
        self._newest: dict[str, str] = {}
        self._alike: dict[str, str] = {}
        self._calls: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, digest: str, answer: Answer) -> None:
        self._forget(digest)  # another agent may have answered the same
        self._answers[digest] = answer
        self._newest[answer.agent_id] = digest
        self._calls |= dict.fromkeys(answer.call_ids, digest)
        if answer.alike != digest:
            self._alike[answer.alike] = digest

    def forget_oldest(self) -> None:
        self._forget(next(iter(self._answers)))

    def _forget(self, digest: str) -> None:
        if (answer := self._answers.pop(digest, None)) is None:
            return
        named = (self._newest, (answer.agent_id,)), (self._alike, (answer.alike,)), (self._calls, answer.call_ids)
        for digests, names in named:
            for name in names:
                if digests.get(name) == digest:  # else a later answer has it
                    del digests[name]

    def tip(self, chain: Chain) -> Tip | None:
        """The longest known prefix that ends with a reply, of equal ones one of this time. Openings do not count."""
        # In one call each: of 5,000 points that nobody knows the loop would take milliseconds.
        known = (self._answers, chain.names), (self._alike, chain.names), (self._calls, chain.call_ids)
        if all(names.keys().isdisjoint(own) for names, own in known):
            return None
        for point in reversed(chain.points[1:]):
            for digest in self._digests(point, chain.points[0]):
                if (answer := self._answers.get(digest)) is not None:
                    is_newest = self._newest.get(answer.agent_id) == digest
                    return Tip(answer.agent_id, answer.version, is_newest, point.messages)
        return None

    def maker_of(self, call_ids: Sequence[str]) -> str:
        """The agent that made the first of these calls that is known; else nothing."""
        made = next(self._made(call_ids), None)
        return self._answers[made].agent_id if made is not None else ""

    def _digests(self, point: Point, opening: Point) -> Iterator[str]:
        """Of the answers that a prefix may end with: as it is, by its calls, and at any time."""
        yield point.digest
        for digest in self._made(point.call_ids):
            newest = self._newest.get(self._answers[digest].agent_id)
            if newest is not None and self._answers[newest].opening == opening.alike:
                yield digest
        yield self._alike.get(point.alike, "")

    def _made(self, call_ids: Sequence[str]) -> Iterator[str]:
        """The answers that made these calls."""
        return (made for call in call_ids if (made := self._calls.get(call)) is not None)
