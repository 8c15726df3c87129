"""Random walks of two honest stores and a peer that lies; each word's effect is compared with the table of rights.

`python -m tests.cachestore.rights.walk` is the campaign. What an agent has to do with the liar is known by the walk's
own book, not by the stores'.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import AioStoreClient
from kvasir.errors import FailedPrecondition, KvasirError, NotFound
from kvasir.names import RESERVED_PREFIXES

from cachestore_svc.facts.ownership import CLAIM_STEP, MAX_TOLD_GENERATION, MAX_UNHEARD_CLAIMS, OwnerState
from cachestore_svc.facts.records import LineQuery
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.pairing.rights import EFFECTS, NEEDS, Bond, Gives, Takes, Verb
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.peered import Mac, macs
from tests.made_models.synthetic import SMALL, SyntheticAgent

LIAR, HONEST = "mallory", ("ada", "ben")
STEPS = 14
_TOO_FAR = (MAX_UNHEARD_CLAIMS + 1) * CLAIM_STEP
_STORES_LAST = 100  # walks: facts of each walk's agents stay in the stores
_GIVES, _TAKES = ("read", "move", "claim"), ("nothing", "copy", "move")
_BRINGING = (Verb.COPY, Verb.MOVE)
_FAILURES = ("PEER_UNAVAILABLE", "PEER_FAILED")  # what is UNAVAILABLE may have got some of what it asked for


class ViolationError(Exception):
    """A word of the liar had an effect that nobody allowed, or left no line in the audit."""


@dataclass(frozen=True)
class Seen:
    """Of one agent at one store: what is known of its owner, and its versions."""

    state: OwnerState = OwnerState.OWNED
    generation: int = 0
    peer: str = ""
    versions: tuple[str, ...] = ()
    is_liars: bool = False  # the newest version is what the liar gave


@dataclass
class Book:
    """What the walk knows of an agent at a store by itself."""

    had_by_liar: bool = False
    offered_to_liar: bool = False


@dataclass
class Walk:
    """One walk."""

    stores: dict[str, Mac]
    liars: dict[str, AioStoreClient]  # her programs, by the store at which they call
    chance: random.Random
    number: int
    counts: Counter[str]
    books: dict[tuple[str, str], Book] = field(default_factory=dict)
    rights: dict[str, tuple[Gives, Takes]] = field(default_factory=dict)
    moves: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)  # the liar's last, with its generation
    said: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [f"{self.number}-work", f"{self.number}-other", f"conversation/{self.number}", f"{self.number}-new"]

    async def go(self) -> None:
        """Raises ViolationError."""
        for mac in (self.stores[each] for each in HONEST):
            await self._allow(mac)
            await self._turn(mac, self.names[0])
        # Half of the walks begin with an agent that its owner once gave to the liar, and most of these with a claim.
        one = self.stores[HONEST[0]], self.names[0]
        for deed in (self._give, self._claim)[: self.chance.choice((0, 0, 1, 2, 2))]:
            with contextlib.suppress(KvasirError):
                await deed(*one)
        if self.chance.random() < 0.3:
            await self._offer_in_vain(*one)
        for _ in range(STEPS):
            # Most is about one agent of one store, so that deeds and words meet.
            is_about_one = self.chance.random() < 0.85
            mac = self.stores[HONEST[0] if is_about_one else self.chance.choice(HONEST)]
            name = (
                self.chance.choice((self.names[0], self.names[2])) if is_about_one else self.chance.choice(self.names)
            )
            if self.chance.random() < 0.6:
                await self._lie(mac, name)
            else:
                await self._live(mac, name)

    # --- the honest ---

    async def _live(self, mac: Mac, name: str) -> None:
        """A deed of a store's owner, or what his store does by itself."""
        deeds: Sequence[Callable[[Mac, str], Awaitable[None]]] = (
            self._turn,
            self._give,
            self._give,
            self._fetch,
            self._claim,
            self._claim,
            self._ask,
            self._tell,
            self._swap,
            self._allow,
        )
        with contextlib.suppress(KvasirError):
            await self.chance.choice(deeds)(mac, name)

    async def _offer_in_vain(self, mac: Mac, name: str) -> None:
        """The liar may move agents, is offered one, gives it up, and may only read then."""
        await self._allow(mac, gives="move")
        peer, move_id = self.liars[mac.name], f"{self.chance.getrandbits(64):016x}"
        await self._judged(mac, [name], Verb.OFFER, self._offer(peer, (mac.name, name), move_id, 0))
        await self._judged(mac, [name], Verb.UNDO, peer.undo_move(name, move_id))
        await self._allow(mac, gives="read")
        generation = mac.store.owners.of(NS, name).generation
        await self._judged(mac, [name], Verb.FENCE, peer.fence_agent(name, generation + 1, timeout_s=5))
        self.counts["offers in vain"] += 1

    async def _allow(self, mac: Mac, _: str = "", gives: str = "") -> None:
        gives, takes = gives or self.chance.choice(_GIVES), self.chance.choice(_TAKES)
        self.rights[mac.name] = Gives[gives.upper()], Takes[takes.upper()]
        mac.allow(LIAR, gives=gives, takes=takes)

    async def _turn(self, mac: Mac, name: str) -> None:
        head = await _head(mac, name)
        agent = SyntheticAgent(SMALL, self.chance.randrange(1 << 30))
        await mac.publish(name, agent.turn(20), head)
        self.counts["turns"] += 1

    async def _give(self, mac: Mac, name: str) -> None:
        """To the liar, by the owner's order."""
        book = self._book(mac, name)
        before = _look(mac, [name])[name]
        if before.versions and before.state is OwnerState.OWNED:
            book.had_by_liar = True
            await mac.owner.move_agent(name, to_peer=LIAR, timeout_s=10)
            self.counts["given by the owner"] += 1

    async def _fetch(self, mac: Mac, name: str) -> None:
        """From the liar, by the owner's order."""
        self._book(mac, name).had_by_liar = True
        await mac.owner.move_agent(name, from_peer=LIAR, timeout_s=10)
        self.counts["fetched by the owner"] += 1

    async def _swap(self, mac: Mac, name: str) -> None:
        """Between the honest."""
        other = next(each for each in HONEST if each != mac.name)
        await mac.owner.move_agent(name, from_peer=other, timeout_s=10)
        self.counts["moved between the honest"] += 1

    async def _claim(self, mac: Mac, name: str) -> None:
        if not _look(mac, [name])[name].versions:
            return
        with contextlib.suppress(KvasirError):
            await mac.owner.claim_agent(name, force=True, timeout_s=10)
        now = _look(mac, [name])[name]
        if now.peer == LIAR and self.rights[mac.name][0] is not Gives.CLAIM:
            raise ViolationError(f"the claim of {name} at {mac.name} was turned round: {now}; {self.said[-6:]}")
        self.books.pop((mac.name, name), None)
        self.counts["claims"] += 1

    async def _ask(self, mac: Mac, name: str) -> None:
        """The store asks its peers, of whom one lies: that is a word of hers, too."""
        await self._judged(mac, self.names, Verb.FENCE, mac.services.claims.ask())

    async def _tell(self, mac: Mac, name: str) -> None:
        known = mac.store.owners.of(NS, name)
        telling = mac.services.moves._tell(NS, name, replace(known, tells=(LIAR,) if LIAR in known.tells else ()))
        await self._judged(mac, self.names, Verb.FENCE, telling)

    # --- the liar ---

    async def _lie(self, mac: Mac, name: str) -> None:
        peer, key = self.liars[mac.name], (mac.name, name)
        move_id, generation = f"{self.chance.getrandbits(64):016x}", self._generation(mac, name)
        if key in self.moves and self.chance.random() < 0.7:
            move_id, generation = self.moves[key]
        verb = self.chance.choice([verb for verb in Verb if verb is not Verb.TURN])
        lines = len(mac.audit.of(LIAR))
        match verb:
            case Verb.OFFER:
                call: Awaitable[object] = self._offer(peer, key, move_id, self.chance.choice((0, generation)))
            case Verb.HAND_OVER:
                call = peer.hand_over_agent(name, move_id, max(generation, 1))
            case Verb.UNDO:
                call = peer.undo_move(name, move_id)
            case Verb.FENCE:
                call = peer.fence_agent(name, max(generation, 1), timeout_s=5)
            case Verb.COPY:
                await self._have(name)
                call = _drained(peer.pulling_agent("", name, only_bytes=self.chance.random() < 0.2))
            case Verb.MOVE:
                await self._have(name)
                call = _drained(peer.moving_agent(name))
        outcome = await self._judged(mac, [name], verb, call)
        await self._audited(mac, lines, verb, outcome)
        self.counts[f"{verb.name} {outcome}"] += 1

    async def _audited(self, mac: Mac, before: int, verb: Verb, outcome: str) -> None:
        """Raises ViolationError unless the audit says how the call ended; its line may come after the answer."""
        wanted = ("allowed", "") if outcome == "OK" else ("refused", outcome)
        for _ in range(1000):
            found = [(line["outcome"], line["reason"]) for line in mac.audit.of(LIAR)[before:]]
            if wanted in found or (outcome in _FAILURES and ("failed", outcome) in found):
                return
            await asyncio.sleep(0.001)
        raise ViolationError(f"{verb.name} ended as {outcome}, and the audit says {found}")

    async def _offer(self, peer: AioStoreClient, key: tuple[str, str], move_id: str, generation: int) -> None:
        answer = await peer.offer_agent(key[1], move_id, generation)
        self.moves[key] = move_id, int(answer.generation)

    def _generation(self, mac: Mac, name: str) -> int:
        known = mac.store.owners.of(NS, name).generation
        return self.chance.choice((0, known, known + 1, known + CLAIM_STEP, known + _TOO_FAR, MAX_TOLD_GENERATION))

    async def _have(self, name: str) -> None:
        """The liar has something of that name, and says that it is its owner."""
        with contextlib.suppress(KvasirError):
            await self._turn_of_liar(name)

    async def _turn_of_liar(self, name: str) -> None:
        liar = self.stores[LIAR]
        agent = SyntheticAgent(SMALL, self.chance.randrange(1 << 30))
        await liar.publish(name, agent.turn(20), await _head(liar, name))

    # --- judging ---

    async def _judged(self, mac: Mac, names: Sequence[str], verb: Verb, call: Awaitable[object]) -> str:
        """Do it, and see what became of every agent of both honest stores. Raises ViolationError."""
        before = self._all_seen()
        self.said.append(f"{verb.name} of {names} at {mac.name}")
        outcome = "OK"
        try:
            await call
        except KvasirError as error:
            outcome = error.reason
        after = self._all_seen()
        for key, was in before.items():
            if after[key] != was:
                self._check(verb, key, was, after[key], is_meant=key[0] == mac.name and key[1] in names)
        return outcome

    def _check(self, verb: Verb, key: tuple[str, str], was: Seen, now: Seen, *, is_meant: bool) -> None:
        if verb is Verb.OFFER and now.state is OwnerState.MOVED:
            verb = Verb.FENCE  # an offer that knows a newer owner is one
        book, (gives, takes) = self._book(self.stores[key[0]], key[1]), self.rights[key[0]]
        has_part = book.had_by_liar or (book.offered_to_liar and gives >= Gives.MOVE)
        bond = Bond.NAMED if was.peer == LIAR else Bond.HAD if has_part else Bond.NONE
        problem = ""
        if not is_meant:
            problem = "another agent changed"
        elif was.versions != now.versions and verb not in _BRINGING:
            problem = "a word changed memories"
        elif was.versions and verb in _BRINGING and not (was.is_liars or bond is Bond.NAMED):
            problem = "what somebody else made was replaced"
        elif now.generation // CLAIM_STEP > was.generation // CLAIM_STEP + MAX_UNHEARD_CLAIMS + 1:
            problem = "more claims than can have been made"  # one may be this side's own
        elif verb in _BRINGING and key[1].startswith(RESERVED_PREFIXES) and bond is not Bond.NAMED:
            problem = "it came under a name of Kvasir's own"
        elif verb is Verb.FENCE and gives is Gives.CLAIM and was.generation:
            problem = ""
        elif bond < EFFECTS[verb].get(was.state, Bond.NAMED + 1):
            problem = f"of an agent that is {was.state.name} and has the bond {bond.name}"
        elif (needs := NEEDS.get(verb)) is not None and bond is not Bond.NAMED:
            problem = "without the right" if (gives if isinstance(needs, Gives) else takes) < needs else ""
        if problem:
            raise ViolationError(f"{verb.name} at {key}: {problem}: {was} to {now}; {self.said[-6:]}")
        book.offered_to_liar |= verb is Verb.OFFER
        book.had_by_liar |= (now.peer == LIAR and verb is not Verb.OFFER) or verb in _BRINGING
        self.counts[f"{verb.name} took effect"] += 1

    def _all_seen(self) -> dict[tuple[str, str], Seen]:
        looked = {store: _look(self.stores[store], self.names) for store in HONEST}
        return {(store, name): seen for store, found in looked.items() for name, seen in found.items()}

    def _book(self, mac: Mac, name: str) -> Book:
        return self.books.setdefault((mac.name, name), Book())


