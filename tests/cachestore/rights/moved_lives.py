"""Agents that two stores moved, copied, claimed and gave up over wires that keep all of it; and what must stay so."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import SnapshotVersion
from cachestore_svc.index.catalog import CatalogView
from tests.cachestore.core.lab import NS, snapshot_digests
from tests.cachestore.rights.judging import _versions
from tests.cachestore.rights.peered import Mac, drained, macs
from tests.cachestore.rights.wiretap import Call, Wire, wired
from tests.made_models.synthetic import SMALL, SyntheticAgent

OLD, NEW = "ada", "ben"
_SETTLED_S = 10.0


@dataclass(frozen=True)
class Kept:
    """Of one agent at one store: all that a replay may not change."""

    known: Ownership
    versions: tuple[SnapshotVersion, ...]
    labels: Mapping[str, str]
    is_pinned: bool


@dataclass
class Lives:
    """Two stores, a stranger that both know, and what was recorded of each agent."""

    stores: dict[str, Mac]
    wires: dict[tuple[str, str], Wire]
    gives: str  # what the two give each other
    calls: dict[str, list[Call]] = field(default_factory=dict)  # by agent
    heard: dict[str, list[bytes]] = field(default_factory=dict)  # each connection of a store that asked
    agents: dict[str, SyntheticAgent] = field(default_factory=dict)

    @property
    def pair(self) -> tuple[Mac, Mac]:
        return self.stores[OLD], self.stores[NEW]

    async def lived(self, *, cuts: bool, only: str = "") -> None:
        """Let all of it happen, or only what is one agent's. `cuts`: a transfer is cut and goes on, too."""
        ada, _ = self.pair
        self._allow(self.gives)
        deeds = (self._work, self._gone, self._undone, self._claimed, self._copied, self._open)
        for deed in deeds:
            name = deed.__name__.removeprefix("_")
            if only not in ("", name):
                continue
            self.agents[name] = SyntheticAgent(SMALL, len(self.agents) + 1)
            await self._extended(ada, name, 0)
            for wire in self.wires.values():
                wire.calls.clear()
            if cuts and deed == self._gone:
                self._cut_blobs()
            await deed(name)
            self.calls[name] = [call for wire in self.wires.values() for call in wire.calls]
        assert sum(wire.proxy.cuts for wire in self.wires.values()) == cuts
        self.heard = {by: [bytes(each) for each in wire.proxy.heard or ()] for (by, _), wire in self.wires.items()}

    async def _work(self, name: str) -> None:
        """There, on, and back."""
        ada, ben = self.pair
        await self._moved(ada, ben, name)
        await self._extended(ben, name, 1)
        await self._moved(ben, ada, name)
        await self._extended(ada, name, 2)

    async def _gone(self, name: str) -> None:
        ada, ben = self.pair
        await self._moved(ada, ben, name)
        await self._extended(ben, name, 1)

    def _cut_blobs(self) -> None:
        """In the midst of the next agent's blobs, of which there are 50 KB behind 6 KB of manifest."""
        proxy = self.wires[NEW, OLD].proxy
        proxy.cut_after_received = proxy.received_bytes + 20_000

    async def _undone(self, name: str) -> None:
        """The source hears of it, its answer is lost, and whoever ordered it gives up."""
        ada, ben = self.pair
        wire = self.wires[NEW, OLD]
        wire.loses = "OfferAgent"
        moving = asyncio.create_task(self._moved(ada, ben, name))
        await wire.lost.wait()
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        await until(lambda: ada.store.owners.of(NS, name).is_owned, "the move is undone")
        await self._extended(ada, name, 1)

    async def _claimed(self, name: str) -> None:
        ada, ben = self.pair
        await self._moved(ada, ben, name)
        await ada.owner.claim_agent(name, force=True)
        assert ben.store.owners.of(NS, name).state is OwnerState.MOVED
        await self._extended(ada, name, 1)

    async def _copied(self, name: str) -> None:
        """Pulled, and given."""
        ada, ben = self.pair
        await ben.owner.pull_agent(OLD, name)
        await self._extended(ada, name, 1)
        await drained(ada.owner.copying_agent(NEW, name))

    async def _open(self, name: str) -> None:
        """There and back, and on its way there again. Nobody's word but the destination's: a MoveAgent that is repeated
        goes on with a move that is under way, and ends it."""
        ada, ben = self.pair
        self._allow("move")
        for source, target in ((ada, ben), (ben, ada)):
            await drained(target.owner.moving_agent(name, from_peer=source.name))
        self._allow(self.gives)
        await self.open_again(name)

    async def open_again(self, name: str) -> None:
        """A new move of ben's is under way, and stands."""
        ada, _ = self.pair
        self._allow("move")
        ada.services.moving._handing_over._limits._tries.clear()
        async with ada.as_peer(NEW) as ben_calls:
            await ben_calls.offer_agent(name, secrets.token_hex(16), ada.store.owners.of(NS, name).generation)
        self._allow(self.gives)

    def _allow(self, gives: str) -> None:
        ada, ben = self.pair
        for mac, other in ((ada, ben), (ben, ada)):
            mac.allow(other.name, gives=gives, takes="move")

    async def _extended(self, mac: Mac, name: str, parent: int) -> None:
        await mac.publish(name, self.agents[name].turn(700), parent)

    async def _moved(self, source: Mac, target: Mac, name: str) -> None:
        """By order of the source's owner, or of the target's where it may take agents."""
        if self.gives == "read":
            await drained(source.owner.moving_agent(name, to_peer=target.name))
        else:
            await drained(target.owner.moving_agent(name, from_peer=source.name))

    def kept(self) -> dict[tuple[str, str], Kept]:
        """Of every agent at each store, the stranger's too."""
        found = {}
        for mac in self.stores.values():
            for name in self.agents:
                found[mac.name, name] = mac.store._core.catalog.read(NS, lambda view, name=name: _kept(view, name))
        return found

    async def check_whole(self, owners: Mapping[str, str]) -> None:
        """Every blob of each agent's newest version is there, at its owner."""
        for name, owner in owners.items():
            store = self.stores[owner].store
            newest = await self.stores[owner].owner.get_snapshot(name)
            assert newest[1] == await asyncio.to_thread(_bytes_of, store, newest[0].manifest.hash, name)
            for digest in snapshot_digests(store, NS, name):
                assert Digest.of(store.blobs.read(NS, digest)) == digest

    async def check_moves_still(self, owners: Mapping[str, str]) -> None:
        """Each agent's owner gives it to the other store, as ever."""
        for name, owner in owners.items():
            source, target = self.pair if owner == OLD else self.pair[::-1]
            before = await source.owner.get_snapshot(name)
            with contextlib.suppress(KvasirError):
                await source.owner.claim_agent(name)  # one that is under way
            await source.owner.move_agent(name, to_peer=target.name)
            assert target.store.owners.of(NS, name).is_owned
            assert (await target.owner.get_snapshot(name))[1] == before[1]
        await self.check_whole({name: NEW if owner == OLD else OLD for name, owner in owners.items()})


