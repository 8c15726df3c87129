"""Agents that change hands between real stores: one owner, nothing lost, and every other call defined meanwhile."""

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats.archive import pack
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.ownership import FIRST_MOVE
from cachestore_svc.moving.peering.peers import answers_of_peer
from tests.cachestore.moving.two_stores import Mac, as_peer, macs, refused, run, state
from tests.cachestore.service.running import assert_whole, publish
from tests.made_models.synthetic import SMALL, TINY, SyntheticAgent
from tests.running.waiting import eventually

KV = kv_identity_hash(SMALL)
TINY_HASH = kv_identity_hash(TINY)


def test_a_moved_agent_is_the_destinations_whole_and_can_be_extended_only_there(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 1)
    first, second = ada.turn(600), ada.turn(300)
    publish(laptop, name, first, 0)
    other = SyntheticAgent(TINY, 2).turn(300)
    publish(laptop, name, other, 1)
    laptop.update_agent(name, labels={"team": "red"}, is_pinned=True)
    made = studio.move_agent(name, from_peer="laptop")
    assert {line.origin for line in made.lines} == {pb.ORIGIN_MOVE}
    assert len(made.lines) == 2
    assert (made.labels["team"], made.is_pinned) == ("red", True)
    assert made.labels[FIRST_MOVE] == laptop.get_agent(name).labels[FIRST_MOVE]
    publish(studio, name, second, 2)
    assert_whole(studio, name, second)
    assert state(laptop, name) == (pb.OWNER_STATE_MOVED, "studio")
    refused(lambda: publish(laptop, name, second, 2), "AGENT_MOVED", "studio")
    assert laptop.get_snapshot(name, KV)[1] == first.manifest_bytes


def test_a_move_of_a_given_id_is_not_done_by_another_one(laptop: StoreClient, studio: StoreClient, name: str) -> None:
    publish(laptop, name, SyntheticAgent(SMALL, 7).turn(300), 0)
    moved = laptop.move_agent(name, to_peer="studio", move_id="1" * 16)
    refused(lambda: laptop.move_agent(name, to_peer="studio", move_id="2" * 16), "MOVE_UNKNOWN")
    for move_id in ("1" * 16, ""):
        assert laptop.move_agent(name, to_peer="studio", move_id=move_id).ownership == moved.ownership