class Lies:
    """What the liar's store says of itself: that it owns everything, in any generation, and knows newer owners."""

    def __init__(self, mac: Mac, chance: random.Random, counts: Counter[str]) -> None:
        agents, moving = mac.services.agents, mac.services.moving
        get_agent, fence, hand_over = agents.GetAgent, moving.FenceAgent, moving.HandOverAgent

        async def boast(request: Any, context: Any) -> pb.GetAgentResponse:
            answer = await get_agent(request, context)
            if chance.random() < 0.7:
                counts["lies about owners"] += 1
                answer.agent.ownership.state = pb.OWNER_STATE_OWNED
                answer.agent.ownership.generation = chance.choice((1, 3 * CLAIM_STEP, _TOO_FAR, MAX_TOLD_GENERATION))
            return answer

        async def know_better(request: Any, context: Any) -> pb.FenceAgentResponse:
            if chance.random() < 0.7:
                counts["lies about newer owners"] += 1
                newer = str(request.generation + chance.choice((1, CLAIM_STEP, _TOO_FAR, 1 << 62)))
                said = {"generation": chance.choice((newer, newer, "", "-1", "9" * 5000, "many"))}
                raise FailedPrecondition("newer", reason="OWNER_NEWER", metadata=said)
            return await fence(request, context)

        async def deny(request: Any, context: Any) -> pb.HandOverAgentResponse:
            if chance.random() < 0.3:
                raise FailedPrecondition("never heard of it", reason="MOVE_UNKNOWN")
            return await hand_over(request, context)

        agents.GetAgent, moving.FenceAgent, moving.HandOverAgent = boast, know_better, deny  # type: ignore[method-assign]


