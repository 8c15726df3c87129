"""Judges words of a peer that lies: what became of each agent at the honest stores and engines, against the table.

What an agent has to do with the liar is known by the walk's own book, not by the stores'.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import KvasirError, NotFound
from kvasir.formats.digest import Digest
from kvasir.names import RESERVED_PREFIXES

from cachestore_svc.facts.ownership import CLAIM_STEP, MAX_UNHEARD_CLAIMS, OwnerState
from cachestore_svc.facts.records import LineQuery, SnapshotVersion
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.pairing.rights import EFFECTS, NEEDS, Bond, Gives, Takes, Verb
from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.turns.progress import TurnPhase
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.engines import Player
from tests.cachestore.rights.peered import Lines, Mac

LIAR, HONEST = "mallory", ("ada", "ben")
BRINGING = (Verb.COPY, Verb.MOVE)
# What is UNAVAILABLE may have got some of what it asked for.
_FAILURES = ("PEER_UNAVAILABLE", "PEER_FAILED", "AGENT_HELD_ELSEWHERE", "MEMORY_UNREADABLE")
_LATE_S = 10.0


class ViolationError(Exception):
    """A word of the liar had an effect that nobody allowed, or left no line in the audit."""


@dataclass(frozen=True)
class Hot:
    """What an engine's next turn of an agent would go on from, if it is hot."""

    tokens: tuple[int, ...]
    text: str = ""
    version: int = 0
    is_brought: bool = False
    settings: object = None


@dataclass(frozen=True)
class Seen:
    """Of one agent at one store: what is known of its owner, its versions, and what its engine has hot."""

    state: OwnerState = OwnerState.OWNED
    generation: int = 0
    peer: str = ""
    versions: tuple[str, ...] = ()
    is_liars: bool = False  # the newest version is what the liar gave
    hot: Hot | None = None


@dataclass
class Book:
    """What the walk knows of an agent at a store by itself."""

    had_by_liar: bool = False
    offered_to_liar: bool = False


