"""What a peer that lies says to engines: turns of no move, of an old one, of others; and what it hears."""

import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir.clients import AioInferenceClient
from kvasir.clients.aio.turn_peer import AioTurnPeer, TurnCall
from kvasir.errors import KvasirError, Unavailable
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.inference.v1 import handover_pb2_grpc, inference_pb2

from cachestore_svc.pairing.rights import Verb
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.engines import ELSEWHERE
from tests.cachestore.rights.judging import LIAR, Judge, ViolationError
from tests.inference.handover.test_taking import PROMPT, plain_opening, stand

Parts = list[pb.TakeTurnRequest]
_KEPT = 20
_HOW = ("of no move", "of an old move", "with its agent", "with its agent", "after its agent", "not kept", "replayed")
_GIFTS = {"with its agent": 3, "after its agent": 5}  # agents that nobody but the liar has at first


class Listener(handover_pb2_grpc.HandOverServiceServicer):  # type: ignore[misc]
    """The liar's engine. It keeps every turn that it is given whole, and answers as it likes."""

    def __init__(self, chance: random.Random) -> None:
        self.heard: deque[Parts] = deque(maxlen=_KEPT)
        self._chance = chance

    async def TakeTurn(self, parts: AsyncIterator[pb.TakeTurnRequest], context: Any) -> None:  # noqa: N802 - gRPC names it
        how = self._chance.choice(("takes", "takes", "takes", "refuses", "leaves", "leaves at the end", "is early"))
        heard: Parts = []
        files, stands = 0, 0
        async for part in parts:
            heard.append(part)
            kind = part.WhichOneof("part")
            files += kind == "stand" and part.stand.files
            files -= kind == "file"
            stands += kind == "stand"
            has_all = stands and not files and _has_its_bytes(heard)
            if kind == "opening":
                if how == "refuses":
                    raise Unavailable("not today")
                await context.write(pb.TakeTurnResponse(opened=pb.TurnOpened()))
            elif has_all and kind != "commit":
                self.heard.append(heard)
                if how == "leaves":
                    return
                if how == "is early":
                    await context.write(pb.TakeTurnResponse(taken=pb.TurnTaken()))
                await context.write(pb.TakeTurnResponse(prepared=pb.TurnPrepared(resume_token="mine")))
            if kind == "commit":
                if how != "leaves at the end":
                    await context.write(pb.TakeTurnResponse(taken=pb.TurnTaken()))
                return


def _has_its_bytes(heard: Parts) -> bool:
    """Whether the last file has come whole."""
    missing = 0
    for part in heard:
        kind = part.WhichOneof("part")
        missing = part.file.digest.size_bytes if kind == "file" else missing - len(part.frame)
    return missing <= 0


@dataclass
class Lie:
    """A turn that the liar gives to an engine."""

    how: str
    parts: Parts  # an opening, and what follows until everything is there
    meanwhile: str = ""  # before its last word
    token: str = LIAR

    @property
    def opening(self) -> pb.TurnOpening:
        return self.parts[0].opening


class Beside(Protocol):
    """What happens beside the liar's turns."""

    async def live(self, store: str, name: str) -> None:
        """The store's owner does something, perhaps with the agent."""

    async def allow(self, store: str, *, takes: str) -> None:
        """The store's owner gives the liar this right."""

    async def have(self, name: str) -> None:
        """The liar makes a version of the agent."""

    async def bring(self, store: str, name: str, move_id: str) -> str:
        """The liar moves it to the store by a move of this id. How that ended."""