async def walks(root: Path, numbers: Sequence[int], counts: Counter[str]) -> None:
    """So many walks over fresh stores. Raises ViolationError, with the walk's number."""
    async with contextlib.AsyncExitStack() as exits:
        made = await exits.enter_async_context(macs(*HONEST, LIAR, root=root))
        stores = {mac.name: mac for mac in made}
        for name in HONEST:
            other = next(each for each in HONEST if each != name)
            stores[name].allow(other, gives="claim", takes="move")
            stores[LIAR].allow(name, gives="claim", takes="move")
        liars = {name: await exits.enter_async_context(stores[name].as_peer(LIAR)) for name in HONEST}
        chance = random.Random(numbers[0])
        Lies(stores[LIAR], chance, counts)
        for number in numbers:
            for name in HONEST:  # a walk is about rights, not about how many words an hour has
                stores[name].services.moving._handing_over._limits._buckets.clear()
            try:
                await Walk(stores, liars, random.Random(number), number, counts).go()
            except ViolationError as error:
                raise ViolationError(f"walk {number}: {error}") from None
            counts["walks"] += 1


def _look(mac: Mac, names: Sequence[str]) -> dict[str, Seen]:
    """In one operation of the index: a walk looks often."""

    def read(view: CatalogView) -> dict[str, Seen]:
        return {name: _seen(view, name) for name in names}

    return mac.store._core.catalog.read(NS, read)


