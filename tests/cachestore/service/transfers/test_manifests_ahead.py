"""A manifest that an engine wrote is read before its commit: the commit is the same, and its room is given back."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.credentials import CLIENT, ENGINE, Principal
from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import carrier_reader

from cachestore_svc.core.stored_blobs import quarantine
from cachestore_svc.edge import manifests_ahead, uploading
from cachestore_svc.edge.manifests_ahead import ManifestsAhead
from cachestore_svc.facts.records import SnapshotVersion
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.moving.inbound import BlobIntake
from cachestore_svc.moving.manifest_room import ManifestRoom
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, upload
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot

AGENT = "a"


class Scene:
    """A store whose caller's manifests are read ahead."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.aio = AioStore(store, StoreThreads())
        self.room = ManifestRoom()
        self.ahead = ManifestsAhead(self.aio, self.room)

    @property
    def reads(self) -> int:
        """Blobs that were read, of which a commit counts its manifest."""
        return self.store._opened.core.counters.of(NS).get("blobs_read", 0)

    async def until_read(self, count: int) -> None:
        while self.reads < count:  # noqa: ASYNC110  a thread counts them
            await asyncio.sleep(0.001)

    async def commit(self, manifest: Digest, parent: int = 0, namespace: str = NS) -> SnapshotVersion:
        """As the edge does."""
        commit, terms = self.store.snapshots.commit, CommitTerms(bind_shared=True)
        async with self.ahead.known(namespace, manifest) as known:
            return await self.aio.run(namespace, commit, AGENT, manifest, parent, terms, known)


@asynccontextmanager
async def scene_of(store: Store) -> AsyncIterator[Scene]:
    scene = Scene(store)
    async with asyncio.timeout(20):
        yield scene
    scene.aio.threads.close()


def stored(store: Store, agent: SyntheticAgent | None = None, tokens: int = 700) -> SyntheticSnapshot:
    snapshot = (agent or SyntheticAgent(SMALL)).turn(tokens, is_prompt=True)
    upload(store, snapshot)
    return snapshot


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "data")


