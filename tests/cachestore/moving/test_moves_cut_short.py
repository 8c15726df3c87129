"""What cuts a move short, or makes it wait: leases, silence, a caller that leaves, a crash."""

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.errors import Unavailable
from kvasir.formats.block_hash import kv_identity_hash

from tests.cachestore.moving.two_stores import Mac, as_peer, macs, publish_under, refused, state
from tests.cachestore.service.running import assert_whole, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.waiting import eventually

KV = kv_identity_hash(SMALL)


@pytest.mark.long(4)
def test_a_move_waits_for_the_engine_that_holds_the_lease_and_reports_it(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 9)
    publish(laptop, name, ada.turn(300), 0)
    lease = laptop.acquire_lease(name, KV, "engine", ttl_s=60).lease
    last = ada.turn(300)
    for step in studio.moving_agent(name, from_peer="laptop"):
        if step.HasField("waiting") and lease is not None:
            laptop.put_blobs(last.new_blobs)
            laptop.put_manifest(last.manifest_bytes)
            laptop.commit(name, last.manifest_digest, 1, lease=lease)
            laptop.release_lease(name, KV, lease)
            lease = None
    assert lease is None
    assert_whole(studio, name, last)


@pytest.mark.long(5)
def test_a_move_that_lasts_for_longer_than_the_grace_period_keeps_what_has_come(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    ada = SyntheticAgent(SMALL, 22).turn(600)
    hasty = ("--grace-period-s", "2", "--gc-interval-s", "0.1")
    with macs(tmp_path_factory.mktemp("g"), *hasty) as (here, there):
        here.start()
        there.start()
        with here.client() as laptop, there.client() as studio:
            publish(laptop, "ada", ada, 0)
            lease = laptop.acquire_lease("ada", KV, "engine", ttl_s=60).lease
            waits = 0
            for step in studio.moving_agent("ada", from_peer="laptop"):
                if step.HasField("waiting"):  # after seconds, in which all that was copied is garbage
                    waits += 1
                    laptop.release_lease("ada", KV, lease)
            assert waits
            assert_whole(studio, "ada", ada)


@pytest.mark.long(4)
def test_a_move_that_its_caller_leaves_is_undone_at_once(laptop: StoreClient, studio: StoreClient, name: str) -> None:
    ada = SyntheticAgent(SMALL, 10)
    publish(laptop, name, ada.turn(300), 0)
    lease = laptop.acquire_lease(name, KV, "engine", ttl_s=60).lease
    steps = studio.moving_agent(name, from_peer="laptop")
    assert any(step.HasField("waiting") for step in steps)
    steps.close()
    publish_under(laptop, name, ada, lease)


@pytest.mark.long(2)
def test_a_source_takes_the_agent_back_from_a_silent_destination(
    pair: tuple[Mac, Mac], laptop: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 11)
    publish(laptop, name, ada.turn(300), 0)
    with as_peer(pair[0], "studio") as peer:
        peer.offer_agent(name, "0" * 16, 0)
        turn = ada.turn(300)
        refused(lambda: publish(laptop, name, turn, 1), "AGENT_MOVING", "studio")
        refused(lambda: laptop.delete_agent(name), "AGENT_MOVING")
        refused(lambda: laptop.acquire_lease(name, KV, "engine"), "AGENT_MOVING")
        eventually(lambda: laptop.get_agent(name).ownership.state == pb.OWNER_STATE_OWNED)
        refused(lambda: peer.hand_over_agent(name, "0" * 16, 1), "MOVE_UNKNOWN")
        publish(laptop, name, turn, 1)
        # The destination was asleep, and goes on where it was: with what it has, the last turn would be lost.
        refused(lambda: peer.offer_agent(name, "0" * 16, 0), "MOVE_UNKNOWN")
        publish(laptop, name, ada.turn(300), 2)


def test_a_user_takes_back_an_agent_that_is_on_its_way(pair: tuple[Mac, Mac], laptop: StoreClient, name: str) -> None:
    publish(laptop, name, SyntheticAgent(SMALL, 12).turn(300), 0)
    with as_peer(pair[0], "studio") as peer:
        peer.offer_agent(name, "1" * 16, 0)
        assert laptop.claim_agent(name).ownership.state == pb.OWNER_STATE_OWNED
        refused(lambda: peer.hand_over_agent(name, "1" * 16, 1), "MOVE_UNKNOWN")


def test_a_forced_claim_is_above_an_owner_that_only_a_peer_has_heard_of(
    pair: tuple[Mac, Mac], laptop: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 19)
    publish(laptop, name, ada.turn(300), 0)
    laptop.move_agent(name, to_peer="studio")
    with as_peer(pair[1], "laptop") as peer:
        peer.fence_agent(name, 5 << 40)
    assert laptop.claim_agent(name, force=True).ownership.generation > 5 << 40
    publish(laptop, name, ada.turn(300), 1)


@pytest.mark.long(3)
def test_a_destination_that_received_requests_the_decision_after_a_crash(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    with macs(tmp_path_factory.mktemp("crash"), "--move-patience-s", "2") as (source, target):
        source.start()
        target.start()
        turn = SyntheticAgent(SMALL, 14).turn(256 * 8)
        with source.client() as owner, target.client() as other:
            publish(owner, "ada", turn, 0)
            steps = other.moving_agent("ada", from_peer="laptop")
            next(steps)
            target.kill()
            with pytest.raises(Unavailable):
                list(steps)
        target.start()
        with source.client() as owner, target.client() as other:
            eventually(lambda: owner.get_agent("ada").ownership.state != pb.OWNER_STATE_MOVING)
            other.move_agent("ada", from_peer="laptop")
            assert_whole(other, "ada", turn)
            assert state(owner, "ada") == (pb.OWNER_STATE_MOVED, "studio")
            # The owner is gone: the other claims, and fences it when it comes back.
            target.kill()
            refused(lambda: owner.claim_agent("ada"), "AGENT_MOVED")
            claimed = owner.claim_agent("ada", force=True).ownership
            assert claimed.state == pb.OWNER_STATE_OWNED
            assert claimed.generation >= 1 << 40
            source.kill()
        target.start()
        with target.client() as other:
            source.start()
            eventually(lambda: other.get_agent("ada").ownership.state == pb.OWNER_STATE_MOVED)
            refused(lambda: publish(other, "ada", turn, 1), "AGENT_MOVED", "laptop")
