"""The bytes and the calls of moves and copies between two stores, replayed: no owner and no memory changes."""

import asyncio
import os
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kvasir.errors import KvasirError

from cachestore_svc.facts.ownership import OwnerState, undone
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.moved_lives import NEW, OLD, Kept, Lives, held, lives, until
from tests.cachestore.rights.peered import Mac
from tests.cachestore.rights.wiretap import Call, Replayed, bytes_sent_again, reach, sent_again, served
from tests.made_models.sampling import IS_WHOLE, first_and_in_turn, sampled

REPLAYS = sampled(25, of=1500)
SEED = int(os.environ.get("KVASIR_SEED", "1"))
OWNERS = {"work": OLD, "gone": NEW, "undone": OLD, "claimed": OLD, "copied": OLD, "open": OLD}


@dataclass
class Replays:
    """Replays of what was recorded, each judged."""

    here: Lives
    chance: random.Random
    counts: Counter[str]
    before: Mapping[tuple[str, str], Kept]

    async def go(self, number: int) -> None:
        how = self.chance.choice(("whole", "cut", "doubled", "reversed", "shuffled", "mixed", "bytes"))
        name = self.chance.choice([*OWNERS])
        if how == "bytes":
            await self._bytes()
        else:
            for call in self._changed(how, self.here.calls[name]):
                await self._call(call, how)
        try:
            self._judge()
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, replay {number}, {how} of {name}: {error}") from None
        if self.chance.random() < 0.3:
            await self._settle()

    def _changed(self, how: str, sent: Sequence[Call]) -> list[Call]:
        """A store's calls at one other, in one way not as they were."""
        at, by = self.chance.choice(sorted({(call.at, call.by) for call in sent}))
        made = [call for call in sent if (call.at, call.by) == (at, by)]
        place = self.chance.randrange(len(made))
        if how == "cut":
            made[place:] = [made[place].cut(self.chance.randrange(len(made[place].message) + 1))]
        elif how == "doubled":
            made.insert(place, made[place])
        elif how == "reversed":
            made.reverse()
        elif how == "shuffled":
            self.chance.shuffle(made)
        elif how == "mixed":
            others = [call for calls in self.here.calls.values() for call in calls]
            made[place : place + 1] = self.chance.choices(others, k=3)
        return made

    async def _call(self, call: Call, how: str) -> None:
        """To the same store by the same peer, or to another one, or with another peer's token."""
        at, by = call.at, call.by
        match self.chance.choice(("same", "same", "other store", "other peer")):
            case "other store":
                at, by = by, at
            case "other peer":
                by = "cy"
        mac = self.here.stores[at]
        lines = len(mac.audit.of(by))
        outcome = await sent_again(call, mac, by)
        await until(lambda: _is_audited(mac, by, lines, call, outcome), f"{call.name} {outcome} in the audit of {at}")
        self.counts[f"{how}: {call.name} {outcome}"] += 1

    async def _bytes(self) -> None:
        """A connection's, whole or to a random byte."""
        wire = self.chance.choice([*self.here.wires.values()])
        data = self.chance.choice(self.here.heard[wire.by])
        data = data[: self.chance.choice((len(data), self.chance.randrange(len(data) + 1)))]
        mac = self.here.stores[wire.at]
        lines = len(mac.audit.of(wire.by))
        await bytes_sent_again(data, mac)
        for line in mac.audit.of(wire.by)[lines:]:
            assert line["outcome"] == "allowed" or line["reason"] not in ("", "INTERNAL", "UNKNOWN"), line
            self.counts[f"bytes: {line['what'].rpartition('/')[2]} {line['reason'] or 'OK'}"] += 1

    def _judge(self) -> None:
        for key, now in self.here.kept().items():
            was, known = self.before[key], self.before[key].known
            silenced = undone(known, known.peer, known.move_id, now.known.since_unix_ms)  # its destination says nothing
            assert now in (was, replace(was, known=silenced)), f"{key}: {was} to {now}"

    async def _settle(self) -> None:
        """A move that was under way ends, and another one begins: no offer of an earlier one is taken for it."""
        old = self.here.stores[OLD]
        if old.store.owners.of(NS, "open").state is OwnerState.MOVING:
            await old.owner.claim_agent("open")
            self.counts["taken back"] += 1
        elif self.chance.random() < 0.5:
            await self.here.open_again("open")
        self.before = self.here.kept()


def _is_audited(mac: Mac, by: str, lines: int, call: Call, outcome: str) -> bool:
    found = [(line["what"].rpartition("/")[2], line["outcome"], line["reason"]) for line in mac.audit.of(by)[lines:]]
    if outcome == "OK":
        return (call.name, "allowed", "") in found
    return (call.name, "refused", outcome) in found or (call.name, "failed", outcome) in found


def replayed(root: Path, gives: str) -> Counter[str]:
    """Many replays over one life of two stores that give each other this. What was counted."""
    counts = Counter[str]()

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="kv") as sockets:
            async with lives(root, Path(sockets), gives, cuts=IS_WHOLE) as here:
                replays = Replays(here, random.Random(SEED), counts, here.kept())
                idle = {mac.name: dict.fromkeys(held(mac), 0) for mac in here.stores.values()}
                for number in range(REPLAYS):
                    for mac in here.pair:  # this is not about how many words an hour has
                        mac.services.moving._handing_over._limits._buckets.clear()
                    await replays.go(number)
                for mac in here.stores.values():
                    await until(lambda mac=mac: held(mac) == idle[mac.name], f"{held(mac)} are given back")
                await here.check_whole(OWNERS)
                await here.check_moves_still(OWNERS)

    asyncio.run(run())
    print(f"{REPLAYS} replays, seed {SEED}: {dict(sorted(counts.items()))}")
    return counts


@pytest.mark.long(5)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gives", first_and_in_turn(["claim", "read"], seconds=5))
def test_replayed_bytes_of_moves_and_copies_change_no_owner_and_no_memory(tmp_path: Path, gives: str) -> None:
    counts = replayed(tmp_path / "stores", gives)
    said = Counter[str]()
    for name, count in counts.items():
        said[name.partition(": ")[2]] += count
    assert said["HandOverAgent MOVE_UNKNOWN"] > 0 < said["OfferAgent PEER_MAY_NOT"] + said["OfferAgent OK"], said
    if IS_WHOLE:
        fenced = "FenceAgent OWNER_NEWER" if gives == "claim" else "FenceAgent PEER_MAY_NOT"
        for word in ("UndoMove OK", fenced, "ReadBlobs OK"):
            assert said[word] > 0, (word, said)


async def test_a_source_whose_old_answers_are_replayed_gives_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as sockets:
        async with lives(tmp_path / "stores", Path(sockets), "claim", cuts=False, only="work") as here:
            before = here.kept()
            calls = [call for call in here.calls["work"] if (call.by, call.at) == (NEW, OLD)]
            async with served(Replayed(calls), Path(sockets) / "replayed") as address:
                reach(here.stores[NEW], OLD, address)
                with pytest.raises(KvasirError) as refused:
                    await here.stores[NEW].owner.move_agent("work", from_peer=OLD)
                assert refused.value.reason == "OWNER_NEWER"
            assert here.kept() == before
            reach(here.stores[NEW], OLD, here.wires[NEW, OLD].proxy.address)
            await here.check_moves_still({"work": OLD})
