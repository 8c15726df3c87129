"""Publications against a store that loses answers, is late, or talks nonsense: no version is lost, none is overrun."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvasir import errors
from kvasir.clients import Lineage
from kvasir.formats.digest import Digest

from inference_svc.memory.lines import publications
from inference_svc.memory.lines.lines import store_owed
from inference_svc.memory.outcomes import SnapshotState
from inference_svc.memory.recall import Recall
from inference_svc.memory.store.answers import NO_HEAD, Head, Version
from inference_svc.model.model_host import MemoriesLeft
from inference_svc.turns.turn_ending import TurnEnding
from tests.inference.memory.publication_world import (
    KEY,
    OTHERS,
    House,
    Pinned,
    remembered,
    run,
    taken,
)
from tests.inference.turns.parts import parts_of


def test_a_commit_whose_answer_was_lost_is_not_another_writers() -> None:
    async def scenario() -> None:
        house = House()
        house.store.lost_answers = 2
        outcome = await house.publish(remembered("one", NO_HEAD))
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 1)
        assert outcome.manifest == house.store.head.manifest

    run(scenario)


def test_a_conflict_with_ones_own_version_is_a_commit() -> None:
    async def scenario() -> None:
        house = House()
        house.store.lost_answers = 1
        real = house.store.commit

        async def forgetful(agent: str, digest: Digest, parent: int, *, lineage: Lineage, **how: object) -> Head:
            if Version(parent, lineage.parent_manifest) != house.store.head.identity:
                raise errors.Conflict("moved", metadata={"head_version": "1"})
            return cast("Head", await real(agent, digest, parent, lineage=lineage, **how))

        house.store.commit = forgetful
        outcome = await house.publish(remembered("one", NO_HEAD))
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 1)

    run(scenario)


@pytest.mark.parametrize(("named", "newest"), [({"head_version": "7"}, ": version 7 is the agent's newest"), ({}, "")])
def test_a_memory_that_lost_and_its_successor_name_the_newest_version_if_that_is_known(
    named: dict[str, str], newest: str
) -> None:
    async def scenario() -> None:
        house = House()
        house.store.refusals = [errors.Conflict("refused", metadata=named)]
        first = remembered("one", NO_HEAD)
        assert (await house.publish(first)).reason == f"another writer was first{newest}"
        second = await house.publish(remembered("one two", NO_HEAD), first)
        assert second.reason == f"another writer was first{newest}"

    run(scenario)


def test_a_version_whose_answer_never_came_is_the_next_turns_parent() -> None:
    async def scenario() -> None:
        house = House(timeout_s=0.05)
        house.store.lost_answers, house.store.goes_away = 1, True
        first, second = remembered("one", NO_HEAD), remembered("one two", NO_HEAD)
        assert (await house.publish(first)).state is SnapshotState.FAILED
        assert house.store.head.version == 1
        house.store.up.set()
        outcome = await house.publish(second, first)
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 2)

    run(scenario)


def test_a_turn_that_ended_while_its_predecessor_committed_follows_it() -> None:
    async def scenario() -> None:
        house = House()
        first = remembered("one", NO_HEAD)
        publishing = house.publish(first)
        second = remembered("one two", first.publication.standing.head)
        await publishing
        outcome = await house.publish(second, first)
        assert (outcome.state, outcome.version) == (SnapshotState.COMMITTED, 2)

    run(scenario)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_turn_has_its_predecessors_base_only_if_that_one_never_became_a_version(is_stored: bool) -> None:
    async def scenario() -> None:
        house = House(OTHERS, timeout_s=5.0 if is_stored else 0.05)
        first, second = remembered("one", OTHERS), remembered("one two", OTHERS)
        first.publication.standing = replace(first.publication.standing, base_version=3)
        house.store.up.clear()
        publishing = [house.publish(first)]
        if not is_stored:
            assert (await publishing[0]).state is SnapshotState.FAILED
        publishing.append(house.publish(second, first))
        house.store.up.set()
        assert (await publishing[1]).state is SnapshotState.COMMITTED
        assert house.store.bases == ([3, 0] if is_stored else [3])

    run(scenario)


def test_no_other_engine_gets_the_line_by_asking_while_a_publication_runs() -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        house.store.up.clear()
        publishing = house.publish(remembered("one", OTHERS))
        await asyncio.sleep(0)
        assert house.line.is_used
        house.store.up.set()
        assert (await publishing).state is SnapshotState.COMMITTED
        assert not house.line.is_used

    run(scenario)


def test_what_extends_a_memory_that_lost_loses_too() -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        house.store.up.clear()
        first, second = remembered("one", None, expected_version=5), remembered("one two", None)
        both = house.publish(first), house.publish(second, first)
        house.store.up.set()
        assert [outcome.state for outcome in await asyncio.gather(*both)] == [SnapshotState.FAILED] * 2
        assert house.store.head == OTHERS
        assert first.publication.standing.head is None
        assert not second.publication.standing.is_current(OTHERS.identity)

    run(scenario)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_memory_that_lost_is_hot_no_longer_and_a_newer_turns_stays(is_replaced: bool) -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        memory, newer = remembered("one", None, expected_version=5), remembered("one two", None)
        house.engine.hot = SimpleNamespace(tag=newer if is_replaced else memory)
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        assert (house.engine.hot is not None) is is_replaced

    run(scenario)


@pytest.mark.parametrize(("expected_version", "expected"), [(None, True), (7, True), (5, False), (0, False)])
def test_a_memory_made_without_the_store_is_stored_after_the_version_that_its_caller_named(
    expected_version: int | None, expected: bool
) -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        memory = remembered("one", None, expected_version)
        # The number alone does not say which memory it follows: as hot memory it is not used until it is stored.
        assert not memory.publication.standing.is_current(OTHERS.identity)
        outcome = await house.publish(memory)
        assert outcome.state is (SnapshotState.COMMITTED if expected else SnapshotState.FAILED)
        assert memory.publication.standing.is_current(house.store.head.identity) is expected

    run(scenario)


def test_a_version_that_was_lost_and_brought_back_is_not_the_one_that_the_next_turn_extends() -> None:
    """Its number is another: between the two the agent remembered something else, and the next turn's words with it."""

    async def scenario() -> None:
        house = House(timeout_s=0.05)
        house.store.lost_answers, house.store.goes_away = 1, True
        first, second = remembered("one", NO_HEAD), remembered("one two", NO_HEAD)
        assert (await house.publish(first)).state is SnapshotState.FAILED
        made = house.store.head
        house.store.head = Head(3, made.manifest, 2)  # others committed, and rolled back to it
        house.store.up.set()
        outcome = await house.publish(second, first)
        assert outcome.state is SnapshotState.FAILED
        assert house.store.head == Head(3, made.manifest, 2)

    run(scenario)


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_line_that_was_taken_back_is_not_extended_under_the_lease_that_came_after(taken_back: bool) -> None:
    """What was deleted and forked back has the number and the manifest that the memory follows."""

    async def scenario() -> None:
        house = House(OTHERS)
        house.store.taken_back = taken_back
        memory = remembered("one", OTHERS)
        memory.publication.standing = memory.publication.standing.under(1)
        await house.line.lease.obtain(1)
        await house.publish(memory)
        assert house.store.leases_of_commits == [("engine-1", 1 if taken_back else 2)]

    run(scenario)


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_turn_whose_line_was_given_back_is_stored_only_if_nothing_was_taken_back(taken_back: bool) -> None:
    async def scenario() -> None:
        house = House(OTHERS)
        house.store.taken_back = taken_back
        outcome = await house.publish(remembered("one", OTHERS))
        assert outcome.state is (SnapshotState.FAILED if taken_back else SnapshotState.COMMITTED)
        assert house.store.leases_of_commits == ([] if taken_back else [("engine-1", 2)])

    run(scenario)


