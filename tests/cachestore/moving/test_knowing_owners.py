"""What is known of owners is found again: by a store that was away, and under a peer's new name."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.errors import InvalidArgument

from cachestore_svc.facts.ownership import CLAIM_STEP, FIRST_MOVE
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings, change_peers
from tests.cachestore.moving.two_stores import Mac, as_peer, macs, refused, state
from tests.cachestore.service.running import assert_whole, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.waiting import eventually


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mac, Mac]]:
    with macs(tmp_path_factory.mktemp("k")) as (laptop, studio):
        laptop.start()
        studio.start()
        yield laptop, studio


def two_of_one_name(pair: tuple[Mac, Mac], name: str) -> None:
    """An agent of that name at each store, which each changed hands before, with other stores."""
    for number, (mac, other) in enumerate((pair, pair[::-1])):
        with mac.client() as client, as_peer(mac, other.name) as peer:
            publish(client, name, SyntheticAgent(SMALL, 20 + number).turn(300), 0)
            peer.offer_agent(name, str(number) * 16, 0)
            peer.undo_move(name, str(number) * 16)


def claim_at_once(client: StoreClient, *names: str) -> None:
    """A claim waits five seconds for a peer that does not answer."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: client.claim_agent(name, force=True), names))


@pytest.mark.long(2)
def test_an_owner_that_was_away_asks_whether_it_still_is_one(pair: tuple[Mac, Mac]) -> None:
    """Of its own agents, and not of another of the same name."""
    laptop, studio = pair
    two_of_one_name(pair, "a namesake")
    with laptop.client() as client:
        publish(client, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
        client.move_agent("ada", to_peer="studio")
        studio.kill()
        laptop.cables["studio"].part()  # so that the new owner cannot tell it
        claim_at_once(client, "a namesake", "ada")
    studio.start()
    with studio.client() as client:
        eventually(lambda: state(client, "ada") == (pb.OWNER_STATE_MOVED, "laptop"))
        assert state(client, "a namesake")[0] == pb.OWNER_STATE_OWNED  # it was asked for before ada
    laptop.cables["studio"].heal()


@pytest.mark.long(6)
def test_an_owner_that_slept_asks_at_once_whether_it_still_is_one(pair: tuple[Mac, Mac]) -> None:
    """Its process lived on, and the new owner cannot tell it."""
    laptop, studio = pair
    assert studio.running is not None
    with laptop.client() as client:
        publish(client, "sleeper", SyntheticAgent(SMALL, 1).turn(300), 0)
        client.move_agent("sleeper", to_peer="studio")
        studio.running.process.send_signal(signal.SIGSTOP)
        laptop.cables["studio"].part()
        slept = time.monotonic()
        client.claim_agent("sleeper", force=True)
        time.sleep(max(0.0, slept + 4.5 - time.monotonic()))  # four seconds are a sleep
    studio.running.process.send_signal(signal.SIGCONT)
    with studio.client() as client:
        eventually(lambda: state(client, "sleeper") == (pb.OWNER_STATE_MOVED, "laptop"))
        refused(lambda: publish(client, "sleeper", SyntheticAgent(SMALL, 2).turn(30), 1), "AGENT_MOVED", "laptop")
    laptop.cables["studio"].heal()


def test_a_forced_claim_leaves_a_peer_its_own_agent_that_has_the_same_name(pair: tuple[Mac, Mac]) -> None:
    two_of_one_name(pair, "twin")
    laptop, studio = pair
    with laptop.client() as here, studio.client() as there:
        there.claim_agent("twin", force=True)
        own = there.get_agent("twin").ownership.generation
        assert here.claim_agent("twin", force=True).ownership.generation // CLAIM_STEP == own // CLAIM_STEP
        publish(there, "twin", SyntheticAgent(SMALL, 22).turn(300), 1)
        publish(here, "twin", SyntheticAgent(SMALL, 23).turn(300), 1)


def with_a_copy_of_one_and_another(pair: tuple[Mac, Mac], name: str) -> None:
    """At the laptop a copy of what moved to the studio, by its word; at the studio another agent, of that generation
    too."""
    two_of_one_name(pair, name)
    with as_peer(pair[0], "studio") as studio, as_peer(pair[1], "laptop") as laptop:
        studio.hand_over_agent(name, "2" * 16, studio.offer_agent(name, "2" * 16, 1).generation)
        laptop.offer_agent(name, "3" * 16, 1)
        laptop.undo_move(name, "3" * 16)


def test_a_copy_of_what_moved_away_is_not_replaced_by_another_agent_of_its_name(pair: tuple[Mac, Mac]) -> None:
    """Neither by a move, nor by a pull, nor by a copy that the peer gives."""
    with_a_copy_of_one_and_another(pair, "double")
    with pair[0].client() as here, pair[1].client() as there:
        copy = here.get_snapshot("double")
        assert here.get_agent("double").labels == {FIRST_MOVE: "0" * 16}
        for call in (
            lambda: here.move_agent("double", from_peer="studio"),
            lambda: here.pull_agent("studio", "double"),
            lambda: list(there.copying_agent("laptop", "double")),
        ):
            refused(call, "NOT_AN_ANCESTOR")
        assert here.get_snapshot("double") == copy


def test_another_agent_of_its_name_is_not_what_was_moved_here(pair: tuple[Mac, Mac]) -> None:
    with_a_copy_of_one_and_another(pair, "lost")
    with pair[0].client() as here, pair[1].client() as there:
        refused(lambda: there.move_agent("lost", from_peer="laptop"), "NOT_AN_ANCESTOR")
        refused(lambda: here.move_agent("lost", to_peer="studio"), "NOT_AN_ANCESTOR")


def test_a_caller_does_not_make_an_agent_another_one(pair: tuple[Mac, Mac]) -> None:
    two_of_one_name(pair, "itself")
    with pair[0].client() as client:
        labels = dict(client.get_agent("itself").labels)
        assert labels == {FIRST_MOVE: "0" * 16}
        for value in ("", "1" * 16):
            with pytest.raises(InvalidArgument, match=FIRST_MOVE):
                client.update_agent("itself", labels={FIRST_MOVE: value})
        assert client.update_agent("itself", labels={"team": "red"}).labels == {**labels, "team": "red"}


@pytest.mark.long(6)
def test_a_forced_claim_is_reported_to_a_peer_that_could_not_be_asked(pair: tuple[Mac, Mac]) -> None:
    """If it knows of moves of that agent; one of its own that has the same name stays its own."""
    laptop, studio = pair
    two_of_one_name(pair, "a stranger")
    with laptop.client() as here, studio.client() as there:
        for number, client in enumerate((here, there)):
            publish(client, "claimed twice", SyntheticAgent(SMALL, 3 + number).turn(300), 0)
            publish(client, "claimed once", SyntheticAgent(SMALL, 5 + number).turn(300), 0)
        there.claim_agent("claimed twice", force=True)
        laptop.cables["studio"].part()
        claim_at_once(here, "a stranger", "claimed once", "claimed twice")
        laptop.cables["studio"].heal()
        owned = pb.OWNER_STATE_OWNED
        eventually(lambda: [state(each, "claimed twice")[0] for each in (here, there)].count(owned) == 1)
        for name in ("a stranger", "claimed once"):
            publish(there, name, SyntheticAgent(SMALL, 7).turn(300), 1)


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