async def test_a_commit_whose_manifest_was_read_ahead_is_that_of_one_which_was_not(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            agent = SyntheticAgent(SMALL)
            first, second = stored(store, agent), stored(store, agent)
            scene.ahead.begin(NS, first.manifest_digest)
            await scene.until_read(1)
            one = await scene.commit(first.manifest_digest)
            assert scene.reads == 1, "the commit read it again"
            two = await scene.commit(second.manifest_digest, parent=1)
            assert scene.reads == 2
            assert (one.version, one.token_count, two.version, two.token_count) == (1, 700, 2, 1400)
            hashes = agent.block_hashes(NS)
            kv_hash = one.kv_identity_hash
            assert store.prefixes.find(NS, kv_hash, hashes, (0,)).tokens == 1280, "both bound what may be shared"
            assert scene.room.room.held_units == 0


async def test_a_commit_that_comes_while_its_manifest_is_read_waits_for_that(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            scene.ahead.begin(NS, snapshot.manifest_digest)
            assert (await scene.commit(snapshot.manifest_digest)).version == 1
            assert (scene.reads, scene.room.room.held_units) == (1, 0)


async def test_a_manifest_read_ahead_serves_no_other_namespace(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            scene.ahead.begin(NS, snapshot.manifest_digest)
            with pytest.raises(FailedPrecondition) as refused:
                await scene.commit(snapshot.manifest_digest, namespace="other")
            assert refused.value.reason == "BLOB_MISSING"
            assert (await scene.commit(snapshot.manifest_digest)).version == 1
            assert scene.reads == 1, "the other namespace has taken it away"


async def test_a_manifest_that_is_damaged_after_it_was_read_ahead_is_not_committed(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            scene.ahead.begin(NS, snapshot.manifest_digest)
            await scene.until_read(1)
            quarantine(store._opened.core, NS, [snapshot.manifest_digest])
            with pytest.raises(FailedPrecondition) as refused:
                await scene.commit(snapshot.manifest_digest)
            assert refused.value.reason == "BLOB_MISSING"
            assert scene.room.room.held_units == 0


@pytest.mark.parametrize("wrong", ["missing", "no manifest"])
async def test_a_manifest_that_cannot_be_read_ahead_is_refused_by_its_commit_in_the_same_words(
    wrong: str, lab: Lab
) -> None:
    async def refusal(scene: Scene, digest: Digest) -> tuple[str, str]:
        with pytest.raises(KvasirError) as refused:
            await scene.commit(digest)
        return refused.value.reason, refused.value.message

    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            digest = Digest.of(b"nobody wrote it") if wrong == "missing" else snapshot.digests[0]
            expected = await refusal(scene, digest)
            scene.ahead.begin(NS, digest)
            assert await refusal(scene, digest) == expected
            assert scene.room.room.held_units == 0


async def test_a_manifest_that_nobody_commits_gives_its_room_back(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests_ahead, "ANSWER_S", 0.02)
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            scene.ahead.begin(NS, snapshot.manifest_digest)
            assert scene.room.room.held_units == 8 * snapshot.manifest_digest.size_bytes
            while scene.room.room.held_units:  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(0.005)
            assert (await scene.commit(snapshot.manifest_digest)).version == 1
            assert scene.reads == 2


async def test_a_committed_manifest_is_not_forgotten_once_more(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests_ahead, "ANSWER_S", 0.05)
    with lab.open() as store:
        wrong: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: wrong.append(about))
        async with scene_of(store) as scene:
            snapshot = stored(store)
            scene.ahead.begin(NS, snapshot.manifest_digest)
            await scene.commit(snapshot.manifest_digest)
            await asyncio.sleep(0.1)
            assert (wrong, scene.room.room.held_units) == ([], 0)


async def test_a_quarter_of_the_room_is_taken_ahead_at_most(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            room = scene.room.room
            taken = room.max_units // 4 - 8 * snapshot.manifest_digest.size_bytes + 1
            room.take("other", taken)
            scene.ahead.begin(NS, snapshot.manifest_digest)
            assert room.held_units == taken
            room.give_back("other", 1)
            scene.ahead.begin(NS, snapshot.manifest_digest)
            assert room.held_units > taken
            await scene.commit(snapshot.manifest_digest)
            assert room.held_units == taken - 1


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize(("role", "is_read"), [(ENGINE, True), (CLIENT, False)])
async def test_a_manifest_is_read_once_it_is_there_if_an_engine_wrote_it(
    role: str, is_read: bool, pieces: int, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "current_principal", lambda: Principal("caller", NS, frozenset({role})))
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = SyntheticAgent(SMALL).turn(300)
            blobs = [(pb.BLOB_KIND_TENSORS, each, data) for each, data in snapshot.new_blobs.items()]
            manifest, size = snapshot.manifest_bytes, -(-len(snapshot.manifest_bytes) // pieces)
            blobs.append((pb.BLOB_KIND_MANIFEST, snapshot.manifest_digest, manifest[:size]))
            frames = [pb.BlobFrame(digest=each.to_proto(), kind=kind, data=data) for kind, each, data in blobs]
            later = range(size, len(manifest), size)
            frames += [pb.BlobFrame(offset=at, data=manifest[at : at + size]) for at in later]

            async def requests():  # type: ignore[no-untyped-def]
                for frame in frames:
                    yield carrier_reader(pb.WriteBlobsRequest)(pb.WriteBlobsRequest(frame=frame).SerializeToString())

            upload = uploading.Uploading(BlobIntake(scene.aio, NS), scene.ahead)
            receiving = asyncio.create_task(upload.receive(requests()))
            answered = [Digest.from_proto(each.digest) async for each in upload.answers()]
            await receiving
            assert set(answered) == {digest for _, digest, _ in blobs}
            assert bool(scene.room.room.held_units) == is_read
            assert (await scene.commit(snapshot.manifest_digest)).version == 1
            assert (scene.reads, scene.room.room.held_units) == (0 if is_read else 1, 0)


@pytest.mark.parametrize("ends", ["cut", "too many bytes", "another blob"])
async def test_a_manifest_that_never_comes_whole_gives_its_room_back(
    ends: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "current_principal", lambda: Principal("caller", NS, frozenset({ENGINE})))
    manifest, other = SyntheticAgent(SMALL).turn(300), SyntheticAgent(SMALL, 2).turn(300)
    data, (digest, blob) = manifest.manifest_bytes, next(iter(other.new_blobs.items()))
    rest = {
        "cut": [],
        "too many bytes": [pb.BlobFrame(offset=100, data=data)],
        "another blob": [pb.BlobFrame(digest=digest.to_proto(), kind=pb.BLOB_KIND_TENSORS, data=blob)],
    }[ends]
    first = pb.BlobFrame(digest=manifest.manifest_digest.to_proto(), kind=pb.BLOB_KIND_MANIFEST, data=data[:100])
    with lab.open() as store:
        async with scene_of(store) as scene:
            held: list[int] = []

            async def requests():  # type: ignore[no-untyped-def]
                for frame in (first, *rest):
                    yield carrier_reader(pb.WriteBlobsRequest)(pb.WriteBlobsRequest(frame=frame).SerializeToString())
                    held.append(scene.room.room.held_units)

            upload = uploading.Uploading(BlobIntake(scene.aio, NS), scene.ahead)
            receiving = asyncio.create_task(upload.receive(requests()))
            with pytest.raises(KvasirError):
                _ = [each async for each in upload.answers()]
            await receiving
            assert (held[:1] or [0], scene.room.room.held_units) == ([8 * len(data)], 0)


async def test_bytes_that_are_not_the_manifests_are_not_read_for_it(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot, other = stored(store), SyntheticAgent(SMALL, 2).turn(300)
            named = next(iter(snapshot.new_blobs)).to_proto().hash.encode()
            readable = snapshot.manifest_bytes.replace(named, bytes(reversed(named)))  # and of its size
            for wrong in (other.manifest_bytes, bytes(reversed(snapshot.manifest_bytes)), readable):
                assert wrong != snapshot.manifest_bytes
                scene.ahead.begin(NS, snapshot.manifest_digest, wrong)
                assert (await scene.commit(snapshot.manifest_digest)).token_count == 700
            assert (scene.reads, scene.room.room.held_units) == (3, 0)


async def test_a_commit_of_a_manifest_that_is_coming_gets_it_once_it_came(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            digest = snapshot.manifest_digest

            async def tokens() -> int:
                async with scene.ahead.known(NS, digest, is_coming=True) as known:
                    return len(known.facts.token_ids) if known is not None else 0

            asking = [asyncio.create_task(tokens()) for _ in range(2)]
            await asyncio.sleep(0.02)
            assert not any(each.done() for each in asking)
            gathering, data = scene.ahead.gather(NS, digest), snapshot.manifest_bytes
            assert gathering is not None
            for piece in (data[:100], data[100:]):
                assert not any(each.done() for each in asking)
                gathering.add(piece)
            assert sorted(await asyncio.gather(*asking)) == [0, 700], "one has it, the other reads it itself"
            assert (scene.reads, scene.room.room.held_units) == (0, 0)


async def test_a_commit_does_not_wait_for_a_manifest_that_came_and_had_no_room(lab: Lab) -> None:
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot, room = stored(store), scene.room.room
            room.take("other", room.max_units // 4)
            scene.ahead.begin(NS, snapshot.manifest_digest, snapshot.manifest_bytes)
            room.give_back("other", room.max_units // 4)
            began = asyncio.get_running_loop().time()
            async with scene.ahead.known(NS, snapshot.manifest_digest, is_coming=True) as known:
                assert known is None
            assert asyncio.get_running_loop().time() - began < manifests_ahead.ANSWER_S / 2


async def test_a_commit_of_a_manifest_that_does_not_come_reads_it_itself_later(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests_ahead, "ANSWER_S", 0.02)
    with lab.open() as store:
        async with scene_of(store) as scene:
            snapshot = stored(store)
            async with scene.ahead.known(NS, snapshot.manifest_digest, is_coming=True) as known:
                assert known is None
            assert not scene.ahead._awaited


async def test_a_manifest_that_two_send_at_once_is_read_ahead_once(lab: Lab) -> None:
    snapshot = SyntheticAgent(SMALL).turn(300)
    with lab.open() as store:
        async with scene_of(store) as scene:
            upload(store, snapshot)
            both = [scene.ahead.gather(NS, snapshot.manifest_digest) for _ in range(2)]
            for gathering in both:
                assert gathering is not None
                gathering.add(snapshot.manifest_bytes)
            assert scene.room.room.held_units == 8 * len(snapshot.manifest_bytes)
            assert (await scene.commit(snapshot.manifest_digest)).version == 1
            assert (scene.reads, scene.room.room.held_units) == (0, 0)


class _Message(bytearray):
    """As a request that was received."""


@pytest.mark.parametrize("of_it", [0, 1])
async def test_a_piece_of_a_manifest_keeps_no_other_byte_of_its_message(of_it: int, lab: Lab) -> None:
    manifest = SyntheticAgent(SMALL).turn(300).manifest_digest
    with lab.open() as store:
        async with scene_of(store) as scene:
            gathering, message = scene.ahead.gather(NS, manifest), _Message(1 << 20)
            assert gathering is not None
            gathering.add(memoryview(message)[:of_it])
            is_kept = weakref.ref(message)
            del message
            gc.collect()
            assert is_kept() is None
            gathering.end()