@pytest.mark.parametrize(
    ("is_changed", "expected_version", "is_stored"), [(True, None, False), (True, 7, True), (False, None, True)]
)
def test_a_turn_that_could_not_ask_does_not_replace_one_that_another_engine_stored_meanwhile(
    is_changed: bool, expected_version: int | None, is_stored: bool
) -> None:
    """Unless its caller named that version: then it is to follow it."""

    async def scenario() -> None:
        house = House(OTHERS)
        house.store.stored = [Digest.of(b"another engine's")] if is_changed else []
        outcome = await house.publish(remembered("one", None, expected_version))
        assert (outcome.state is SnapshotState.COMMITTED) is is_stored

    run(scenario)


def test_turns_of_one_outage_are_all_stored_in_their_order() -> None:
    """None could ask. What this engine stored itself is no reason not to store the next."""

    async def scenario() -> None:
        house = House(OTHERS)
        house.store.up.clear()
        turns = [house.publish(remembered("one" + " more" * count, None)) for count in range(4)]
        house.store.up.set()
        outcomes = await asyncio.gather(*turns)
        assert [outcome.version for outcome in outcomes] == [8, 9, 10, 11]

    run(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_a_memory_that_is_on_its_way_when_its_model_goes_is_stored_once(fails: bool) -> None:
    """A second version of the same turn would make a caller that names the first one lose. If that fails, it is stored
    after it: RAM has its only copy.
    """

    async def scenario() -> None:
        house, memory, may_write = House(), remembered("one", NO_HEAD), asyncio.Event()
        write_tensors = house.store.write_tensors

        async def slow(files: list[bytes], timeout_s: float, *_known: object) -> tuple[list[Digest], int]:
            await may_write.wait()
            return cast("tuple[list[Digest], int]", await write_tensors(files, timeout_s))

        house.store.write_tensors = slow
        house.store.refusals = [errors.ResourceExhausted("no room now")] if fails else []
        house.engine.hot = SimpleNamespace(tag=memory)
        house.engine.taken.set_result(taken(memory))
        first = house.publish(memory)
        storing = asyncio.create_task(store_owed(house.engine, {KEY.namespace: house.lines}, 9, lambda: 0.0))
        await asyncio.sleep(0.05)
        may_write.set()
        assert await storing == MemoriesLeft(stored=1)
        assert (first.result().state is SnapshotState.FAILED, house.store.head.version) == (fails, 1)

    run(scenario)


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_manifest_goes_with_the_last_files_and_nothing_is_committed_before_they_are_there(is_cut: bool) -> None:
    async def scenario() -> None:
        house, memory, came = House(), remembered("one", NO_HEAD), list[bytes]()
        may_end, has_come, write = asyncio.Event(), asyncio.Event(), house.store.write_tensors

        async def watch(files: Any, timeout_s: float, hashing: object, naming: Any) -> object:
            came.append(await naming)
            has_come.set()
            if not may_end.is_set():
                await may_end.wait()
                if is_cut:
                    raise errors.Unavailable("cut")
            return await write(files, timeout_s, hashing, naming)

        house.store.write_tensors = watch
        publication = house.publish(memory)
        await has_come.wait()
        await asyncio.sleep(0.01)
        assert house.store.head == NO_HEAD
        may_end.set()
        assert (await publication).state is SnapshotState.COMMITTED
        assert (len(came), house.store.manifests) == (1 + is_cut, 1)
        assert house.store.stored == [Digest.of(came[-1])]
        assert memory.files.tail == Digest.of(b"one")

    run(scenario)


@pytest.mark.long(2)
def test_a_malformed_answer_to_a_commit_is_a_failed_snapshot_with_a_reason() -> None:
    async def scenario() -> None:
        house = House()
        house.store.refusals = [ValueError("hash: expected 64 hex")]
        memory = remembered("one", NO_HEAD)
        house.publish(memory)
        outcome = await house.line.publications.outcome(memory.publication)
        assert outcome.state is SnapshotState.FAILED
        assert "ValueError" in outcome.reason

    run(scenario)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_memory_that_cannot_be_copied_is_a_failed_snapshot_with_a_reason(is_cancelled: bool) -> None:
    async def scenario() -> None:
        house = House()
        house.engine.taken.cancel() if is_cancelled else house.engine.taken.set_exception(RuntimeError("device"))
        ending = TurnEnding(parts_of(recall=Recall(house.engine, {KEY.namespace: house.lines})))
        outcome = await ending._keep(KEY, remembered("one", NO_HEAD))
        assert outcome.state is SnapshotState.FAILED
        assert "copied" in outcome.reason

    run(scenario)


@pytest.mark.parametrize(("hot_text", "expected"), [("one", SnapshotState.COMMITTED), ("two!", SnapshotState.FAILED)])
def test_what_a_newer_turn_wrote_is_never_sent_under_an_older_memorys_words(
    hot_text: str, expected: SnapshotState
) -> None:
    async def scenario() -> None:
        house = House()
        house.store.refusals = [errors.FailedPrecondition("a block is gone")]
        memory = remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory)
        house.engine.taken.set_result(taken(remembered(hot_text, NO_HEAD)))
        assert (await house.publish(memory)).state is expected

    run(scenario)


