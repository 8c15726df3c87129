"""`kill -9` of the real service under load: what it acknowledged is there and whole, and nothing else is visible."""

import itertools
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import StoreClient
from kvasir.errors import Cancelled, Conflict, FailedPrecondition, KvasirError, NotFound, Unavailable
from kvasir.formats import frames
from kvasir.formats.digest import Buffer, Digest

from cachestore_svc.config import read_settings
from cachestore_svc.recovery.means import Means
from cachestore_svc.store.store import Store
from tests.cachestore.service.running import RunningStore, StoreHome, publish
from tests.made_models.synthetic import LLAMA_8B, MIXED, SMALL, SyntheticAgent, SyntheticSnapshot
from tests.running.waiting import eventually

WRITERS = 4
_LONG = 4_096  # tokens: of such a line a commit looks up new blobs alone


class Writer:
    """One agent's engine: publishes turns until the store dies, and remembers what was acknowledged."""

    def __init__(self, number: int) -> None:
        self.agent_id = f"agent-{number}"
        self.memory = SyntheticAgent(MIXED if number % 2 else SMALL, number)
        self._is_early, self._is_long = number % 4 > 1, number % 3 == 0
        self.acknowledged: list[SyntheticSnapshot] = []
        self.uncertain: SyntheticSnapshot | None = None
        self.unexpected: BaseException | None = None

    def run(self, address: str, source: random.Random) -> None:
        try:
            with StoreClient.connect(address, timeout_s=10, retry_reads=False, max_cuts=1) as client:
                while True:
                    least = _LONG if self._is_long and not self.memory.token_ids else 0
                    turn = self.uncertain or self.memory.turn(least + source.choice((3, 50, 260, 600)))
                    self.uncertain = turn
                    publish_turn = publish_early if self._is_early else publish_all
                    publish_turn(client, self.agent_id, turn, len(self.acknowledged))
                    self.acknowledged.append(turn)
                    self.uncertain = None
        except (Unavailable, Cancelled):
            pass
        except BaseException as error:  # noqa: BLE001  told by the test
            self.unexpected = error


def publish_all(client: StoreClient, agent_id: str, turn: SyntheticSnapshot, parent: int) -> None:
    """As an engine after a restart: what an earlier turn had stored may have been swept, so everything is offered."""
    client.put_blobs(turn.new_blobs)
    publish(client, agent_id, turn, parent)


def publish_early(client: StoreClient, agent_id: str, turn: SyntheticSnapshot, parent: int) -> None:
    """As an engine at a turn's end: the commit waits in the store for the blobs that are sent beside it."""
    with ThreadPoolExecutor(1) as beside:
        awaited = list(turn.new_blobs)
        early = beside.submit(client.commit, agent_id, turn.manifest_digest, parent, awaited=awaited)
        client.put_blobs(turn.new_blobs)
        client.put_manifest(turn.manifest_bytes)
        try:
            early.result()
        except FailedPrecondition:  # its blobs came too late
            client.commit(agent_id, turn.manifest_digest, parent)


def one_life(running: RunningStore, writers: list[Writer], source: random.Random) -> None:
    """Write until a kill at a random moment."""
    threads = [
        threading.Thread(target=writer.run, args=(running.address, random.Random(source.random())))
        for writer in writers
    ]
    for thread in threads:
        thread.start()
    time.sleep(source.uniform(0.02, 0.6))
    running.kill()
    for thread in threads:
        thread.join(30)
    assert [writer.unexpected for writer in writers] == [None] * len(writers)


def assert_clean(home: StoreHome) -> None:
    config = read_settings({"data_dir": home.data_dir}).store_config()
    with Store.open(config, Means(time.time, secrets.token_hex)) as store:
        assert store.care.check().findings == ()


