"""A turn that is handed over twice is the turn that never left, and its version names the peer that gave it last."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient
from kvasir.inference.v1 import handover_pb2

from inference_svc.edge import handover_messages as wire
from tests.cachestore.rights.engines import Place, players
from tests.cachestore.rights.peered import Mac, macs
from tests.inference.handover.two_engines import hear

FIRST = {"messages": [{"role": "user", "content": "Ada keeps a lamp in her bag."}], "sampling": {"max_tokens": 4}}
MORE = {
    "append_messages": [{"role": "user", "content": "And then?"}],
    "sampling": {"max_tokens": 200, "temperature": 1.0, "seed": 11, "logit_bias": {2: -100.0}},
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


def test_a_turn_of_two_hops_is_the_same_and_names_the_peer_that_gave_it_last(tmp_path: Path) -> None:
    async def work() -> None:
        async with three_engines(tmp_path) as (stores, engines):
            ada, ben = engines["ada"], engines["ben"]
            for agent in ("stays", "goes"):
                await hear(ada, agent_id=agent, **FIRST)
            stayed = await hear(ada, agent_id="stays", **MORE)
            went = await hear(ada, {3: (ada, "ben"), 60: (ben, "carl")}, agent_id="goes", **MORE)
            assert [move.peer for move in went.moves] == ["ben", "carl"], went.not_moved
            assert went.told == stayed.told
            give_up = time.monotonic() + 20  # a busy machine may store it after its reader has its end
            while True:
                newest = (await stores["ben"].owner.list_snapshots("goes")).snapshots[0]
                if newest.origin == cachestore_pb2.ORIGIN_TURN or time.monotonic() > give_up:
                    break
                await asyncio.sleep(0.05)
            assert newest.origin_detail == "handed over by ada"

    asyncio.run(asyncio.wait_for(work(), 120))


def test_an_engine_of_another_store_cannot_name_the_giver() -> None:
    opening = handover_pb2.TurnOpening(format=1, caller="owner", request_id="1", max_tokens=1, handed_over_by="ben")
    assert wire.read_opening(opening, "").begun.handed_over_by == "ben"
    assert wire.read_opening(opening, "ada").begun.handed_over_by == ""
