"""A turn that is handed over twice is the turn that never left, and its version names the peer that gave it last."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient
from kvasir.inference.v1 import handover_pb2

from inference_svc.edge import handover_messages as wire
from tests.cachestore.rights.engines import Place, players
from tests.cachestore.rights.peered import Mac, macs
from tests.inference.handover.cases import ON
from tests.inference.handover.two_engines import Heard, hear

FIRST: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Ada keeps a lamp in her bag."}],
    "sampling": {"max_tokens": 4},
}
MORE: dict[str, Any] = {
    "append_messages": [{"role": "user", "content": "And then?"}],
    "sampling": {**ON, "max_tokens": 300, "temperature": 1.0, "seed": 11},
}


@asynccontextmanager
async def three_engines(root: Path) -> AsyncIterator[tuple[dict[str, Mac], dict[str, AioInferenceClient]]]:
    """Ada's engine has a store, Ben's and Carl's have another one together."""
    async with macs("ada", "ben", root=root / "stores") as made:
        stores = {mac.name: mac for mac in made}
        stores["ada"].allow("ben", gives="move", takes="move")
        stores["ben"].allow("ada", gives="move", takes="move")
        places = [
            Place("ada", stores["ada"].address, peers=["ben"], callers=["ben"]),
            Place("ben", stores["ben"].address, peers=["ada"], beside=["carl"], callers=["ada"]),
            Place("carl", stores["ben"].address),
        ]
        async with players(root / "engines", places, {}) as engines:
            clients = {name: engine.owner for name, engine in engines.items()}
            for client in clients.values():
                client.peers.update(clients)
            yield stores, clients


@dataclass(frozen=True)
class World:
    """All of them, and the loop on which they serve."""

    stores: dict[str, Mac]
    engines: dict[str, AioInferenceClient]
    stayed: Heard  # the turn of an agent that never left
    run: Callable[[Coroutine[Any, Any, str]], str]


async def hops(world: World, agent: str, peers: Sequence[str], last: str, *, has_copy: bool = False) -> str:
    """Hand a turn of Ada's agent over to one peer after the other; it ends at the store `last`, as if it had stayed.
    Who handed it over, as its version says.
    """
    ada, store = world.engines["ada"], world.stores[last].owner
    await hear(ada, agent_id=agent, **FIRST)
    if has_copy:
        await store.pull_agent("ada", agent)
    givers = [ada, *(world.engines[peer] for peer in peers)]
    hand_overs = {3 + 57 * hop: (givers[hop], peer) for hop, peer in enumerate(peers)}
    went = await hear(ada, hand_overs, agent_id=agent, **MORE)
    assert [move.peer for move in went.moves] == list(peers), went.not_moved
    assert went.told == world.stayed.told
    give_up = time.monotonic() + 20  # a busy machine may store it after its reader has its end
    while True:
        newest = (await store.list_snapshots(agent)).snapshots[0]
        if (newest.origin == cachestore_pb2.ORIGIN_TURN and newest.parent_version) or time.monotonic() > give_up:
            return newest.origin_detail
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with asyncio.Runner() as loop:
        engines = three_engines(tmp_path_factory.mktemp("three"))
        stores, clients = loop.run(engines.__aenter__())
        try:
            loop.run(hear(clients["ada"], agent_id="stays", **FIRST))
            stayed = loop.run(hear(clients["ada"], agent_id="stays", **MORE))
            yield World(stores, clients, stayed, lambda work: loop.run(asyncio.wait_for(work, 120)))
        finally:
            loop.run(engines.__aexit__(None, None, None))


@pytest.mark.long(5)
def test_a_turn_of_two_hops_is_the_same_and_names_the_peer_that_gave_it_last(world: World) -> None:
    assert world.run(hops(world, "two hops", ["ben", "carl"], "ben")) == "handed over by ada"


@pytest.mark.long(6)
def test_a_turn_that_comes_back_before_its_agent_has_grown_is_the_same(world: World) -> None:
    """The agent comes back as it left: no version is made of its return."""
    assert world.run(hops(world, "comes back", ["ben", "ada"], "ada")) == "handed over by ben"


@pytest.mark.long(3)
def test_a_turn_is_the_same_where_a_copy_of_its_agent_lay(world: World) -> None:
    """The copy is the agent's newest version: none is made of its arrival."""
    assert world.run(hops(world, "copied", ["ben"], "ben", has_copy=True)) == "handed over by ada"


def test_an_engine_of_another_store_cannot_name_the_giver() -> None:
    opening = handover_pb2.TurnOpening(format=1, caller="owner", request_id="1", max_tokens=1, handed_over_by="ben")
    assert wire.read_opening(opening, "").begun.handed_over_by == "ben"
    assert wire.read_opening(opening, "ada").begun.handed_over_by == ""
