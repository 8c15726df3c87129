"""What is known of owners is found again: by a store that was away, and under a peer's new name."""

import signal
from collections.abc import Iterator

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb

from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings, change_peers
from tests.cachestore.moving.test_moves import eventually, refused, state
from tests.cachestore.moving.two_stores import Mac, macs
from tests.cachestore.service.running import assert_whole, publish
from tests.synthetic import SMALL, SyntheticAgent


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mac, Mac]]:
    with macs(tmp_path_factory.mktemp("k")) as (laptop, studio):
        laptop.start()
        studio.start()
        yield laptop, studio


def test_an_owner_that_was_away_asks_whether_it_still_is_one(pair: tuple[Mac, Mac]) -> None:
    laptop, studio = pair
    with laptop.client() as client:
        publish(client, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
        client.move_agent("ada", to_peer="studio")
        studio.kill()
        laptop.cables["studio"].part()  # so that the new owner cannot tell it
        client.claim_agent("ada", force=True)
    studio.start()
    with studio.client() as client:
        eventually(lambda: state(client, "ada") == (pb.OWNER_STATE_MOVED, "laptop"))
    laptop.cables["studio"].heal()


def test_a_forced_claim_is_told_to_a_peer_that_could_not_be_asked(pair: tuple[Mac, Mac]) -> None:
    """If it knows of moves of that agent; one of its own that has the same name stays its own."""
    laptop, studio = pair
    with laptop.client() as here, studio.client() as there:
        for number, client in enumerate((here, there)):
            publish(client, "claimed twice", SyntheticAgent(SMALL, 3 + number).turn(300), 0)
            publish(client, "claimed once", SyntheticAgent(SMALL, 5 + number).turn(300), 0)
        there.claim_agent("claimed twice", force=True)
        laptop.cables["studio"].part()
        for name in ("claimed once", "claimed twice"):
            here.claim_agent(name, force=True)
        laptop.cables["studio"].heal()
        owned = pb.OWNER_STATE_OWNED
        eventually(lambda: [state(each, "claimed twice")[0] for each in (here, there)].count(owned) == 1)
        publish(there, "claimed once", SyntheticAgent(SMALL, 7).turn(300), 1)


def test_a_peer_that_is_renamed_keeps_the_agents_that_moved_to_it(pair: tuple[Mac, Mac]) -> None:
    laptop, studio = pair
    eve = SyntheticAgent(SMALL, 2)
    with laptop.client() as here, studio.client() as there:
        publish(here, "eve", eve.turn(300), 0)
        here.move_agent("eve", to_peer="studio")
        change_peers(laptop.home.root / "peers.toml", lambda book: book.with_name("studio", "desk"))
        assert laptop.running is not None
        laptop.running.process.send_signal(signal.SIGHUP)
        eventually(lambda: state(here, "eve") == (pb.OWNER_STATE_MOVED, "desk"))
        refused(lambda: publish(here, "eve", eve.turn(300), 1), "AGENT_MOVED", "desk")
        publish(there, "eve", last := SyntheticAgent(SMALL, 3).turn(300), 1)
        here.move_agent("eve", from_peer="desk")
        assert_whole(here, "eve", last)


def test_an_earlier_name_is_a_peers_until_another_takes_it() -> None:
    book = PeerBook({name: PeerSettings(name=name, address="127.0.0.1:1") for name in ("studio", "attic")})
    book = book.with_name("studio", "desk")
    assert book.peers["desk"].formerly == ("studio",)
    assert book.with_name("desk", "studio").peers["studio"].formerly == ("desk",)
    assert book.with_name("attic", "studio").peers["desk"].formerly == ()
    assert book.with_peer(PeerSettings(name="studio", address="127.0.0.1:2")).peers["desk"].formerly == ()