@dataclass
class TurnLies:
    """All that the liar says to engines in one walk."""

    judge: Judge
    chance: random.Random
    counts: Counter[str]
    listener: Listener
    links: dict[tuple[str, str], AioTurnPeer]  # by engine and token
    callers: dict[str, AioInferenceClient]  # with her token, by engine
    move_ids: list[str] = field(default_factory=list)

    async def tell(self, store: str, name: str, beside: Beside) -> None:
        """Give a turn of this agent to the engine of this store. Raises ViolationError."""
        if self.chance.random() < 0.1:
            await self._call(store, name)
            return
        how = self.chance.choice(_HOW)
        if how in _GIFTS and self.chance.random() < 0.8:
            name = self.judge.names[_GIFTS[how]]
        lie = await self._made(store, name, how, beside)
        player, judge = self.judge.players[store], self.judge
        lines = len(player.audit.of(lie.token))
        call = self.links[store, lie.token].take_turn()
        self.judge.said.append(f"{lie.how} turn, {lie.meanwhile}")
        outcome = await judge.judged(store, [], Verb.TURN, _until_prepared(call, lie.parts))
        is_due = False
        if outcome == "OK":
            is_due = await self._meanwhile(store, name, lie, beside)
            outcome = await judge.judged(store, [name], Verb.TURN, _to_its_end(call), is_due=is_due)
        call.close()
        if lie.token == LIAR:
            await judge.audited(player.audit, lines, f"TURN ({lie.how})", outcome)
        self.counts[f"TURN {lie.how} {outcome}"] += 1
        if is_due and outcome == "OK":
            self.counts["TURN came with its agent"] += 1

    async def _meanwhile(self, store: str, name: str, lie: Lie, beside: Beside) -> bool:
        """What happens before the last word. Whether the turn has come with its agent then."""
        if lie.meanwhile == "a deed":
            await beside.live(store, name)
        if lie.meanwhile not in ("its move", "another move"):
            return False
        move_id = lie.opening.move_id if lie.meanwhile == "its move" else self._new_id()
        self.move_ids.append(move_id)
        before = self.judge.seen(store)[name]
        outcome = await beside.bring(store, name, move_id)
        now = self.judge.seen(store)[name]
        has_come = outcome == "OK" and now.generation > before.generation
        is_right = lie.meanwhile == "its move" and lie.token == LIAR and lie.opening.request.agent_id == name
        return has_come and is_right and now.versions[0] == lie.opening.parent_manifest.hash

    async def _made(self, store: str, name: str, how: str, beside: Beside) -> Lie:
        if how == "replayed" and self.listener.heard:
            return self._replayed(store, name, self.chance.choice(self.listener.heard))
        token = LIAR if self.chance.random() < 0.9 else f"{LIAR}-{ELSEWHERE}"
        if how == "with its agent":
            await beside.have(name)
            if self.chance.random() < 0.7:
                await beside.allow(store, takes="move")
            parent = self._parent(LIAR if self.chance.random() < 0.9 else store, name)
            parts = self._opened(store, name, parent, self._new_id())
            meanwhile = self.chance.choice((*["its move"] * 5, *["another move"] * 3, "a deed", ""))
            return Lie(how, parts, meanwhile, token)
        if how == "after its agent":
            self.move_ids.append(self._new_id())
            await beside.have(name)
            await beside.allow(store, takes="move")
            await beside.bring(store, name, self.move_ids[-1])
            return Lie(how, self._opened(store, name, self._parent(store, name), self.move_ids[-1]))
        is_old, parent = how == "of an old move", self._parent(store, name)
        move_id = self._known_id(store, name) if is_old else self._new_id()
        parts = self._opened(store, name, parent, move_id, **self._settings())
        if how == "not kept":
            if self.chance.random() < 0.5:
                parts[0].opening.request.memory_mode = inference_pb2.MEMORY_MODE_READ_ONLY
            else:
                parts[0].opening.continuation = inference_pb2.CONTINUATION_BRANCHED
        return Lie(how, parts, self.chance.choice(("", "", "", "a deed", "its move", "another move")), token)

    def _parent(self, store: str, name: str) -> Digest | None:
        """The agent's newest version at that store, mostly."""
        return self.judge.newest_digest(store, name) if self.chance.random() < 0.9 else Digest.of(b"another")

    def _replayed(self, store: str, name: str, heard: Parts) -> Lie:
        """What an honest engine once gave to the liar: as it was, or in another's name."""
        parts = [_copied(part) for part in heard if part.WhichOneof("part") != "commit"]
        if self.chance.random() < 0.7:
            opening = parts[0].opening
            opening.request.agent_id = name
            opening.move_id = self.chance.choice((self._known_id(store, name), self._new_id()))
            if self.chance.random() < 0.7:
                opening.ClearField("parent_manifest")
                if (newest := self._parent(store, name)) is not None:
                    opening.parent_manifest.CopyFrom(newest.to_proto())
        return Lie("replayed", parts, self.chance.choice(("", "", "a deed")))

    def _opened(self, store: str, name: str, parent: Digest | None, move_id: str, **settings: Any) -> Parts:
        """An opening that the engine would take, and a turn that has computed nothing yet."""
        engine = self.judge.players[store].served.engine
        opening = plain_opening(engine.model, engine.device, 2)
        opening.request.CopyFrom(
            inference_pb2.GenerateRequest(
                prompt=PROMPT, agent_id=name, sampling=inference_pb2.Sampling(max_tokens=2), **settings
            )
        )
        opening.request_id, opening.move_id = f"taken-{self._new_id()}", move_id
        opening.is_text_own = self.chance.random() < 0.5
        opening.caller = self.chance.choice(("owner", LIAR, "ben"))
        if parent is not None:
            opening.parent_manifest.CopyFrom(parent.to_proto())
        return [pb.TakeTurnRequest(opening=opening), pb.TakeTurnRequest(stand=stand())]

    def _settings(self) -> dict[str, Any]:
        """Of a request, as its owner might have set them."""
        return self.chance.choice(
            (
                {},
                {},
                {"keep_partial": True},
                {"expected_version": self.chance.choice((0, 1, 2))},
                {"base_version": 1},
                {"expect_existing": True},
                {"on_full": inference_pb2.OnFull(policy=inference_pb2.ON_FULL_POLICY_DROP_OLDEST)},
            )
        )

    def _known_id(self, store: str, name: str) -> str:
        """A move's id: none, one that is over, or the very one by which the agent came or is going."""
        known = [self.judge.stores[each].store.owners.of(NS, name).move_id for each in (store, store, LIAR)]
        return self.chance.choice([*known, *self.move_ids[-2:], ""])

    def _new_id(self) -> str:
        return f"{self.chance.getrandbits(128):032x}"

    async def _call(self, store: str, name: str) -> None:
        """A call for which her token has no role."""
        caller, player = self.callers[store], self.judge.players[store]
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "Generate": lambda: caller.reply(agent_id=name, prompt="mine", sampling={"max_tokens": 1}),
            "Warm": lambda: caller.warm(agent_id=name, prompt="mine"),
            "Sleep": lambda: caller.sleep(name),
            "CancelTurn": lambda: caller.cancel_turn("any"),
            "HandOverTurn": lambda: caller.hand_over(LIAR, agent_id=name),
            "ListTurns": caller.list_turns,
        }
        what = self.chance.choice(sorted(calls))
        lines = len(player.audit.of(LIAR))
        outcome = await self.judge.judged(store, [], Verb.TURN, calls[what]())
        await self.judge.audited(player.audit, lines, what, outcome)
        if outcome != "ROLE_REQUIRED":
            raise ViolationError(f"{what} by a peer: {outcome}")
        self.counts[f"{what} {outcome}"] += 1


async def _until_prepared(call: TurnCall, parts: Sequence[pb.TakeTurnRequest]) -> None:
    """Raises what the engine refuses it with."""
    await call.send(parts[:1])
    answer = await call.receive()
    if answer.HasField("opened"):
        await call.send(parts[1:])
        answer = await call.receive()
    if not answer.HasField("prepared"):
        raise Unavailable("no more than an opening")


async def _to_its_end(call: TurnCall) -> None:
    """The last word. Raises what the engine ends it with."""
    await call.send([pb.TakeTurnRequest(commit=pb.TurnCommit())])
    while True:
        try:
            await call.receive()
        except KvasirError as error:
            if error.message == "the other engine ended the hand-over":  # by itself, and without a word
                return
            raise


def _copied(part: pb.TakeTurnRequest) -> pb.TakeTurnRequest:
    made = pb.TakeTurnRequest()
    made.CopyFrom(part)
    return made
