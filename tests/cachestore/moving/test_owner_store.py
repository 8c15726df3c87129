"""What a store knows of owners outlives a restart, a crash between journal and index, and the loss of the index."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.limits import MAX_LABELS
from cachestore_svc.facts.ownership import FIRST_MOVE, OwnerState, gone
from cachestore_svc.facts.records import RecoverReport
from cachestore_svc.journal import journal
from cachestore_svc.journal.journal_lines import parse, state_lines
from cachestore_svc.recovery import recovering
from cachestore_svc.recovery.opening import DATABASE
from cachestore_svc.store.move_steps import ArrivingAgent, ArrivingLine
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, anybody, publish, upload
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot


def hand_over(store: Store, name: str) -> None:
    store.moves.offer(NS, name, "studio", "m" * 16, 0, anybody)
    store.moves.hand_over(NS, name, "studio", "m" * 16, 1, anybody)


def recover(lab: Lab) -> RecoverReport:
    return recovering.recover(lab.config(), lab.means(), [], lambda *_: None)


def with_three(lab: Lab) -> None:
    with lab.open() as store:
        for seed, name in enumerate(("here", "moved", "moving")):
            publish(store, name, SyntheticAgent(SMALL, seed).turn(300), 0)
        hand_over(store, "moved")
        store.moves.offer(NS, "moving", "studio", "n" * 16, 0, anybody, is_bounded=False)


def lose_the_index(lab: Lab) -> None:
    for suffix in ("", "-wal", "-shm"):
        (lab.root / f"{DATABASE}{suffix}").unlink(missing_ok=True)


def lose_the_last_line(lab: Lab, lines: int = 1) -> None:
    """Of the journal, and the whole index."""
    log = lab.root / journal.NAME
    written = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(written[:-lines]) + written[-lines][:20])
    lose_the_index(lab)


def states(lab: Lab) -> dict[str, OwnerState]:
    with lab.open() as store:
        return {name: store.owners.of(NS, name).state for name in ("here", "moved", "moving")}


def as_before_had_by(lab: Lab) -> None:
    """The data directory in the form that it had before peers with a part in an agent were noted."""
    log = lab.root / journal.NAME
    found = parse(log.read_bytes())
    for space in found.state.values():
        space.owners = {agent: facts[:-1] for agent, facts in space.owners.items()}
    log.write_bytes(b"".join(state_lines(found.store, found.position, found.state)))
    with closing(sqlite3.connect(lab.root / DATABASE)) as connection:
        connection.executescript(
            "ALTER TABLE owners DROP COLUMN had_by; DROP TABLE dropped; DROP TABLE removals;"
            "ALTER TABLE blobs DROP COLUMN edition; DELETE FROM migrations WHERE number >= 8"
        )


@pytest.mark.parametrize("is_lost", [False, True])
def test_who_had_an_agent_before_that_was_noted_is_known_after_it(lab: Lab, is_lost: bool) -> None:
    """Also where the index is made anew from a journal of that time. A claim had ended it."""
    with_three(lab)
    with lab.open() as store:
        for seed, name in ((7, "came"), (8, "claimed")):
            content = SyntheticAgent(SMALL, seed).turn(300)
            upload(store, content)
            line = ArrivingLine(kv_identity_hash(SMALL), content.manifest_digest, f"ada/{name}@1", True, None)
            store.moves.receive(NS, ArrivingAgent(name, "ada", "a" * 16, 1, [line], {}, False, 0))
            store.moves.arrive(NS, name, "a" * 16)
        store.owners.claim(NS, "claimed", 1)
        facts = {name: gone(known) for _, name, known in store.owners.known()}
    assert {name: known.had_by for name, known in facts.items()} == {
        **dict.fromkeys(("moved", "moving"), ("studio",)),
        "came": ("ada",),
        "claimed": (),
    }
    as_before_had_by(lab)
    old = (lab.root / journal.NAME).read_bytes()
    lab.open().close()
    (lab.root / journal.NAME).write_bytes(old)  # as after a crash before it was written in today's form
    if is_lost:
        lose_the_index(lab)
        recover(lab)
    with lab.open() as store:
        assert {name: known for _, name, known in store.owners.known()} == facts
        assert store.care.check().is_clean
    with lab.open() as store:
        assert {name: known for _, name, known in store.owners.known()} == facts


def receive(store: Store, content: SyntheticSnapshot, move_id: str) -> None:
    """The agent comes from the studio, with no more than is here."""
    generation = store.owners.of(NS, "ada").generation + 1
    line = ArrivingLine(kv_identity_hash(SMALL), content.manifest_digest, "studio/ada@1", True, None)
    store.moves.receive(NS, ArrivingAgent("ada", "studio", move_id, generation, [line], {}, False, 0))
    store.moves.arrive(NS, "ada", move_id)


@pytest.mark.parametrize(
    "change", ["none", "a turn", "an undone move", "a lost move", "a claim", "made again", "expired and made again"]
)
def test_a_store_knows_who_gave_an_agent_until_it_changes(lab: Lab, change: str) -> None:
    """The agent came back as it left. A restart and the loss of the index are no changes."""
    content, one_more = SyntheticAgent(SMALL, 1).turn(300), SyntheticAgent(SMALL, 2).turn(300)
    with lab.open() as store:
        publish(store, "ada", content, 0)
        hand_over(store, "ada")
        receive(store, content, "n" * 16)
        assert [len(store.agents.get(NS, "ada").lines), store.agents.get(NS, "ada").given_by] == [1, "studio"]
        if change == "a turn":
            publish(store, "ada", one_more, 1)
        elif change == "an undone move":
            store.moves.offer(NS, "ada", "studio", "o" * 16, store.owners.of(NS, "ada").generation, anybody)
            store.moves.undo(NS, "ada", "studio", "o" * 16)
        elif change == "a lost move":
            line = ArrivingLine(kv_identity_hash(SMALL), content.manifest_digest, "attic/ada@1", True, None)
            store.moves.receive(NS, ArrivingAgent("ada", "attic", "o" * 16, 9, [line], {}, False, 0))
            assert store.agents.get(NS, "ada").given_by == ""
            store.moves.did_not_arrive(NS, "ada", "o" * 16)
        elif change == "a claim":
            store.owners.claim(NS, "ada", 1)
        elif change == "made again":
            store.agents.delete(NS, "ada")
            publish(store, "ada", content, 0)
        elif change == "expired and made again":
            store._core.catalog.write(NS, lambda catalog: catalog.forget_agent("ada", False, 0))
            publish(store, "ada", content, 0)
    expected = "studio" if change == "none" else ""
    for is_lost in (False, True):
        if is_lost:
            lose_the_index(lab)
            recover(lab)
        with lab.open() as store:
            assert store.agents.get(NS, "ada").given_by == expected


def test_an_agent_keeps_the_id_of_its_first_move(lab: Lab) -> None:
    """Also where its labels are replaced, and where the index is lost."""
    with_three(lab)
    with lab.open() as store:
        store.moves.undo(NS, "moving", "studio", "n" * 16)
        store.agents.update(NS, "moving", {"team": "red"}, replaces_labels=True)
        store.agents.update(NS, "moving", {"team": "blue"}, replaces_labels=True)
    lose_the_index(lab)
    recover(lab)
    with lab.open() as store:
        labels = {name: dict(store.agents.get(NS, name).labels) for name in ("here", "moved", "moving")}
    ids = {name: {FIRST_MOVE: id_} for name, id_ in (("moved", "m" * 16), ("moving", "n" * 16))}
    assert labels == {"here": {}, "moved": ids["moved"], "moving": {**ids["moving"], "team": "blue"}}


def test_all_labels_of_an_agent_and_the_id_of_its_first_move_come_back(lab: Lab) -> None:
    labels = {str(number): "1" for number in range(MAX_LABELS)}
    with lab.open() as store:
        publish(store, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
        store.agents.update(NS, "ada", labels)
        store.moves.offer(NS, "ada", "studio", "m" * 16, 0, anybody)
        store.moves.undo(NS, "ada", "studio", "m" * 16)
        with pytest.raises(InvalidArgument, match="at most 64, got 65"):
            store.agents.update(NS, "ada", {"64": "1"})
    lose_the_index(lab)
    recover(lab)
    with lab.open() as store:
        assert store.agents.get(NS, "ada").labels == {**labels, FIRST_MOVE: "m" * 16}
        renamed = {f"new {name}": value for name, value in labels.items()}
        store.agents.update(NS, "ada", {**renamed, FIRST_MOVE: "m" * 16}, replaces_labels=True)


AS_IT_WAS = {"here": OwnerState.OWNED, "moved": OwnerState.MOVED, "moving": OwnerState.MOVING}


def test_owners_outlive_a_restart_and_the_loss_of_the_index(lab: Lab) -> None:
    with_three(lab)
    assert states(lab) == AS_IT_WAS
    lose_the_index(lab)
    assert recover(lab).has_whole_journal
    assert states(lab) == AS_IT_WAS


def test_the_last_step_of_a_move_is_repeated_from_the_journal(lab: Lab) -> None:
    with_three(lab)
    kept = lab.root.parent / "before"
    shutil.copytree(lab.root, kept)
    with lab.open() as store:
        store.moves.hand_over(NS, "moving", "studio", "n" * 16, 1, anybody)
    shutil.copy(lab.root / journal.NAME, kept / journal.NAME)
    lab.root = kept
    assert states(lab) == AS_IT_WAS | {"moving": OwnerState.MOVED}


def test_without_a_whole_journal_nobody_extends_what_may_have_been_handed_over(lab: Lab) -> None:
    with_three(lab)
    lose_the_last_line(lab)
    assert not recover(lab).has_whole_journal
    assert states(lab)["here"] is OwnerState.MOVING
    with lab.open() as store:
        with pytest.raises(FailedPrecondition) as caught:
            publish(store, "here", SyntheticAgent(SMALL, 0).turn(300), 1)
        assert caught.value.reason == "AGENT_MOVING"
        assert store.owners.claim(NS, "here", 0).is_owned
        publish(store, "here", SyntheticAgent(SMALL, 3).turn(300), 1)


def test_a_move_that_was_under_way_is_not_undone_when_its_decision_may_be_lost(lab: Lab) -> None:
    with_three(lab)
    with lab.open() as store:
        store.moves.hand_over(NS, "moving", "studio", "n" * 16, 1, anybody)
    lose_the_last_line(lab)
    assert not recover(lab).has_whole_journal
    with lab.open() as store:
        known = store.owners.of(NS, "moving")
        # What the destination owns in generation 1, if it was handed over, is above this: a claim here yields to it.
        assert (known.waits_for_claim, known.generation) == (True, 0)
        assert store.owners.of(NS, "moved").state is OwnerState.MOVED


def test_a_claim_that_rests_on_what_was_known_gives_way_to_what_came_meanwhile(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
        asked = store.owners.of(NS, "ada")
        fenced = store.owners.fence(NS, "ada", "studio", 7, anybody)
        assert store.owners.claim(NS, "ada", 0, expected=asked) == fenced == store.owners.of(NS, "ada")
        assert store.owners.claim(NS, "ada", 0, expected=fenced).is_owned


def test_an_agent_whose_first_move_may_be_lost_waits_for_a_claim(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
        hand_over(store, "ada")
    lose_the_last_line(lab, lines=2)
    assert not recover(lab).has_whole_journal
    with lab.open() as store:
        with pytest.raises(FailedPrecondition, match="agents claim ada") as caught:
            publish(store, "ada", SyntheticAgent(SMALL, 1).turn(300), 1)
        assert caught.value.reason == "AGENT_MOVING"


def test_an_agent_that_is_named_again_is_no_other_stores(lab: Lab) -> None:
    with_three(lab)
    (lab.root / journal.NAME).unlink()
    lose_the_index(lab)
    [space] = recover(lab).namespaces
    with lab.open() as store:
        assert [store.owners.of(NS, name).is_owned for name in space.named_anew] == [True] * 3


def test_a_fact_outlives_its_agent(lab: Lab) -> None:
    with_three(lab)
    with lab.open() as store:
        store.agents.delete(NS, "moved")
        assert store.owners.of(NS, "moved").state is OwnerState.MOVED
    assert states(lab) == AS_IT_WAS


def test_a_handed_over_agent_is_nobodys_lease(lab: Lab) -> None:
    with lab.open() as store:
        turn = SyntheticAgent(SMALL, 1).turn(300)
        kv_hash = publish(store, "ada", turn, 0).kv_identity_hash
        lease = store.leases.acquire(NS, "ada", kv_hash, "engine")
        with pytest.raises(FailedPrecondition) as caught:
            store.moves.offer(NS, "ada", "studio", "m" * 16, 0, anybody)
        assert caught.value.reason == "LEASE_HELD"
        store.leases.release(NS, "ada", kv_hash, lease.token)
        hand_over(store, "ada")
        for call in (
            lambda: store.leases.acquire(NS, "ada", kv_hash, "engine"),
            lambda: store.leases.renew(NS, "ada", kv_hash, lease.token),
            lambda: store.agents.fork(NS, "ada", "ada"),
        ):
            with pytest.raises(FailedPrecondition) as caught:
                call()
            assert (caught.value.reason, caught.value.metadata["owner"]) == ("AGENT_MOVED", "studio")
