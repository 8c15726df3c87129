"""A store that lost index and journal cannot tell which agents it had handed over: it asks its peers first."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cli.agents import unclaimed

from cachestore_svc.journal import journal
from cachestore_svc.recovery.opening import DATABASE
from tests.cachestore.moving.two_stores import Mac, macs, refused, run
from tests.cachestore.service.running import publish
from tests.cli.running import in_process
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.programs import run as run_program

TURNS = {name: SyntheticAgent(SMALL, seed).turn(300) for seed, name in enumerate(("gone", "home"))}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Mac, Mac]]:
    with macs(tmp_path) as (laptop, studio):
        laptop.start()
        studio.start()
        yield laptop, studio


def recover_from_before(mac: Mac, old_journal: bytes) -> str:
    """What recovery says of a store whose index is gone, and whose journal is cut before the last things it did."""
    for suffix in ("", "-wal", "-shm"):
        (mac.home.data_dir / f"{DATABASE}{suffix}").unlink(missing_ok=True)
    (mac.home.data_dir / journal.NAME).write_bytes(old_journal[:-20])
    return run_program("cachestore_svc", "recover", "--data-dir", str(mac.home.data_dir)).stdout


@pytest.mark.long(2)
def test_after_a_recovery_an_agent_that_a_peer_owns_stays_there_and_the_others_are_claimed(
    pair: tuple[Mac, Mac],
) -> None:
    laptop, studio = pair
    with laptop.client() as client:
        for name, turn in TURNS.items():
            publish(client, name, turn, 0)
        client.update_agent("home", labels={"last": "line"})
        before = (laptop.home.data_dir / journal.NAME).read_bytes()
        client.move_agent("gone", to_peer="studio")
    laptop.kill()
    assert "2 agents may have moved before" in recover_from_before(laptop, before)
    studio.kill()
    laptop.start()
    with laptop.client() as client:
        assert unclaimed(client) == ["gone", "home"]
        listed = in_process("--address", laptop.home.socket, "agents", "ls").out
        assert listed.count("waits for a claim") == 2
        refused(lambda: publish(client, "gone", TURNS["gone"], 1), "AGENT_MOVING")
        refused(lambda: client.claim_agent("home"), "PEER_UNAVAILABLE")
    studio.start()
    gone, home = run(laptop, "claim", "--recovered", code=4)
    assert (gone["error"], home["error"]) == ("AGENT_MOVED", "")
    with laptop.client() as client, studio.client() as there:
        assert unclaimed(client) == []
        publish(client, "home", SyntheticAgent(SMALL, 5).turn(300), 1)
        refused(lambda: publish(client, "gone", TURNS["gone"], 1), "AGENT_MOVED", "studio")
        assert there.get_agent("gone").ownership.state == pb.OWNER_STATE_OWNED
        client.move_agent("gone", from_peer="studio")
        assert client.get_agent("gone").ownership.generation == 2
