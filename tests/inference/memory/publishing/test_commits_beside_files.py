"""A commit that is sent beside its last files: to a store that lets it wait, and never in place of what is lost."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from kvasir import errors
from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import SnapshotState
from inference_svc.memory.publishing.manifest_draft import ManifestDraft
from inference_svc.memory.store.answers import NO_HEAD, Head
from tests.inference.memory.publication_world import House, Pinned, remembered, run, taken

HEAD = Head(3, Digest.of(b"the version before"), 2)


class WaitingHouse(House):
    """Its store lets a commit wait until tensors are there, and the manifest with them; these wait for `may_end`."""

    def __init__(self, head: Head = HEAD) -> None:
        super().__init__(head)
        self.store.features = frozenset({"awaits"})
        self.may_end = asyncio.Event()
        self.cuts: list[Exception] = []  # of the tensors
        self.refuses_to_wait = False
        self.began: list[str] = []
        self.ended: list[str] = []
        for name in ("write_tensors", "commit"):
            setattr(self.store, name, self._watched(name, getattr(self.store, name)))

    async def until_all_began(self) -> None:
        while len(self.began) < 2:  # noqa: ASYNC110  they tell nobody
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
                    while "write_tensors" not in self.ended:  # noqa: ASYNC110  they tell nobody
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
        assert (sorted(house.began), house.ended) == (["commit", "write_tensors"], [])
        house.may_end.set()
        assert (await publication).state is SnapshotState.COMMITTED
        assert (house.store.head.version, house.store.awaited) == (4, [[Digest.of(b"one")]])
        assert (memory.files.tail, house.store.manifests) == (Digest.of(b"one"), 1)

    run(scenario)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_turn_ends_with_its_commits_answer_whatever_becomes_of_its_files_answers(is_cut: bool) -> None:
    """The commit waited for them at the store: they are there."""

    async def scenario() -> None:
        house, memory = WaitingHouse(), remembered("one", HEAD)
        house.ended.append("write_tensors")  # at the store, whose answer is late, or is lost
        house.cuts += [errors.Unavailable("cut")] * is_cut
        publication = house.publish(memory)
        await asyncio.wait({publication}, timeout=5)
        house.may_end.set() if not publication.done() else None
        assert (publication.done(), house.store.head.version, house.ended) == (True, 4, ["write_tensors", "commit"])
        assert publication.result().state is SnapshotState.COMMITTED
        house.may_end.set()
        await asyncio.sleep(0.01)
        assert memory.files.tail == Digest.of(b"one")
        following = remembered("two", house.store.head)
        assert (await house.publish(following, memory)).state is SnapshotState.COMMITTED
        assert (house.began.count("write_tensors"), house.store.head.version) == (2, 5)

    run(scenario)


def test_a_manifest_is_drafted_behind_the_copies_that_its_publication_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        house, memory, asked = House(HEAD), remembered("one", HEAD), Future[Any]()
        drafts, begin = list[ManifestDraft](), ManifestDraft.__init__
        noted = lambda draft, *given: (drafts.append(draft), begin(draft, *given))[1]  # noqa: E731
        monkeypatch.setattr(ManifestDraft, "__init__", noted)
        publication = house.line.publications.publish(memory, asked)
        await asyncio.sleep(0.01)
        assert not drafts
        asked.set_result(Pinned(taken(memory)))
        assert (await publication).state is SnapshotState.COMMITTED
        assert len(drafts) == 1

    run(scenario)


def test_files_whose_manifest_cannot_be_made_go_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_given: object) -> tuple[bytes, Digest]:
        raise errors.InvalidArgument("messages: too many")

    async def scenario() -> None:
        house = WaitingHouse()
        house.may_end.set()
        monkeypatch.setattr(ManifestDraft, "completed", refused)
        assert (await house.publish(remembered("one", HEAD))).state is SnapshotState.FAILED
        async with asyncio.timeout(5):
            while not house.ended:  # noqa: ASYNC110  they tell nobody
                await asyncio.sleep(0.001)
        assert (house.ended, house.store.manifests) == (["write_tensors"], 0)

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
        assert house.began == ["write_tensors"]
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
        assert house.ended[0] == "commit was cancelled", "a commit is left of files that did not come"
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
