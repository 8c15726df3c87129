"""A commit that is sent beside its last files: to a store that lets it wait, and never in place of what is lost."""

import asyncio
from typing import Any

import pytest
from kvasir import errors
from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import SnapshotState
from inference_svc.memory.store.answers import NO_HEAD, Head
from tests.inference.memory.publication_world import House, remembered, run

HEAD = Head(3, Digest.of(b"the version before"), 2)


class WaitingHouse(House):
    """Its store lets a commit wait until tensors and manifest are there; both wait for `may_end`."""

    def __init__(self, head: Head = HEAD) -> None:
        super().__init__(head)
        self.store.features = frozenset({"awaits"})
        self.may_end = asyncio.Event()
        self.cuts: list[Exception] = []  # of the tensors
        self.refuses_to_wait = False
        self.began: list[str] = []
        self.ended: list[str] = []
        for name in ("write_tensors", "write_manifest", "commit"):
            setattr(self.store, name, self._watched(name, getattr(self.store, name)))

    async def until_all_began(self) -> None:
        while len(self.began) < 3:  # noqa: ASYNC110  they tell nobody
            await asyncio.sleep(0.001)

    def _watched(self, name: str, call: Any) -> Any:
        async def watched(*given: Any, **how: Any) -> object:
            self.began.append(name)
            try:
                if name != "commit":
                    await self.may_end.wait()
                    if name == "write_tensors" and self.cuts:
                        raise self.cuts.pop()
                elif how["awaited"]:
                    if self.refuses_to_wait:
                        raise errors.FailedPrecondition("a blob is missing", reason="BLOB_MISSING")
                    while not {"write_tensors", "write_manifest"} <= set(self.ended):  # noqa: ASYNC110  they tell nobody
                        await asyncio.sleep(0.001)
                answer = await call(*given, **how)
            except asyncio.CancelledError:
                self.ended.append(f"{name} was cancelled")
                raise
            self.ended.append(name)
            return answer

        return watched


def test_a_commit_goes_beside_its_last_files_and_names_them() -> None:
    async def scenario() -> None:
        house, memory = WaitingHouse(), remembered("one", HEAD)
        publication = house.publish(memory)
        await house.until_all_began()
        assert (sorted(house.began), house.ended) == (["commit", "write_manifest", "write_tensors"], [])
        house.may_end.set()
        assert (await publication).state is SnapshotState.COMMITTED
        assert (house.store.head.version, house.store.awaited) == (4, [[Digest.of(b"one")]])
        assert memory.files.tail == Digest.of(b"one")

    run(scenario)


@pytest.mark.parametrize("why", ["a store that cannot wait", "a first version"])
def test_a_commit_comes_after_its_files(why: str) -> None:
    async def scenario() -> None:
        head = NO_HEAD if why == "a first version" else HEAD
        house = WaitingHouse(head)
        if why == "a store that cannot wait":
            house.store.features = frozenset({"handed"})
        publication = house.publish(remembered("one", head))
        await asyncio.sleep(0.1)
        assert sorted(house.began) == ["write_manifest", "write_tensors"]
        house.may_end.set()
        assert (await publication).state is SnapshotState.COMMITTED
        assert house.store.awaited == [()]

    run(scenario)


def test_a_commit_whose_files_did_not_come_is_taken_away_and_sent_again_with_them() -> None:
    async def scenario() -> None:
        house, memory = WaitingHouse(), remembered("one", HEAD)
        house.cuts.append(errors.Unavailable("cut"))
        publication = house.publish(memory)
        await house.until_all_began()
        house.may_end.set()
        assert (await publication).state is SnapshotState.COMMITTED
        assert house.ended[0] == "write_manifest"
        assert house.ended[1] == "commit was cancelled", "a commit is left of files that did not come"
        assert house.began.count("write_tensors") == 2
        assert (house.store.head.version, len(house.store.stored)) == (4, 1)

    run(scenario)


def test_a_commit_that_waited_in_vain_is_sent_once_its_files_are_there() -> None:
    async def scenario() -> None:
        house, memory = WaitingHouse(), remembered("one", HEAD)
        house.refuses_to_wait = True
        publication = house.publish(memory)
        await house.until_all_began()
        assert not publication.done()
        assert house.began.count("commit") == 1
        house.may_end.set()
        assert (await publication).state is SnapshotState.COMMITTED
        assert (house.began.count("write_tensors"), house.began.count("commit")) == (1, 2)
        assert (house.store.head.version, house.store.awaited) == (4, [()])

    run(scenario)


def test_an_early_commit_whose_answer_was_lost_is_not_another_writers() -> None:
    async def scenario() -> None:
        house, memory = WaitingHouse(), remembered("one", HEAD)
        house.store.lost_answers = 1
        house.may_end.set()
        assert (await house.publish(memory)).state is SnapshotState.COMMITTED
        assert (house.store.head.version, len(house.store.stored)) == (4, 1)
        assert memory.publication.standing.version == 4

    run(scenario)
