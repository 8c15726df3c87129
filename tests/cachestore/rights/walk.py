"""A random walk of two honest stores with an engine each, and a peer that lies to both; each of her words is judged."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import AioStoreClient
from kvasir.errors import KvasirError
from kvasir.inference.v1.inference_pb2 import MEMORY_MODE_READ_ONLY

from cachestore_svc.facts.ownership import CLAIM_STEP, MAX_TOLD_GENERATION, OwnerState
from cachestore_svc.pairing.rights import Gives, Takes, Verb
from inference_svc.engine.api import AgentKey
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.judging import HONEST, LIAR, Judge, Seen, ViolationError
from tests.cachestore.rights.lying_store import TOO_FAR
from tests.cachestore.rights.peered import Mac, drained
from tests.cachestore.rights.turn_lies import TurnLies

STEPS = 14
_GIVES, _TAKES = ("read", "move", "claim"), ("nothing", "copy", "move", "move")
_SHORT, _LONG = 2, 80  # tokens of a reply; a turn that is handed over speaks for longer
_WORDS = ("Ada", "Ben", "lamp", "rope", "harbour", "map", "ships", "bag")


@dataclass
class Walk:
    """One walk."""

    judge: Judge
    liars: dict[str, AioStoreClient]  # her programs, by the store at which they call
    chance: random.Random
    counts: Counter[str]
    turns: TurnLies
    moves: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)  # the liar's last, with its generation

    async def go(self) -> None:
        """Raises ViolationError."""
        names = self.judge.names
        for store in HONEST:
            await self.allow(store)
            await self._turn(store, names[0])
        # Half of the walks begin with an agent that its owner once gave to the liar, and most of these with its return.
        one = HONEST[0], names[0]
        back = self.chance.choice((self._claim, self._fetch))
        for deed in (self._give, back)[: self.chance.choice((0, 0, 1, 2, 2))]:
            with contextlib.suppress(KvasirError):
                await deed(*one)
        if self.chance.random() < 0.3:
            await self._offer_in_vain(*one)
        for _ in range(STEPS):
            # Most is about one agent of one store, so that deeds and words meet.
            is_about_one = self.chance.random() < 0.85
            store = HONEST[0] if is_about_one else self.chance.choice(HONEST)
            name = self.chance.choice((names[0], names[2])) if is_about_one else self.chance.choice(names)
            if self.chance.random() < 0.6:
                await self._lie(store, name)
            else:
                await self.live(store, name)
        if self.chance.random() < 0.3:
            await self._compare(*one)
        await self._lie_in_vain(*one)

    # --- the honest ---

    async def live(self, store: str, name: str) -> None:
        """A deed of a store's owner, or what his store does by itself."""
        deeds: Sequence[Callable[[str, str], Awaitable[None]]] = (
            self._turn,
            self._turn,
            self._give,
            self._give,
            self._give_turn,
            self._fetch,
            self._claim,
            self._claim,
            self._ask,
            self._tell,
            self._swap,
            self._swap_turn,
            self._owner_allows,
        )
        deed = self.chance.choice(deeds)
        self.judge.said.append(f"{deed.__name__} of {name} at {store}")
        with contextlib.suppress(KvasirError):
            await deed(store, name)
        await self.judge.quiet()

    async def _offer_in_vain(self, store: str, name: str) -> None:
        """The liar may move agents, is offered one, gives it up, and may only read then, or already before."""
        await self.allow(store, gives="move")
        peer, move_id = self.liars[store], f"{self.chance.getrandbits(64):016x}"
        judged, known = self.judge.judged, self._mac(store).store.owners.of(NS, name).generation
        await judged(store, [name], Verb.OFFER, self._offer(peer, (store, name), move_id, known))
        if self.chance.random() < 0.5:
            await self.allow(store, gives="read")
            began = self.moves.get((store, name), (move_id, 1))
            await judged(store, [name], Verb.HAND_OVER, peer.hand_over_agent(name, *began))
        await judged(store, [name], Verb.UNDO, peer.undo_move(name, move_id))
        await self.allow(store, gives="read")
        generation = self._mac(store).store.owners.of(NS, name).generation
        await judged(store, [name], Verb.FENCE, peer.fence_agent(name, generation + 1, timeout_s=5))
        self.counts["offers in vain"] += 1

    async def _lie_in_vain(self, store: str, name: str) -> None:
        """The liar is removed, in the midst of whatever there was; then the owner claims, and she is paired again."""
        state = self._seen(store, name).state
        self._mac(store).remove(LIAR)
        self.judge.left.add(store)
        for word in (self._lie, self._lie, self._lie, self._lie, self._ask, self._tell):
            await word(store, name)
        with contextlib.suppress(KvasirError):
            await self._claim(store, name)
        if self._seen(store, name).versions and not self._owns(store, name):
            raise ViolationError(f"{name} at {store} is not its owner's again: {self._seen(store, name)}")
        self.judge.left.remove(store)
        self.counts[f"removed while an agent was {state.name}"] += 1
        await self.allow(store)
        for _ in range(2):
            await self._lie(store, name)

    async def _owner_allows(self, store: str, _: str) -> None:
        await self.allow(store)

    async def allow(self, store: str, *, gives: str = "", takes: str = "") -> None:
        if store in self.judge.left:
            return
        gives, takes = gives or self.chance.choice(_GIVES), takes or self.chance.choice(_TAKES)
        self.judge.rights[store] = Gives[gives.upper()], Takes[takes.upper()]
        self._mac(store).allow(LIAR, gives=gives, takes=takes)

    async def _turn(self, store: str, name: str) -> None:
        """It goes on from the agent's newest version, or is refused and changes nothing."""
        before, was = self.judge.newest(store, name), self._seen(store, name)
        asked = self._next(before)
        try:
            await self.judge.players[store].owner.reply(agent_id=name, **asked, sampling=self._sampling(_SHORT))
        finally:
            await self.judge.quiet()
            await self._check_followed(store, name, before, was, asked)
        self.counts["turns"] += 1

    async def _check_followed(
        self, store: str, name: str, before: manifest_pb2.Manifest | None, was: Seen, asked: dict[str, Any]
    ) -> None:
        now, newest = self._seen(store, name), self.judge.newest(store, name)
        if now.versions == was.versions:
            # What could not be stored is tried again later, when nobody expects it.
            await asyncio.wrap_future(self.judge.players[store].served.engine.memories.drop(AgentKey(NS, name)))
            return
        follows = newest is not None and now.versions[1:] == was.versions[: len(now.versions) - 1]
        if not follows or not _follows(before, newest, asked):
            raise ViolationError(f"a turn of {name} at {store} goes on from something else")

    def _next(self, before: manifest_pb2.Manifest | None) -> dict[str, Any]:
        text = " ".join(self.chance.choices(_WORDS, k=2))
        if before is None or before.messages:
            return {"append_messages": [{"role": "user", "content": text}]}
        return {"prompt": f"{before.text} {text}"}

    def _sampling(self, tokens: int) -> dict[str, Any]:
        on = {"logit_bias": {2: -100.0}} if tokens > _SHORT else {}
        return {"max_tokens": tokens, "temperature": 1.0, "seed": self.chance.randrange(1 << 30), **on}

    async def _give(self, store: str, name: str) -> None:
        """To the liar, by the owner's order."""
        if self._owns(store, name):
            self.judge.book(store, name).had_by_liar = True
            await self._mac(store).owner.move_agent(name, to_peer=LIAR, timeout_s=30)
            self.counts["given by the owner"] += 1

    async def _give_turn(self, store: str, name: str) -> None:
        """With a turn that speaks, to the liar, by the owner's order."""
        name = self.chance.choice((name, self.judge.names[4], self.judge.names[4]))
        await self._begun(store, name)
        if self._owns(store, name):
            self.judge.book(store, name).had_by_liar = True
            await self._handed(store, name, LIAR)

    async def _swap_turn(self, store: str, name: str) -> None:
        """With a turn that speaks, between the honest."""
        name = self.judge.names[1]  # of which there is one
        store = next((each for each in HONEST if self._owns(each, name)), store)
        other = next(each for each in HONEST if each != store)
        await self._begun(store, name)
        before, was = self.judge.newest(store, name), self._seen(store, name)
        theirs = self._seen(other, name)
        asked = await self._handed(store, name, other)
        if (now := self._seen(other, name)).versions == theirs.versions:
            await self._check_followed(store, name, before, was, asked)
        elif not _follows(before, self.judge.newest(other, name), asked):
            raise ViolationError(f"{name} came to {other} with another turn: {now}")
        else:
            self.counts["turns handed over between the honest"] += 1

    async def _begun(self, store: str, name: str) -> None:
        """Let the agent have a version: its first turn stays where it is."""
        if not self._seen(store, name).versions:
            await self._turn(store, name)

    async def _handed(self, store: str, name: str, peer: str) -> dict[str, Any]:
        """A turn that is handed over while it speaks. What it was asked."""
        engine, asked = self.judge.players[store].owner, self._next(self.judge.newest(store, name))
        giving: asyncio.Task[object] | None = None
        with contextlib.suppress(KvasirError):
            async for event in engine.generate(agent_id=name, **asked, sampling=self._sampling(_LONG)):
                if event.HasField("delta") and giving is None:
                    giving = asyncio.create_task(engine.hand_over(peer, agent_id=name))
        if giving is not None:
            [outcome] = await asyncio.gather(giving, return_exceptions=True)
            self.counts[f"hand-over to {'the liar' if peer == LIAR else 'the honest'} {_reason(outcome)}"] += 1
        await self.judge.quiet()
        return asked

    async def _fetch(self, store: str, name: str) -> None:
        """From the liar, by the owner's order."""
        self.judge.book(store, name).had_by_liar = True
        await self._mac(store).owner.move_agent(name, from_peer=LIAR, timeout_s=30)
        self.counts["fetched by the owner"] += 1

    async def _swap(self, store: str, name: str) -> None:
        """Between the honest."""
        other = next(each for each in HONEST if each != store)
        await self._mac(store).owner.move_agent(name, from_peer=other, timeout_s=30)
        self.counts["moved between the honest"] += 1

    async def _claim(self, store: str, name: str) -> None:
        if not self._seen(store, name).versions:
            return
        with contextlib.suppress(KvasirError):
            await self._mac(store).owner.claim_agent(name, force=True, timeout_s=30)
        now = self._seen(store, name)
        if now.peer == LIAR and self.judge.rights[store][0] is not Gives.CLAIM:
            raise ViolationError(f"the claim of {name} at {store} was turned round: {now}")
        self.judge.books.pop((store, name), None)
        self.counts["claims"] += 1

    async def _ask(self, store: str, name: str) -> None:
        """The store asks its peers, of whom one lies: that is a word of hers, too."""
        await self.judge.judged(store, self.judge.names, Verb.FENCE, self._mac(store).services.claims.ask())

    async def _tell(self, store: str, name: str) -> None:
        mac = self._mac(store)
        known = mac.store.owners.of(NS, name)
        telling = mac.services.moves._tell(NS, name, replace(known, tells=(LIAR,) if LIAR in known.tells else ()))
        await self.judge.judged(store, self.judge.names, Verb.FENCE, telling)

    async def _compare(self, store: str, name: str) -> None:
        """What is hot goes on as what is stored does, to the token."""
        player, key = self.judge.players[store], AgentKey(NS, name)
        with contextlib.suppress(KvasirError):
            await self._turn(store, name)
        if self._seen(store, name).hot is None:
            return
        asked, sampling = self._next(self.judge.newest(store, name)), self._sampling(_SHORT)
        replies = []
        for _ in range(2):
            with contextlib.suppress(KvasirError):
                reply = await player.owner.reply(
                    agent_id=name, **asked, sampling=sampling, memory_mode=MEMORY_MODE_READ_ONLY
                )
                replies.append((reply.started.prompt_tokens, list(reply.token_ids)))
            await self.judge.quiet()
            await asyncio.wrap_future(player.served.engine.memories.drop(key))
        if len(replies) == 2:
            self.counts["hot as stored"] += 1
            if replies[0] != replies[1]:
                raise ViolationError(f"{name} at {store}, hot and stored: {replies}")

    # --- the liar ---

    async def _lie(self, store: str, name: str) -> None:
        peer, key, mac = self.liars[store], (store, name), self._mac(store)
        move_id, generation = f"{self.chance.getrandbits(64):016x}", self._generation(mac, name)
        if key in self.moves and self.chance.random() < 0.7:
            move_id, generation = self.moves[key]
        verb = self.chance.choice([*Verb, Verb.TURN, Verb.TURN])
        lines = len(mac.audit.of(LIAR))
        match verb:
            case Verb.TURN:
                await self.turns.tell(store, name, self)
                return
            case Verb.OFFER:
                known = mac.store.owners.of(NS, name).generation
                call: Awaitable[object] = self._offer(
                    peer, key, move_id, self.chance.choice((known, known, generation))
                )
            case Verb.HAND_OVER:
                call = peer.hand_over_agent(name, move_id, max(generation, 1))
            case Verb.UNDO:
                call = peer.undo_move(name, move_id)
            case Verb.FENCE:
                call = peer.fence_agent(name, max(generation, 1), timeout_s=5)
            case Verb.COPY:
                await self.have(name)
                call = drained(peer.pulling_agent("", name, only_bytes=self.chance.random() < 0.2))
            case Verb.MOVE:
                await self.have(name)
                await self.bring(store, name, "")
                return
        await self._said(store, name, verb, lines, call)

    async def _said(self, store: str, name: str, verb: Verb, lines: int, call: Awaitable[object]) -> str:
        outcome = await self.judge.judged(store, [name], verb, call)
        await self.judge.audited(self._mac(store).audit, lines, verb.name, outcome)
        self.counts[f"{verb.name} {outcome}"] += 1
        return outcome

    async def bring(self, store: str, name: str, move_id: str) -> str:
        """The liar moves an agent there. How it ended."""
        call = drained(self.liars[store].moving_agent(name, move_id=move_id))
        return await self._said(store, name, Verb.MOVE, len(self._mac(store).audit.of(LIAR)), call)

    async def _offer(self, peer: AioStoreClient, key: tuple[str, str], move_id: str, generation: int) -> None:
        answer = await peer.offer_agent(key[1], move_id, generation)
        self.moves[key] = move_id, int(answer.generation)

    def _generation(self, mac: Mac, name: str) -> int:
        known = mac.store.owners.of(NS, name).generation
        return self.chance.choice((0, known, known + 1, known + CLAIM_STEP, known + TOO_FAR, MAX_TOLD_GENERATION))

    async def have(self, name: str) -> None:
        """The liar has something of that name, and says that it is its owner."""
        if (newest := self.judge.newest(LIAR, name)) is not None and self.chance.random() < 0.5:
            return
        engine, asked = self.judge.players[LIAR].owner, self._next(newest)
        with contextlib.suppress(KvasirError):
            await engine.reply(agent_id=name, **asked, sampling=self._sampling(_SHORT))
        await self.judge.quiet()

    def _owns(self, store: str, name: str) -> bool:
        seen = self._seen(store, name)
        return bool(seen.versions) and seen.state is OwnerState.OWNED

    def _mac(self, store: str) -> Mac:
        return self.judge.stores[store]

    def _seen(self, store: str, name: str) -> Seen:
        return self.judge.seen(store)[name]


def _follows(before: manifest_pb2.Manifest | None, newest: manifest_pb2.Manifest | None, asked: dict[str, Any]) -> bool:
    """Whether a memory is another one and what was asked, with a reply."""
    if newest is None:
        return False
    if "prompt" in asked:
        return newest.text.startswith(asked["prompt"])
    old = [(each.role, each.content) for each in before.messages] if before is not None else []
    new = [(each.role, each.content) for each in newest.messages]
    return new[:-1] == [*old, ("user", asked["append_messages"][0]["content"])] and new[-1][0] == "assistant"


def _reason(outcome: object) -> str:
    return outcome.reason if isinstance(outcome, KvasirError) else "OK" if outcome is not None else "nothing"