@dataclass
class Judge:
    """Looks at every agent of a walk before and after each word."""

    stores: Mapping[str, Mac]
    players: Mapping[str, Player]
    names: Sequence[str]
    counts: Counter[str]
    books: dict[tuple[str, str], Book] = field(default_factory=dict)
    rights: dict[str, tuple[Gives, Takes]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)  # stores that have removed the liar

    async def judged(
        self, store: str, names: Sequence[str], verb: Verb, call: Awaitable[object], *, is_due: bool = False
    ) -> str:
        """Do it, and see what became of every agent of both honest sides. `is_due`: a turn has come with its agent.
        Raises ViolationError.
        """
        before = self.all_seen()
        self.said.append(f"{verb.name} of {names} at {store}")
        outcome = "OK"
        try:
            await call
        except KvasirError as error:
            outcome = error.reason
        await self.quiet()
        after = self.all_seen()
        for key, was in before.items():
            is_meant = key[0] == store and key[1] in names
            if replace(now := after[key], hot=was.hot) != was:
                if store in self.left:
                    raise ViolationError(f"{verb.name} at {key}, of a peer that was removed: {was} to {now}")
                self._check(verb, key, was, now, is_meant=is_meant, is_due=is_due)
            if now.hot not in (was.hot, None) and not (is_due and is_meant):
                raise ViolationError(f"{verb.name} at {key} changed what is hot: {was} to {now}")
        return outcome

    def _check(self, verb: Verb, key: tuple[str, str], was: Seen, now: Seen, *, is_meant: bool, is_due: bool) -> None:
        if verb is Verb.OFFER and now.state is OwnerState.MOVED:
            verb = Verb.FENCE  # an offer that knows a newer owner is one
        book, (gives, takes) = self.book(*key), self.rights[key[0]]
        has_part = book.had_by_liar or (book.offered_to_liar and gives >= Gives.MOVE)
        is_named = was.peer == LIAR and (has_part or verb is not Verb.HAND_OVER)  # its right may be lowered since
        bond = Bond.NAMED if is_named else Bond.HAD if has_part else Bond.NONE
        problem = ""
        if not is_meant:
            problem = "another agent changed"
        elif verb is Verb.TURN and not (is_due and now.versions[1:] == was.versions[: len(now.versions) - 1]):
            problem = "a turn came without its agent"
        elif was.versions != now.versions and verb not in (*BRINGING, Verb.TURN):
            problem = "a word changed memories"
        elif was.versions and verb in BRINGING and not (was.is_liars or bond is Bond.NAMED):
            problem = "what somebody else made was replaced"
        elif now.generation // CLAIM_STEP > was.generation // CLAIM_STEP + MAX_UNHEARD_CLAIMS + 1:
            problem = "more claims than can have been made"  # one may be this side's own
        elif verb in BRINGING and key[1].startswith(RESERVED_PREFIXES) and bond is not Bond.NAMED:
            problem = "it came under a name of Kvasir's own"
        elif verb is Verb.FENCE and gives is Gives.CLAIM and was.generation:
            problem = ""
        elif bond < EFFECTS[verb].get(was.state, Bond.NAMED + 1):
            problem = f"of an agent that is {was.state.name} and has the bond {bond.name}"
        elif (needs := NEEDS.get(verb)) is not None and bond is not Bond.NAMED:
            problem = "without the right" if (gives if isinstance(needs, Gives) else takes) < needs else ""
        if problem:
            raise ViolationError(f"{verb.name} at {key}: {problem}: {was} to {now}")
        book.offered_to_liar |= verb is Verb.OFFER
        book.had_by_liar |= (now.peer == LIAR and verb is not Verb.OFFER) or verb in BRINGING
        self.counts[f"{verb.name} took effect"] += 1

    async def audited(self, lines: Lines, before: int, what: str, outcome: str) -> None:
        """Raises ViolationError unless the audit says how the call ended; its line may come after the answer."""
        wanted = ("allowed", "") if outcome == "OK" else ("refused", outcome)
        for _ in range(int(_LATE_S / 0.001)):
            found = [(line["outcome"], line["reason"]) for line in lines.of(LIAR)[before:]]
            if wanted in found or (outcome in _FAILURES and ("failed", outcome) in found):
                return
            await asyncio.sleep(0.001)
        raise ViolationError(f"{what} ended as {outcome}, and the audit says {found}")

    async def quiet(self) -> None:
        """Wait until no turn runs, and none is being stored. One that waits for the liar's last word does not run."""
        for player in self.players.values():
            running, lines = player.served.turns._running, player.served.lines[NS]._lines
            give_up = asyncio.get_running_loop().time() + 60
            while any(turn.phase is not TurnPhase.HELD for turn in running.values()) or any(
                line.publications.running for line in lines.values()
            ):
                if asyncio.get_running_loop().time() > give_up:
                    raise ViolationError(f"a turn at {player.place.name} does not end")
                await asyncio.sleep(0.001)

    def all_seen(self) -> dict[tuple[str, str], Seen]:
        return {(store, name): seen for store in HONEST for name, seen in self.seen(store).items()}

    def seen(self, store: str) -> dict[str, Seen]:
        """In one operation of the index: a walk looks often."""

        def read(view: CatalogView) -> dict[str, Seen]:
            return {name: _seen(view, name, self._hot(store, name)) for name in self.names}

        return self.stores[store].store._core.catalog.read(NS, read)

    def _hot(self, store: str, name: str) -> Hot | None:
        engine = self.players[store].served.engine
        if (
            AgentKey(NS, name) not in engine.memories.sizes()
            or (found := engine.memories.get(AgentKey(NS, name))) is None
        ):
            return None
        tag, tokens = found.tag, tuple(found.state.token_ids)
        if not isinstance(tag, AgentMemory):
            return Hot(tokens)
        return Hot(tokens, tag.transcript.text, tag.publication.standing.version, tag.is_brought, tag.settings)

    def newest_digest(self, store: str, name: str) -> Digest | None:
        """Of the agent's newest version there."""
        versions = self.stores[store].store._core.catalog.read(NS, lambda view: _versions(view, name))
        return versions[0].manifest if versions else None

    def newest(self, store: str, name: str) -> manifest_pb2.Manifest | None:
        """The manifest of the agent's newest version there."""
        digest = self.newest_digest(store, name)
        blobs = self.stores[store].store.blobs
        return manifest_pb2.Manifest.FromString(bytes(blobs.read(NS, digest))) if digest is not None else None

    def book(self, store: str, name: str) -> Book:
        return self.books.setdefault((store, name), Book())


def _seen(view: CatalogView, name: str, hot: Hot | None) -> Seen:
    known, versions = view.ownership_of(name), _versions(view, name)
    is_liars = bool(versions) and versions[0].origin_detail.startswith(f"{LIAR}/")
    found = tuple(each.manifest.hash for each in versions)
    return Seen(known.state, known.generation, known.peer, found, is_liars, hot)


def _versions(view: CatalogView, name: str) -> Sequence[SnapshotVersion]:
    try:
        return view.snapshots_after(LineQuery(name), 1 << 40, "", 100)
    except NotFound:
        return []