def _seen(view: CatalogView, name: str) -> Seen:
    known = view.ownership_of(NS, name)
    try:
        versions = view.snapshots_after(LineQuery(NS, name), 1 << 40, "", 100)
    except NotFound:
        versions = []
    is_liars = bool(versions) and versions[0].origin_detail.startswith(f"{LIAR}/")
    return Seen(known.state, known.generation, known.peer, tuple(each.manifest.hash for each in versions), is_liars)


async def _head(mac: Mac, name: str) -> int:
    try:
        agent = await asyncio.to_thread(mac.store.agents.get, NS, name)
    except NotFound:
        return 0
    return agent.lines[0].version


async def _drained(steps: Any) -> None:
    async for _ in steps:
        pass


def walk_on(root: Path, first: int, count: int) -> Counter[str]:
    """So many walks, over stores that are renewed now and then; says how far it is."""
    counts, began = Counter[str](), time.monotonic()
    for begin in range(first, first + count, _STORES_LAST):
        with tempfile.TemporaryDirectory(prefix="walk", dir=root) as folder:
            asyncio.run(walks(Path(folder) / "w", range(begin, min(begin + _STORES_LAST, first + count)), counts))
        print(f"{counts['walks']} walks, {time.monotonic() - began:.0f} s", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the stores lie")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for name, count in sorted(walk_on(given.directory, given.first, given.walks).items()):
        print(f"{count:8} {name}")


if __name__ == "__main__":
    main()