@pytest.mark.parametrize(("retry_after_s", "state"), [(1, SnapshotState.COMMITTED), (60, SnapshotState.FAILED)])
def test_a_store_that_wants_more_time_than_there_is_is_not_waited_for(
    retry_after_s: float, state: SnapshotState
) -> None:
    """As one whose disk the system made read-only: the reader hears why, and an engine that ends has ended."""

    async def scenario() -> None:
        house, memory = House(), remembered("one", NO_HEAD)
        house.store.refusals = [errors.Unavailable("the disk failed with EROFS", retry_after_s=retry_after_s)]
        outcome = await house.publish(memory)
        assert (outcome.state, "EROFS" in outcome.reason) == (state, state is SnapshotState.FAILED)
        assert memory.publication.standing.is_stored is (state is SnapshotState.COMMITTED)

    run(scenario)


@pytest.mark.parametrize("is_hot", [True, False])
def test_what_failed_is_tried_again_while_it_is_hot_and_its_success_is_reported(
    is_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publications, "RETRY_S", 0.01)

    async def scenario() -> None:
        house, memory = House(), remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory if is_hot else remembered("one two", NO_HEAD))
        house.engine.taken.set_result(taken(memory))
        house.store.refusals = [errors.ResourceExhausted("no room now")] * 3
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        counters = house.stats.of(KEY.namespace)
        for _ in range(500 if is_hot else 5):
            if memory.publication.standing.is_stored:
                break
            await asyncio.sleep(0.01)
        assert counters.publications == {
            SnapshotState.FAILED: 1,
            **({SnapshotState.COMMITTED: 1} if is_hot else {}),
        }
        assert counters.made_good == ({SnapshotState.FAILED: 1} if is_hot else {})
        assert memory.publication.standing.is_stored is is_hot
        assert house.store.refusals == ([] if is_hot else [house.store.refusals[0]] * 2)

    run(scenario)