def assert_nothing_lost(running: RunningStore, writers: list[Writer]) -> int:
    """Each acknowledged version is there with its own bytes; at most one more that was on its way. Returns how many."""
    with running.client() as client:
        for writer in writers:
            try:
                versions = list(reversed(client.list_snapshots(writer.agent_id, page_size=1000).snapshots))
            except NotFound:
                assert not writer.acknowledged
                continue
            expected = [turn.manifest_digest.hash for turn in writer.acknowledged]
            found = [version.manifest.hash for version in versions]
            extra = found[len(expected) :]
            assert found[: len(expected)] == expected
            assert extra in ([], [writer.uncertain.manifest_digest.hash] if writer.uncertain else [])
            if extra and writer.uncertain:
                # It took effect, and the answer was lost: an engine that repeats the commit learns its version.
                version = client.commit(writer.agent_id, writer.uncertain.manifest_digest, len(expected)).version
                assert version == len(found)
                writer.acknowledged.append(writer.uncertain)
                writer.uncertain = None
            for turn in writer.acknowledged[-3:]:
                assert [digest for digest, _ in client.get_blobs(turn.digests)] == turn.digests
                assert bytes(client.get_blob(turn.manifest_digest)) == turn.manifest_bytes
    return sum(len(writer.acknowledged) for writer in writers)


def campaign(home: StoreHome, kills: int, seed: int) -> int:
    writers = [Writer(number) for number in range(WRITERS)]
    source = random.Random(seed)
    for life in range(kills + 1):
        running = home.start("--retained-versions", "1000")
        count = assert_nothing_lost(running, writers)
        if life < kills:
            one_life(running, writers, source)
            assert_clean(home)
    return count


def in_pieces(
    digest: Digest, data: Buffer, kind: int, first_offset: int
) -> Iterator[tuple[cachestore_pb2.BlobFrame, memoryview]]:
    """Every other manifest in three frames, as one of mebibytes."""
    view = memoryview(data).cast("B")
    is_cut = kind == cachestore_pb2.BLOB_KIND_MANIFEST and digest.hash < "8"
    size = -(-len(view) // 3) if is_cut else frames.FRAME_BYTES
    first = cachestore_pb2.BlobFrame(digest=digest.to_proto(), offset=first_offset, kind=kind)  # type: ignore[arg-type]
    yield first, view[first_offset : first_offset + size]
    for offset in range(first_offset + size, len(view), size):
        yield cachestore_pb2.BlobFrame(offset=offset), view[offset : offset + size]


def test_eight_kills_under_load_lose_nothing_acknowledged(home: StoreHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine commits less between two kills; one commit a life is enough to lose."""
    monkeypatch.setattr(frames, "_frames", in_pieces)
    kills = int(os.environ.get("KVASIR_KILLS", "8"))
    assert campaign(home, kills, seed=int(os.environ.get("KVASIR_SEED", "1"))) > kills


def test_a_commit_that_lost_a_race_is_a_conflict_also_after_a_kill(home: StoreHome) -> None:
    first, second = SyntheticAgent(SMALL, 90).turn(300), SyntheticAgent(SMALL, 91).turn(300)
    running = home.start()
    with running.client() as client:
        publish(client, "ada", first, 0)
        client.put_blobs(second.new_blobs)
        client.put_manifest(second.manifest_bytes)
    running.kill()
    with home.start().client() as client:
        assert client.commit("ada", first.manifest_digest, 0).version == 1
        with pytest.raises(Conflict):
            client.commit("ada", second.manifest_digest, 0)


def test_a_killed_store_leaves_no_part_behind_for_ever(home: StoreHome) -> None:
    running = home.start()
    blobs = SyntheticAgent(LLAMA_8B, 92).turn(256).new_blobs  # one of nine messages

    def parts() -> Sequence[Path]:
        return list(home.data_dir.rglob("*.part"))

    def kill_at_a_part(progress: cachestore_pb2.TransferProgress) -> None:
        """While it waits, no further message is sent, so that the blob cannot become whole."""
        if next(messages) == 4:
            eventually(lambda: bool(parts()))
            running.kill()

    messages = itertools.count()
    with running.client(max_cuts=1) as client, pytest.raises(KvasirError):
        client.put_blobs(blobs, on_progress=kill_at_a_part)
    assert parts()
    running = home.start()
    assert not parts()
    with running.client() as client:
        assert client.get_stats().reserved_bytes == 0