def test_the_newest_of_several_lines_is_the_newest_where_an_agent_moves_to(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    small, tiny = SyntheticAgent(SMALL, 31), SyntheticAgent(TINY, 32)
    first, other = small.turn(300), tiny.turn(300)
    publish(laptop, name, first, 0)
    publish(laptop, name, other, 1)
    here, there = laptop, studio
    for _ in range(2):
        there.move_agent(name, from_peer="laptop" if here is laptop else "studio")
        assert there.get_snapshot(name)[1] == here.get_snapshot(name)[1]
        # The other line's newest manifest is there already, from before: it becomes the newest again.
        old = there.get_snapshot(name, KV if there is studio else TINY_HASH)[0]
        there.rollback_agent(name, old.version)
        assert there.get_snapshot(name)[0].manifest == old.manifest
        here, there = there, here
    laptop.move_agent(name, to_peer="studio")
    assert studio.get_snapshot(name)[1] == laptop.get_snapshot(name)[1]


def test_a_copy_that_nobody_extended_blocks_no_move_though_its_version_is_retired(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 33)
    publish(laptop, name, ada.turn(300), 0)
    studio.pull_agent("laptop", name)
    for parent in range(1, 13):  # more than are kept
        turn = ada.turn(20)
        publish(laptop, name, turn, parent)
    assert studio.pull_agent("laptop", name).manifest.hash == turn.manifest_digest.hash
    for parent in range(13, 25):
        turn = ada.turn(20)
        publish(laptop, name, turn, parent)
    studio.move_agent(name, from_peer="laptop")
    assert_whole(studio, name, turn)
    # What somebody extended there is nobody's copy.
    for parent, agent in enumerate((ada, SyntheticAgent(SMALL, 34))):
        other = f"{name} other {parent}"
        publish(laptop, other, SyntheticAgent(SMALL, 35).turn(300), 0)
        studio.pull_agent("laptop", other)
        publish(studio, other, agent.turn(300), 1)
        with pytest.raises(AlreadyExists) as refused_move:
            studio.move_agent(other, from_peer="laptop")
        assert refused_move.value.reason == "NOT_AN_ANCESTOR"


@pytest.mark.parametrize("moves", [False, True], ids=["pulled", "moved"])
def test_a_copy_that_was_extended_beyond_what_is_kept_comes_back(
    laptop: StoreClient, studio: StoreClient, name: str, moves: bool
) -> None:
    ada = SyntheticAgent(SMALL, 37)
    publish(laptop, name, ada.turn(300), 0)
    studio.pull_agent("laptop", name)
    for parent in range(1, 13):
        turn = ada.turn(20)
        publish(studio, name, turn, parent)
    assert 1 not in [kept.version for kept in studio.list_snapshots(name).snapshots]
    if moves:
        laptop.move_agent(name, from_peer="studio")
    else:
        laptop.pull_agent("studio", name)
    assert_whole(laptop, name, turn)


def test_bytes_that_go_ahead_of_a_move_are_no_agent(laptop: StoreClient, studio: StoreClient, name: str) -> None:
    turn = SyntheticAgent(SMALL, 36).turn(600)
    publish(laptop, name, turn, 0)
    kinds = [each.WhichOneof("event") for each in laptop.copying_agent("studio", name, only_bytes=True)]
    assert set(kinds) == {"progress"}
    with pytest.raises(NotFound):
        studio.get_agent(name)
    *_, last = (each.progress for each in studio.moving_agent(name, from_peer="laptop") if each.HasField("progress"))
    assert last.blobs_skipped == last.blobs_total > 1
    assert_whole(studio, name, turn)


def test_a_call_that_is_repeated_finds_its_work_done(laptop: StoreClient, studio: StoreClient, name: str) -> None:
    publish(laptop, name, SyntheticAgent(SMALL, 3).turn(300), 0)
    first = studio.move_agent(name, from_peer="laptop")
    assert studio.move_agent(name, from_peer="laptop") == first


@pytest.mark.parametrize("only_copies", [False, True])
def test_an_agent_that_is_not_here_is_given_to_nobody_and_the_refusal_names_no_peer(
    only_copies: bool, laptop: StoreClient, name: str
) -> None:
    def give() -> object:
        if only_copies:
            return list(laptop.copying_agent("studio", name))
        return laptop.move_agent(name, to_peer="studio")

    with pytest.raises(NotFound) as missing:
        give()
    assert "peer" not in missing.value.message


def test_an_agent_moves_by_order_of_its_source_and_comes_back(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 4)
    turns = [ada.turn(300) for _ in range(3)]
    publish(laptop, name, turns[0], 0)
    laptop.move_agent(name, to_peer="studio")
    publish(studio, name, turns[1], 1)
    back = laptop.move_agent(name, from_peer="studio")
    assert (back.lines[0].version, back.lines[0].manifest.hash) == (2, turns[1].manifest_digest.hash)
    publish(laptop, name, turns[2], 2)
    assert_whole(laptop, name, turns[2])
    refused(lambda: publish(studio, name, turns[2], 2), "AGENT_MOVED", "laptop")
    again = laptop.move_agent(name, to_peer="studio")
    assert_whole(studio, name, turns[2])
    assert again.ownership.generation == 3


def test_an_agent_with_as_many_labels_as_it_may_have_moves_and_comes_back(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    """And changes its labels afterwards: the id of its first move is none of its caller's."""
    publish(laptop, name, SyntheticAgent(SMALL, 21).turn(300), 0)
    labels = {f"{number:02}": "x" * 62 for number in range(64)}  # 4,096 bytes
    laptop.update_agent(name, labels=labels)
    for here, there in ((laptop, "studio"), (studio, "laptop")):
        here.move_agent(name, to_peer=there)
    made = laptop.get_agent(name).labels
    assert made == {**labels, FIRST_MOVE: made[FIRST_MOVE]}
    assert laptop.update_agent(name, labels={**made, "00": "y"}).labels["00"] == "y"
    for too_much in ({"64": "y"}, {"00": "y" * 63}):
        with pytest.raises(InvalidArgument, match="labels: expected at most"):
            laptop.update_agent(name, labels=too_much)
    assert laptop.get_agent(name).labels == {**made, "00": "y"}


def test_a_peer_of_another_version_that_does_not_take_an_agent_is_distinguished_from_one_that_failed() -> None:
    """A store of yesterday counted the id of the first move as a label of the caller's."""
    with pytest.raises(
        FailedPrecondition, match="peer b does not take it: labels: expected at most 64, got 65"
    ) as told:
        with answers_of_peer("b"):
            raise InvalidArgument("labels: expected at most 64, got 65", field="labels")
    assert told.value.reason == "PEER_VERSION_DIFFERS"


def test_only_what_lacks_is_sent_and_a_dry_run_says_it_and_sends_no_blob(
    pair: tuple[Mac, Mac], laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 5)
    publish(laptop, name, ada.turn(256 * 20), 0)
    [dry] = list(studio.moving_agent(name, from_peer="laptop", dry_run=True))
    assert (dry.progress.blobs_total, dry.progress.blobs_skipped, dry.progress.bytes_done) == (20, 0, 0)
    assert laptop.get_agent(name).ownership == pb.Ownership()
    refused(lambda: studio.get_agent(name), "AGENT_NOT_FOUND")
    studio.move_agent(name, from_peer="laptop")
    turn = ada.turn(50)
    publish(studio, name, turn, 1)
    cable = pair[0].cables["studio"]
    before = cable.received_bytes + cable.sent_bytes
    laptop.move_agent(name, from_peer="studio")
    sent = cable.received_bytes + cable.sent_bytes - before
    assert sent <= sum(digest.size_bytes for digest in turn.new_blobs) + len(turn.manifest_bytes) + (64 << 10)


def test_every_call_on_an_agent_that_has_moved_is_defined(laptop: StoreClient, studio: StoreClient, name: str) -> None:
    ada = SyntheticAgent(SMALL, 6)
    turn = ada.turn(300)
    publish(laptop, name, turn, 0)
    studio.move_agent(name, from_peer="laptop")
    studio.fork_agent(name, f"{name} fork")
    for call in (
        lambda: laptop.rollback_agent(name, 1),
        lambda: laptop.update_agent(name, is_pinned=True),
        lambda: laptop.import_agent(name, pack(turn.manifest, turn.new_blobs, agent_id=name), replace=True),
        lambda: laptop.pull_agent("studio", f"{name} fork", local_agent_id=name),
        lambda: laptop.acquire_lease(name, KV, "engine"),
        lambda: laptop.fork_agent(name, name),
        lambda: laptop.claim_agent(name),
        lambda: studio.pull_agent("laptop", name, local_agent_id=f"{name} copy"),
    ):
        refused(call, "AGENT_MOVED", "studio")
    laptop.fork_agent(name, f"{name} fork")
    publish(laptop, f"{name} fork", ada.turn(300), 1)
    list(laptop.export_agent(name))
    laptop.delete_agent(name)
    # The copy is gone; whose the name is stays known.
    refused(lambda: publish(laptop, name, turn, 0), "AGENT_MOVED", "studio")
    refused(lambda: laptop.get_agent(name), "AGENT_NOT_FOUND")
    laptop.move_agent(name, from_peer="studio")
    assert_whole(laptop, name, turn)


def test_an_agent_that_is_another_is_not_replaced_and_an_older_copy_is(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 7)
    publish(laptop, name, ada.turn(300), 0)
    mine = SyntheticAgent(SMALL, 8).turn(300)
    publish(studio, name, mine, 0)
    for call in (
        lambda: studio.move_agent(name, from_peer="laptop"),
        lambda: laptop.move_agent(name, to_peer="studio"),
    ):
        with pytest.raises(AlreadyExists):
            call()
    assert laptop.get_agent(name).ownership.state in (0, pb.OWNER_STATE_OWNED)
    publish(laptop, name, ada.turn(300), 1)
    assert_whole(studio, name, mine)
    studio.delete_agent(name)
    studio.pull_agent("laptop", name)
    publish(laptop, name, last := ada.turn(300), 2)
    laptop.move_agent(name, to_peer="studio")
    assert_whole(studio, name, last)


def test_a_credential_for_pulls_alone_takes_no_agent(tmp_path_factory: pytest.TempPathFactory) -> None:
    with macs(tmp_path_factory.mktemp("one-way")) as (source, _):
        (source.home.root / "peers.toml").write_text("")
        source.start()
        with source.client() as owner, as_peer(source, "studio") as peer:
            publish(owner, "ada", SyntheticAgent(SMALL, 13).turn(300), 0)
            assert peer.get_agent("ada").agent_id == "ada"
            refused(lambda: peer.offer_agent("ada", "2" * 16, 0), "PEER_CONFIGURATION")
            refused(lambda: peer.fence_agent("ada", 7), "PEER_CONFIGURATION")
            refused(lambda: list(peer.moving_agent("ada", from_peer="studio")), "INVALID_FIELD")


def test_what_a_peer_does_not_have_is_not_found(studio: StoreClient) -> None:
    with pytest.raises(NotFound):
        studio.move_agent("nobody", from_peer="laptop")
    with pytest.raises(NotFound):
        studio.move_agent("nobody", from_peer="nowhere")
    with pytest.raises(NotFound):
        studio.claim_agent("nobody")
    with pytest.raises(NotFound):
        studio.claim_agent("nobody", force=True)
    with pytest.raises(InvalidArgument):
        studio.move_agent("nobody")


def test_a_peer_gives_copies_and_replaces_only_what_it_gave(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 16)
    publish(laptop, name, ada.turn(300), 0)
    for version in (1, 2):
        steps = list(laptop.copying_agent("studio", name, kv_identity_hash=KV))
        assert steps[-1].done.version == version
        publish(laptop, name, last := ada.turn(300), version)
    assert studio.get_agent(name).ownership.state in (0, pb.OWNER_STATE_OWNED)
    publish(studio, name, SyntheticAgent(SMALL, 17).turn(300), 2)
    with pytest.raises(AlreadyExists):
        list(laptop.copying_agent("studio", name, kv_identity_hash=KV))
    studio.delete_agent(name)
    dry = list(laptop.copying_agent("studio", name, dry_run=True))
    assert [step.WhichOneof("event") for step in dry] == ["progress"]
    laptop.move_agent(name, to_peer="studio")
    assert_whole(studio, name, last)


def test_copies_are_renewed_by_the_owner_wherever_the_agent_has_been(
    laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 20)
    publish(laptop, name, ada.turn(300), 0)
    laptop.move_agent(name, to_peer="studio")
    publish(studio, name, ada.turn(300), 1)
    laptop.move_agent(name, from_peer="studio")
    for version in range(2, 13):  # more than are kept
        publish(laptop, name, last := ada.turn(40), version)
    list(laptop.copying_agent("studio", name))
    assert_whole(studio, name, last)
    assert state(studio, name) == (pb.OWNER_STATE_MOVED, "laptop")
    refused(lambda: publish(studio, name, ada.turn(40), 3), "AGENT_MOVED", "laptop")


def test_sync_counts_what_it_sends_of_every_line(pair: tuple[Mac, Mac], laptop: StoreClient, name: str) -> None:
    small, tiny = SyntheticAgent(SMALL, 22), SyntheticAgent(TINY, 23)
    turns = [small.turn(600), tiny.turn(300)]
    for parent, turn in enumerate(turns):
        publish(laptop, name, turn, parent)
    [planned] = run(pair[0], "sync", name, "--to", "studio", "--dry-run")
    [copied] = run(pair[0], "sync", name, "--to", "studio")
    blobs = [digest for turn in turns for digest in turn.digests]
    for row in (planned, copied):
        assert (row["blobs"], row["blobs_skipped"]) == (len(blobs), 0)
        assert row["bytes_sent"] == row["bytes"] == sum(digest.size_bytes for digest in blobs)
    new = small.turn(300)
    publish(laptop, name, new, 2)  # the other line has nothing new
    [renewed] = run(pair[0], "sync", name, "--to", "studio")
    assert renewed["bytes_sent"] == sum(digest.size_bytes for digest in new.new_blobs)


def test_the_commands_move_copy_and_take_back(
    pair: tuple[Mac, Mac], laptop: StoreClient, studio: StoreClient, name: str
) -> None:
    ada = SyntheticAgent(SMALL, 18)
    publish(laptop, name, ada.turn(600), 0)
    laptop.update_agent(name, labels={"kind": name})
    dry = run(pair[0], "move", name, "--to", "studio", "--dry-run")
    assert (dry["bytes_sent"], dry["blobs_skipped"], "agent" in dry) == (dry["bytes"], 0, False)
    [copied] = run(pair[0], "sync", "--label", f"kind={name}", "--to", "studio")
    assert (copied["error"], copied["bytes_sent"]) == ("", copied["bytes"])
    publish(laptop, name, ada.turn(300), 1)
    moved = run(pair[1], "move", name, "--from", "laptop")
    assert moved["agent"]["ownership"]["state"] == "owned"
    assert 0 < moved["bytes_sent"] < moved["bytes"]
    publish(studio, name, newest := ada.turn(300), 2)
    [renewed] = run(pair[0], "sync", name, "--from", "studio")
    assert (renewed["error"], laptop.get_snapshot(name)[1]) == ("", newest.manifest_bytes)
    [left_alone] = run(pair[0], "sync", name, "--to", "studio", code=4)
    assert (left_alone["error"], "has moved" in left_alone["message"]) == ("AGENT_MOVED", True)
    refused = run(pair[0], "claim", name, code=4)["error"]
    assert (refused["reason"], f"claim {name} --force" in refused["message"]) == ("AGENT_MOVED", True)
    assert run(pair[0], "show", name)["ownership"]["peer"] == "studio"
    claimed = run(pair[0], "claim", name, "--force")
    assert claimed["ownership"]["state"] == "owned"
    eventually(lambda: state(studio, name) == (pb.OWNER_STATE_MOVED, "laptop"))
    assert run(pair[0], "move", name, code=2)["error"]["field"] == "peer"
