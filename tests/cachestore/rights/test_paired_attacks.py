"""What a peer that was given `read` cannot do, and how much one that was given more can."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import AioStoreClient
from kvasir.errors import FailedPrecondition, KvasirError, NotFound, ResourceExhausted
from kvasir.formats.frame_messages import carrier_bytes
from kvasir.names import RESERVED_PREFIXES
from kvasir_gateway import conversations

from cachestore_svc.facts.ownership import CLAIM_STEP, MAX_TOLD_GENERATION, OwnerState
from cachestore_svc.pairing import rights
from cachestore_svc.pairing.identity import new_identity
from cachestore_svc.recovery import salvage
from inference_svc.memory import token_lines
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.peered import Mac, drained, macs
from tests.made_models.synthetic import SMALL, SyntheticAgent

Play = Callable[[Mac, Mac, AioStoreClient], Coroutine[Any, Any, None]]
MOVE = "ab" * 8


def played(root: Path, play: Play, **settings: Any) -> None:
    """Ada's store, mallory's, and a program that has mallory's token at ada's."""

    async def run() -> None:
        async with macs("ada", "mallory", root=root, **settings) as (ada, mallory), ada.as_peer("mallory") as peer:
            await ada.publish("work", SyntheticAgent(SMALL, 1).turn(30), 0)
            await play(ada, mallory, peer)

    asyncio.run(run())


async def refused(call: Awaitable[object], reason: str = "PEER_MAY_NOT") -> KvasirError:
    with pytest.raises(KvasirError) as caught:
        await call
    assert caught.value.reason == reason, caught.value
    return caught.value


def audited(mac: Mac) -> list[str]:
    return [f"{line['what']} {line['outcome']} {line['reason']}" for line in mac.audit.of("mallory")]


async def noted(mac: Mac, line: str) -> None:
    """Wait for a line of the audit: it may come after the answer."""
    for _ in range(500):
        if line in audited(mac):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{line} is not in {audited(mac)}")


@pytest.mark.parametrize("word", ["hand over", "undo"])
def test_a_peer_that_was_removed_ends_no_move_that_it_began(tmp_path: Path, word: str) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="claim")
        answer = await peer.offer_agent("work", MOVE, 0)
        ada.remove("mallory")
        call = peer.undo_move("work", MOVE) if word == "undo" else peer.hand_over_agent("work", MOVE, answer.generation)
        await refused(call, "PEER_UNKNOWN")
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVING
        await ada.owner.claim_agent("work", force=True)
        assert ada.store.owners.of(NS, "work").state is OwnerState.OWNED

    played(tmp_path, play)


def test_a_peer_whose_right_was_lowered_ends_no_move_that_it_began(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="move")
        answer = await peer.offer_agent("work", MOVE, 0)
        ada.allow("mallory", gives="read")
        await refused(peer.hand_over_agent("work", MOVE, answer.generation))
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVING
        await noted(ada, "MovingService/HandOverAgent refused PEER_MAY_NOT")
        ada.allow("mallory", gives="move")
        await peer.hand_over_agent("work", MOVE, answer.generation)
        ada.allow("mallory", gives="read")
        await peer.hand_over_agent("work", MOVE, answer.generation)  # the answer may have been lost: it was decided
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVED

    played(tmp_path, play)


def test_a_token_is_no_paired_peer_of_its_name(tmp_path: Path) -> None:
    """One that was written by hand began a move, and was taken out of the file; its token is still a credential."""
    key = new_identity().certificate.text

    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="claim", takes="move")
        answer = await peer.offer_agent("work", MOVE, 0)
        ada.allow("mallory", gives="claim", takes="move", certificate=key, namespaces=(NS,))
        for call in (
            peer.hand_over_agent("work", MOVE, answer.generation),
            peer.undo_move("work", MOVE),
            peer.offer_agent("work", MOVE, answer.generation),
            peer.fence_agent("work", answer.generation + 1),
            drained(peer.moving_agent("hers")),
            drained(peer.pulling_agent("", "hers")),
        ):
            await refused(call, "PEER_UNKNOWN")
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVING

    played(tmp_path, play)


def test_nobody_fences_an_agent_that_it_never_had(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        for name in ("work", "no such agent"):
            for generation in (1, 2 * CLAIM_STEP):
                await refused(peer.fence_agent(name, generation))
        assert ada.store.owners.of(NS, "work").generation == 0
        await ada.publish("work", SyntheticAgent(SMALL, 2).turn(30), 1)
        await ada.publish("no such agent", SyntheticAgent(SMALL, 3).turn(30), 0)
        assert ada.store.owners.known() == []
        assert audited(ada) == 4 * ["MovingService/FenceAgent refused PEER_MAY_NOT"]

    played(tmp_path, play)


def test_a_claim_ends_what_a_peer_may_say_of_an_agent_that_it_had(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        mallory.allow("ada", takes="move")
        await ada.owner.move_agent("work", to_peer="mallory")
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVED
        await ada.owner.claim_agent("work", force=True)
        mine = ada.store.owners.of(NS, "work")
        for generation in (mine.generation + 1, mine.generation + 2 * CLAIM_STEP):
            await refused(peer.fence_agent("work", generation))
        # Nor by its answer to the news, nor when it is asked.
        await mallory.owner.claim_agent("work", force=True)
        await ada.services.claims.ask()
        assert ada.store.owners.of(NS, "work") == mine
        # One that was given the right to claim is believed.
        ada.allow("mallory", gives="claim")
        await peer.fence_agent("work", mine.generation + 1)
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVED

    played(tmp_path, play)


def test_a_claim_of_an_agent_that_was_only_offered_ends_it_too(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="move")
        await peer.offer_agent("work", MOVE, 0)
        await ada.owner.claim_agent("work")
        await refused(peer.fence_agent("work", 5))
        await refused(peer.hand_over_agent("work", MOVE, 1), "MOVE_UNKNOWN")

    played(tmp_path, play)


def test_a_peer_that_was_only_offered_an_agent_has_no_part_in_it_without_the_right(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="move")
        await peer.offer_agent("work", MOVE, 0)
        await peer.undo_move("work", MOVE)
        before = ada.store.owners.of(NS, "work")
        ada.allow("mallory", gives="read")
        await refused(peer.fence_agent("work", before.generation + 1))
        assert ada.store.owners.of(NS, "work") == before
        ada.allow("mallory", gives="move")  # as long as it may take agents away, it may have received this one
        await peer.fence_agent("work", before.generation + 1)
        ada.allow("mallory", gives="read")
        await peer.fence_agent("work", before.generation + 2)
        assert ada.store.owners.of(NS, "work").generation == before.generation + 2

    played(tmp_path, play)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_peer_that_an_agent_went_to_has_a_part_in_it_whatever_its_right_is_now(
    tmp_path: Path, is_ordered: bool
) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        mallory.allow("ada", gives="move", takes="move")
        ada.allow("mallory", gives="move")
        if is_ordered:
            await ada.owner.move_agent("work", to_peer="mallory")
        else:
            await mallory.owner.move_agent("work", from_peer="ada")
        ada.allow("mallory", gives="read")
        await ada.owner.move_agent("work", from_peer="mallory")
        await mallory.owner.claim_agent("work", force=True)
        await mallory.services.moves._tell(NS, "work", mallory.store.owners.of(NS, "work"))
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVED

    played(tmp_path, play)


@pytest.mark.parametrize("generation", [70 * CLAIM_STEP, MAX_TOLD_GENERATION])
def test_no_word_leaves_an_agent_without_room_for_a_claim(tmp_path: Path, generation: int) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="move")
        await peer.offer_agent("work", MOVE, 0)
        await peer.undo_move("work", MOVE)
        ada.allow("mallory", gives="claim")
        await refused(peer.fence_agent("work", generation))
        await refused(peer.offer_agent("work", 2 * MOVE, generation))
        assert ada.store.owners.of(NS, "work").is_owned
        for word in ("FenceAgent", "OfferAgent"):
            await noted(ada, f"MovingService/{word} refused PEER_MAY_NOT")
        mallory.allow("ada", takes="move")
        await ada.owner.move_agent("work", to_peer="mallory")
        assert mallory.store.owners.of(NS, "work").is_owned

    played(tmp_path, play)


@pytest.mark.parametrize("said", [str(70 * CLAIM_STEP), str((1 << 63) - 1), "9" * 5000, "-1", "many", "²", ""])
def test_no_answer_leaves_an_agent_without_room_for_a_claim(tmp_path: Path, said: str) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="claim")
        mallory.allow("ada", takes="move")
        await ada.owner.move_agent("work", to_peer="mallory")

        async def know_better(*_: object) -> None:
            raise FailedPrecondition("newer", reason="OWNER_NEWER", metadata={"generation": said})

        mallory.services.moving._handing_over.fence = know_better  # type: ignore[method-assign]
        for claims in (1, 2):
            await ada.owner.claim_agent("work", force=True)
            assert ada.store.owners.of(NS, "work").is_owned
            assert ada.store.owners.of(NS, "work").generation // CLAIM_STEP == claims

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("agents", "owners"),
    [({}, {"generation": (1 << 62) + 7}), *(({"retained_versions": kept}, {}) for kept in (-5, 1 << 30))],
    ids=["a generation above which there is no claim", "kept versions below 0", "too many kept versions"],
)
def test_an_agent_comes_with_no_number_that_a_source_may_not_give(
    tmp_path: Path, agents: dict[str, int], owners: dict[str, int]
) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        await mallory.publish("x", SyntheticAgent(SMALL, 4).turn(30), 0)
        mallory.allow("ada", gives="move")
        offer = mallory.services.moving._handing_over.offer

        async def boast(*args: Any) -> Any:
            agent, known = await offer(*args)
            return replace(agent, **agents), replace(known, **owners)

        mallory.services.moving._handing_over.offer = boast  # type: ignore[method-assign]
        told = await refused(ada.owner.move_agent("x", from_peer="mallory"))
        assert not agents or ("mallory" in told.message and "retained_versions" in told.message)
        assert ada.store.owners.of(NS, "x").generation == 0
        assert mallory.store.owners.of(NS, "x").is_owned

    played(tmp_path, play)


def test_an_agent_is_neither_taken_nor_given_back_changed(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        told = await refused(mallory.owner.move_agent("work", from_peer="ada"))
        assert "`kvasir peers allow mallory --gives move`" in told.message
        assert ada.store.owners.of(NS, "work").is_owned
        ada.allow("mallory", gives="move")  # may take, and still not bring
        await mallory.owner.move_agent("work", from_peer="ada")
        await mallory.publish("work", SyntheticAgent(SMALL, 9).turn(30), 1)
        told = await refused(mallory.owner.move_agent("work", to_peer="ada"))
        assert "--takes move" in told.message
        assert [each.version for each in ada.store.snapshots.page(NS, "work").snapshots] == [1]

    played(tmp_path, play)


def test_words_and_facts_of_a_peer_are_counted_and_stay_off_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachestore_svc.moving.peering.peer_limits._WORDS", 50.0)
    monkeypatch.setattr("cachestore_svc.moving.peering.peer_limits._WORDS_PER_S", 0.0)  # a busy machine takes seconds

    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="move")
        reason = ""
        for number in range(60):
            try:
                await peer.undo_move(f"name {number}", MOVE)
            except KvasirError as error:
                reason = error.reason
                break
        assert (reason, ada.store.owners.known()) == ("PEER_LIMIT", [])

    played(tmp_path / "words", play)

    async def offers(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="move")
        for name in ("a", "b"):
            await ada.publish(name, SyntheticAgent(SMALL, 5).turn(30), 0)
        monkeypatch.setattr("cachestore_svc.store.move_steps.MAX_OPEN_MOVES", 1)
        await peer.offer_agent("work", MOVE, 0)
        await refused(peer.offer_agent("a", MOVE, 0), "PEER_LIMIT")
        monkeypatch.setattr("cachestore_svc.store.move_steps.MAX_OPEN_MOVES", 9)
        monkeypatch.setattr("cachestore_svc.store.move_steps.MAX_FACTS", 1)
        await refused(peer.offer_agent("a", MOVE, 0), "PEER_LIMIT")
        await peer.undo_move("work", MOVE)
        await peer.offer_agent("work", MOVE[::-1], 1)  # it has a part in that one already
        monkeypatch.setattr("cachestore_svc.store.move_steps.MAX_FACTS", 9)
        monkeypatch.setattr("cachestore_svc.blobs.space.Space.is_disk_full", True)
        await refused(peer.offer_agent("b", MOVE, 0), "DISK_FULL")
        await refused(peer.fence_agent("work", 7), "DISK_FULL")
        mallory.allow("ada", takes="move")
        assert {agent for _, agent, _ in ada.store.owners.known()} == {"work"}

    played(tmp_path / "facts", offers)


@pytest.mark.long(5)
def test_a_move_that_comes_to_no_end_ends_and_costs_its_peer_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", gives="move")
        moving, now = ada.services.moving._handing_over, [0.0]
        monkeypatch.setattr(moving, "_steady", lambda: now[0])
        monkeypatch.setattr(moving._limits, "_steady", lambda: now[0])
        refusals = turns = 0
        for second in range(0, 3 * 3600, 25):  # she asks before her silence ends it, for three hours
            now[0] = float(second)
            with contextlib.suppress(ResourceExhausted):
                await peer.offer_agent("work", f"{second:016x}", ada.store.owners.of(NS, "work").generation)
            known = ada.store.owners.of(NS, "work")
            await moving.undo_if_silent(NS, "work", known)
            turns, refusals = turns + 1, refusals + (known.state is OwnerState.MOVING)
        assert refusals < turns / 4, (refusals, turns)
        now[0] += 10_000
        generation = ada.store.owners.of(NS, "work").generation
        await peer.offer_agent("work", MOVE, generation)  # and it is not for ever
        await ada.owner.claim_agent("work")
        now[0] += 10_000
        await peer.offer_agent("work", MOVE[::-1], generation + 1)  # one that her owner ended is over
        await moving.undo_if_silent(NS, "work", ada.store.owners.of(NS, "work"))
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVING

    played(tmp_path, play)


def test_nothing_that_a_peer_gives_has_a_name_that_kvasir_makes(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        ada.allow("mallory", takes="move")
        for prefix in RESERVED_PREFIXES:
            name = f"{prefix}aabbcc/ffff"
            await mallory.publish(name, SyntheticAgent(SMALL, 4).turn(30), 0)
            await mallory.publish(f"her {name}", SyntheticAgent(SMALL, 4).turn(30), 0)
            await refused(drained(peer.pulling_agent("", f"her {name}", local_agent_id=name)))
            await refused(drained(peer.pulling_agent("", name, only_bytes=True)))
            await refused(mallory.owner.move_agent(name, to_peer="ada"))
            with pytest.raises(NotFound):
                ada.store.agents.get(NS, name)
        await drained(peer.pulling_agent("", "her tokens/aabbcc/ffff", local_agent_id="hers"))
        # What ada's own user moved there may come back.
        await ada.publish("conversation/1", SyntheticAgent(SMALL, 6).turn(30), 0)
        mallory.allow("ada", takes="move")
        mallory_takes = await refused(ada.owner.move_agent("conversation/1", to_peer="mallory"))
        assert "conversation" in mallory_takes.message
        ada.allow("mallory", gives="move", takes="move")
        await mallory.owner.move_agent("conversation/1", from_peer="ada")
        await mallory.owner.move_agent("conversation/1", to_peer="ada")
        assert ada.store.owners.of(NS, "conversation/1").is_owned

    played(tmp_path, play)


def test_a_peer_brings_so_many_agents_and_bytes_and_no_more(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        turn = SyntheticAgent(SMALL, 4).turn(30)
        await mallory.publish("hers", turn, 0)
        await refused(drained(peer.pulling_agent("", "hers")))
        size_bytes = sum(digest.size_bytes for digest in turn.digests)
        ada.allow("mallory", takes="copy", max_agents=2, max_bytes=3 * size_bytes)
        for name in ("one", "two", "one"):
            await drained(peer.pulling_agent("", "hers", local_agent_id=name))
        told = await refused(drained(peer.pulling_agent("", "hers", local_agent_id="three")), "PEER_LIMIT")
        assert "nobody here has extended (2)" in told.message
        await ada.owner.delete_agent("two")
        await ada.publish("one", SyntheticAgent(SMALL, 8).turn(30), 1)  # ada's own from here on
        ada.services.moves._receiving.bringing._brought.clear()  # it is looked at again after a minute
        await drained(peer.pulling_agent("", "hers", local_agent_id="three"))
        ada.allow("mallory", takes="copy", max_bytes=2 * size_bytes - 1)
        told = await refused(drained(peer.pulling_agent("", "hers", local_agent_id="four")), "PEER_LIMIT")
        assert "bytes of agents" in told.message
        await refused(mallory.owner.move_agent("hers", to_peer="ada"))

    played(tmp_path, play)


@pytest.mark.parametrize("verb", ["move", "copy", "only bytes"])
def test_bytes_of_a_cut_transfer_count_as_long_as_it_lasts(tmp_path: Path, verb: str) -> None:
    """Sent bytes stay counted as sent; a part of a blob, too. Garbage collection takes what no agent names."""

    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        turns = [SyntheticAgent(SMALL, seed).turn(1200) for seed in (4, 5)]
        for name, turn in zip(("hers", "next"), turns, strict=True):
            await mallory.publish(name, turn, 0)
        size_bytes = sum(digest.size_bytes for digest in turns[0].digests)
        ada.allow("mallory", takes="move", max_bytes=int(size_bytes * 1.5))
        read, reached, cut_at = mallory.services.store.ReadBlobs, asyncio.Event(), turns[0].digests[1]

        async def stop(request: Any, context: Any) -> None:
            """Send the first blob and half of the second, then nothing."""
            for digest, part in ((turns[0].digests[0], 1), (cut_at, 2)):
                data = turns[0].new_blobs[digest][: digest.size_bytes // part]
                await context.write(carrier_bytes([(pb.BlobFrame(digest=digest.to_proto()), memoryview(data))]))
            reached.set()
            await asyncio.Event().wait()

        def sending(name: str) -> Any:
            if verb == "move":
                return mallory.owner.moving_agent(name, to_peer="ada")
            return mallory.owner.copying_agent("ada", name, only_bytes=verb == "only bytes")

        mallory.services.store.ReadBlobs = stop  # type: ignore[method-assign]
        steps = sending("hers")
        cutting = asyncio.create_task(drained(steps))
        await reached.wait()
        bringing = ada.services.moves._receiving.bringing
        assert sum((await bringing._of(NS, "mallory")).values()) == size_bytes
        for _ in range(500):  # what is sent has not come yet
            if ada.store.blobs.write_status(NS, cut_at).received_bytes:
                break
            await asyncio.sleep(0.01)
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        for _ in range(500):
            if not bringing._coming:
                break
            await asyncio.sleep(0.01)
        assert await bringing._of(NS, "mallory") == {}
        bucket = bringing._limits._buckets["mallory", "bytes"]
        came_bytes = turns[0].digests[0].size_bytes + cut_at.size_bytes // 2
        manifest_bytes = turns[0].manifest_digest.size_bytes
        assert int(size_bytes * 1.5) - bucket.left == pytest.approx(manifest_bytes + came_bytes, abs=size_bytes / 100)
        ada.store.care.collect_garbage(NS)
        ada.clock.pass_s(1e6)
        assert ada.store.care.collect_garbage(NS).blobs_swept == 2
        assert ada.store.blobs.write_status(NS, cut_at).received_bytes == 0
        mallory.services.store.ReadBlobs = read  # type: ignore[method-assign]
        await drained(sending("next"))
        assert (await bringing._of(NS, "mallory")).keys() == (set() if verb == "only bytes" else {"next"})

    played(tmp_path, play)


def test_a_dry_run_takes_nothing_of_what_a_peer_may_send(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        size_bytes = sum(line.total_bytes for line in ada.store.agents.get(NS, "work").lines)
        mallory.allow("ada", takes="move", max_bytes=int(size_bytes * 1.5))
        for _ in range(3):
            await drained(ada.owner.moving_agent("work", to_peer="mallory", dry_run=True))
            await drained(ada.owner.copying_agent("mallory", "work", dry_run=True))
        await ada.owner.move_agent("work", to_peer="mallory")

    played(tmp_path, play)


def test_an_owner_gives_an_agent_to_a_store_that_once_claimed_it(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        mallory.allow("ada", takes="move")
        await ada.owner.move_agent("work", to_peer="mallory")
        await ada.owner.claim_agent("work", force=True)
        for _ in range(2):
            await mallory.owner.claim_agent("work", force=True)
        await mallory.owner.delete_agent("work", force=True)
        theirs = mallory.store.owners.of(NS, "work").generation
        assert theirs > ada.store.owners.of(NS, "work").generation
        await ada.owner.move_agent("work", to_peer="mallory")
        assert ada.store.owners.of(NS, "work").state is OwnerState.MOVED
        assert mallory.store.owners.of(NS, "work").is_owned
        assert mallory.store.owners.of(NS, "work").generation == theirs + 1

    played(tmp_path, play)


def test_names_that_kvasir_makes_are_reserved() -> None:
    for made in (conversations.PREFIX, token_lines.PREFIX, salvage._free_name("0" * 64, set())):
        assert made.startswith(RESERVED_PREFIXES)


def test_every_verb_of_the_protocol_has_its_states_and_reports_what_it_needs() -> None:
    assert set(rights.EFFECTS) == set(rights.Verb)
    assert set(rights.NEEDS) <= set(rights.Verb)


def test_the_owners_own_orders_need_no_right_at_his_store(tmp_path: Path) -> None:
    async def play(ada: Mac, mallory: Mac, peer: AioStoreClient) -> None:
        mallory.allow("ada", takes="move", gives="move")
        await ada.owner.move_agent("work", to_peer="mallory")
        await ada.owner.move_agent("work", from_peer="mallory")
        assert ada.store.owners.of(NS, "work").is_owned
        await refused(peer.offer_agent("work", MOVE, 0))  # that was for once
        assert (await ada.owner.get_agent("work")).ownership.state == pb.OWNER_STATE_OWNED

    played(tmp_path, play)