def test_a_memory_is_tried_again_in_its_turn_among_all_that_the_store_did_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publications, "RETRY_S", 0.001)

    async def scenario() -> None:
        house, memory = House(), remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory)
        house.engine.taken.set_result(taken(memory))
        again = house.copies.again
        while again.take_if_fits(KEY.namespace, 1):
            pass
        house.store.refusals = [errors.ResourceExhausted("no room now")]
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        await asyncio.sleep(0.05)
        assert not memory.publication.standing.is_stored
        held = again.held_units
        again.give_back(KEY.namespace, 1)
        while not memory.publication.standing.is_stored:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert again.held_units == held - 1

    run(scenario)


def test_what_the_store_refuses_for_good_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publications, "RETRY_S", 0.001)

    async def scenario() -> None:
        house, memory = House(), remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory)
        house.engine.taken.set_result(taken(memory))
        house.store.refusals = [errors.InvalidArgument("no such memory")] * 2
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        await asyncio.sleep(0.05)
        assert len(house.store.refusals) == 1

    run(scenario)


def test_a_memory_whose_copy_for_another_try_is_late_waits_for_none_that_waits_for_it() -> None:
    async def scenario() -> None:
        house, first, second = House(timeout_s=0.05), remembered("one", NO_HEAD), remembered("one two", NO_HEAD)
        publications_, late, next_turns = house.line.publications, Future[Any](), Future[Any]()
        house.engine.hot, house.engine.pin = SimpleNamespace(tag=first), lambda *_which: late
        house.store.up.clear()
        assert (await house.publish(first)).state is SnapshotState.FAILED
        house.store.up.set()
        again = asyncio.create_task(publications_.publish_owed(first))
        await asyncio.sleep(0.01)
        house.engine.hot = SimpleNamespace(tag=second)
        publishing = publications_.publish(second, next_turns, first)
        await asyncio.sleep(0.01)
        late.set_result(Pinned(taken(first)))
        await asyncio.sleep(0.01)
        next_turns.set_result(Pinned(taken(second)))
        assert (await publishing).state is SnapshotState.COMMITTED
        assert not await again

    run(scenario)


def test_a_line_that_is_forgotten_leaves_no_try_that_waits_for_its_store() -> None:
    """Whoever waits holds the engine, and with it a model that is to go."""

    async def scenario() -> None:
        house, memory = House(timeout_s=0.05), remembered("one", NO_HEAD)
        house.engine.hot = SimpleNamespace(tag=memory)
        house.store.up.clear()
        before = asyncio.all_tasks()
        assert (await house.publish(memory)).state is SnapshotState.FAILED
        assert len(asyncio.all_tasks() - before) == 1, "it is tried again"
        house.engine.hot = None  # others wanted its room
        await house.lines.beat()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before

    run(scenario)
