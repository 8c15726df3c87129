"""Agents that change hands where one of the stores is several over one database: a peer reports to any of these."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kvasir.errors import KvasirError
from kvasir.waits import SILENCE_S

from cachestore_svc.facts.ownership import OwnerState
from cachestore_svc.moving import orders
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, publish
from tests.cachestore.rights.peered import macs
from tests.made_models.synthetic import SMALL, SyntheticAgent

MOVE = "ab" * 8


async def refused(call: Any) -> None:
    with pytest.raises(KvasirError) as caught:
        await call
    assert caught.value.reason == "PEER_MAY_NOT"


@pytest.mark.long(2)
def test_an_agent_moves_by_order_of_one_store_to_a_peer_that_reports_to_another(
    tmp_path: Path, stores: tuple[Lab, Store, Store]
) -> None:
    _, a, b = stores
    publish(a, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)

    async def scene() -> None:
        async with macs("a", "b", "studio", root=tmp_path / "macs", opened={"a": a, "b": b}) as (one, other, studio):
            there = PeerSettings(name="a", address=other.address, token_file=other.tokens["studio"])
            studio.books.append(PeerBook({"a": there}))
            studio.allow("a", takes="move")
            async with other.as_peer("studio") as studio_calls:
                await refused(studio_calls.offer_agent("ada", MOVE, 0))
                await one.owner.move_agent("ada", to_peer="studio")
                assert studio.store.owners.of(NS, "ada").is_owned
                assert b.owners.of(NS, "ada").state is OwnerState.MOVED
                publish(a, "ben", SyntheticAgent(SMALL, 2).turn(30), 0)
                await refused(studio_calls.offer_agent("ben", MOVE, 0))

    asyncio.run(scene())


def test_an_order_holds_at_the_other_store_as_long_as_its_own_lives(
    url: str, stores: tuple[Lab, Store, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, a, b = stores
    publish(a, "ada", SyntheticAgent(SMALL, 1).turn(30), 0)
    monkeypatch.setattr(orders, "PATIENCE_S", 0.01)

    async def scene() -> None:
        async with macs("a", "b", "studio", root=tmp_path / "macs", opened={"a": a, "b": b}) as (one, other, _):
            here, there = (each.services.moves._handing_over.orders for each in (one, other))

            async def holds() -> list[bool]:
                return [await each.has(NS, "ada", "studio") for each in (here, there)]

            assert await holds() == [False, False]
            async with here.holding(NS, "ada", "studio", lab.chance):
                async with there.holding(NS, "ada", "studio", lab.chance):
                    assert await holds() == [True, True]
                for _ in range(3):
                    assert await holds() == [True, True]
                    assert not await there.has(NS, "ada", "loft")
                    assert not await there.has(NS, "ada 1", "studio")
                    lab.clock.pass_s(0.9 * SILENCE_S)
                    await asyncio.sleep(0.1)  # it is renewed
            assert await holds() == [False, False]
            a.moves.order(NS, "ada", "studio", "12")  # and its store dies
            assert await there.has(NS, "ada", "studio")
            lab.clock.pass_s(SILENCE_S)
            assert await holds() == [False, False]
            async with there.holding(NS, "ben", "studio", lab.chance):
                pass

    asyncio.run(scene())
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT name FROM kvasir.jobs WHERE name LIKE 'order%'").fetchall() == []


def test_an_order_is_its_namespaces_own_and_a_sealed_ones_has_a_sealed_name(url: str, labs: tuple[Lab, Lab]) -> None:
    with labs[0].seal(NS).open() as store, psycopg.connect(url, autocommit=True) as connection:
        for namespace in (NS, "one", "another"):
            publish(store, "ada", SyntheticAgent(SMALL, 1).turn(1), 0, namespace=namespace)
        store.moves.order(NS, "ada", "studio", "12")
        [(name,)] = connection.execute("SELECT name FROM kvasir.jobs WHERE name LIKE 'order%'").fetchall()
        assert ("ada" in name, "sealed-agent." in name) == (False, True)
        store.moves.order("one", "ada", "studio", "12")
        store.moves.end_order("another", "ada", "studio", "12")
        owners = NS, "one", "another", "nobody's"
        assert [store.moves.is_ordered(each, "ada", "studio") for each in owners] == [True, True, False, False]