@asynccontextmanager
async def lives(root: Path, sockets: Path, gives: str, *, cuts: bool, only: str = "") -> AsyncIterator[Lives]:
    """All of it has happened; or of one agent alone."""
    async with AsyncExitStack() as exits:
        made = await exits.enter_async_context(macs(OLD, NEW, "cy", root=root))
        stores = {mac.name: mac for mac in made}
        wires = await exits.enter_async_context(wired([stores[OLD], stores[NEW]], sockets))
        here = Lives(stores, wires, gives)
        await here.lived(cuts=cuts, only=only)
        yield here


def held(mac: Mac) -> dict[str, int]:
    """What calls of other stores hold of a store."""
    moves = mac.services.moves
    return {
        "reserved bytes": mac.store._core.space.reserved_bytes(NS),
        "parts": len([*mac.store._core.config.data_dir.glob("namespaces/*/blobs/??/*.part")]),
        "manifests": moves._receiving.copies.manifests.room.held_units,
        "blobs being read": mac.services.store._parts.reader._budget.held_units,
        "links": len(mac.peers._links),
        "agents that come": len(moves._receiving.bringing._coming),
        "moves": len(moves._locks) + len(moves._handing_over.orders._here),
    }


async def until(holds: Any, what: str) -> None:
    for _ in range(int(_SETTLED_S / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not in time: {what}")


def _kept(view: CatalogView, name: str) -> Kept:
    known, versions = view.ownership_of(name), tuple(_versions(view, name))
    if not versions:
        return Kept(known, versions, {}, is_pinned=False)
    agent = view.get_agent(name, 1)
    return Kept(known, versions, dict(agent.labels), agent.is_pinned)


def _bytes_of(store: Any, hash_: str, name: str) -> bytes:
    version = store.snapshots.page(NS, name).snapshots[0]
    assert version.manifest.hash == hash_
    return bytes(store.blobs.read(NS, version.manifest))
