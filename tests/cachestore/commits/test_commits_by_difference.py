"""A commit that looks at no blob which the manifest before it names writes what one writes that looks at all: two
stores live the same random lives, one of which knows no manifest, and all tables are compared after each act.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import Origin, SnapshotVersion
from cachestore_svc.index.catalog import CatalogChange
from cachestore_svc.index.sqlite import versions
from cachestore_svc.index.sqlite.rows import RowsAhead
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.upkeep.collecting import make_room
from tests.cachestore.commits.twins import GRACE_S, PLAIN_NS, SEALED_NS, THIRD_NS, Twins, twins_on
from tests.cachestore.core.lab import NS, write_all
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import MIXED, SMALL, WINDOWED, SyntheticAgent, SyntheticSnapshot, asleep
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

_NAMES = ("ada", "bob")
_ACTS, _LIVES = 40, 5
FORGED = 666
OF_ENGINE = CommitTerms(bind_shared=True)
FROM_ELSEWHERE = CommitTerms(origin=Origin.IMPORT)


class Life:
    """What engines, strangers, owners, time and bad luck do to three namespaces."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins, self.dice = twins, random.Random(seed)
        self.minds: dict[tuple[str, str], SyntheticAgent] = {}
        self.written: dict[str, dict[Digest, bytes]] = {PLAIN_NS: {}, THIRD_NS: {}, SEALED_NS: {}}
        self.last: Callable[[], object] = lambda: None
        self.turns = 0

    def live(self) -> None:
        acts = [self.turns_of_one] * 12 + [self.lie, self.go_back] * 2
        acts += [self.repeat, self.sleep, self.fork, self.roll_back, self.delete, self.update, self.damage]
        acts += [self.heal, self.lose, self.tear, self.let_time_pass, self.make_room, self.restart]
        for _ in range(_ACTS):
            self.namespace = self.dice.choice((PLAIN_NS, PLAIN_NS, THIRD_NS, SEALED_NS))
            self.name = self.dice.choice(_NAMES)
            self.dice.choice(acts)()
            self.twins.compare()

    def versions(self) -> list[SnapshotVersion]:
        """Those of the agent, newest first."""
        found = self.twins.both(lambda _, store: [*store.snapshots.page(self.namespace, self.name).snapshots])
        return found if isinstance(found, list) else []

    def head(self) -> int:
        return max((each.version for each in self.versions()), default=0)

    # --- commits ---

    def turns_of_one(self) -> None:
        for _ in range(self.dice.randrange(1, 4)):
            self.turn()

    def turn(self, parent_manifest: str = "", mind: SyntheticAgent | None = None) -> None:
        self.turns += 1
        mind = mind or self.mind().fork(self.dice.randrange(3))
        mind.turns = self.turns if self.dice.random() < 0.6 else 0
        mind.parent_manifest = parent_manifest or mind.parent_manifest
        if self.dice.random() < 0.1:
            mind.trim(self.dice.randrange(len(mind.token_ids) + 1))
        if self.dice.random() < 0.1:
            mind.parent_manifest = self.dice.choice([*self.minds.values(), mind]).parent_manifest
        if self.dice.random() < 0.1:
            mind.engine_seed = self.dice.randrange(3)
        content = mind.turn(self.dice.randrange(1, 700), is_prompt=self.dice.random() < 0.7)
        if not isinstance(self.commit(content), tuple):
            self.minds[self.namespace, self.name] = mind

    def mind(self) -> SyntheticAgent:
        """The memory of this agent, or the beginning of one: few, so that agents begin alike."""
        identity = self.dice.choice((SMALL, SMALL, MIXED, WINDOWED))
        new = SyntheticAgent(identity, self.dice.randrange(2))
        if self.dice.random() < 0.05 and self.minds:  # goes on from what another, perhaps of elsewhere, remembers
            return self.dice.choice([*self.minds.values()])
        return self.minds.get((self.namespace, self.name), new)

    def commit(self, content: SyntheticSnapshot, parent: int | None = None) -> object:
        namespace, name, dice = self.namespace, self.name, self.dice
        parent = max(0, (self.head() if parent is None else parent) + dice.choice([0] * 20 + [-1, 1]))
        origin = dice.choice([Origin.TURN] * 40 + [Origin.IMPORT, Origin.PULL, Origin.MOVE])
        terms = CommitTerms(
            origin=origin,
            is_brought=dice.random() < 0.01,
            is_text_own=dice.random() < 0.5,
            bind_shared=dice.random() < 0.8,
        )
        self.written[namespace] |= {**content.new_blobs, content.manifest_digest: content.manifest_bytes}
        self.last = lambda: self.twins.commit(name, content, parent, terms, namespace)
        return self.last()

    def repeat(self) -> None:
        self.last()

    def lie(self) -> None:
        """A manifest that follows the last one and names other blobs, or other tokens of them."""
        made = self.mind().fork(3).turn(self.dice.randrange(1, 300)).manifest
        if len(made.blocks) > 1:
            one, other = self.dice.sample(range(len(made.blocks)), 2)
            match self.dice.randrange(4):
                case 0:
                    made.blocks[one].CopyFrom(made.blocks[other])
                case 1:
                    made.blocks[one].hash = Digest.of(bytes([one])).hash
                case 2:
                    made.token_ids[256 * one] = made.token_ids[256 * one] ^ 1
                case 3:
                    made.blocks[one].size_bytes += 1
        self.commit_manifest(made)

    def commit_manifest(self, made: manifest_pb2.Manifest, data: bytes = b"") -> None:
        data = data or made.SerializeToString(deterministic=True)
        self.commit(SyntheticSnapshot(made, data, Digest.of(data), {}))

    def go_back(self) -> None:
        """A turn on an earlier memory, which some version may still be."""
        if found := self.versions():
            digest = self.dice.choice(found).manifest
            made = manifests.parse(self.written[self.namespace][digest])
            mind = SyntheticAgent.remember(made, self.dice.randrange(3), self.turns)
            self.turn(digest.hash, mind)

    def sleep(self) -> None:
        if found := self.versions():
            made = manifests.parse(self.written[self.namespace][found[0].manifest])
            if made.blocks and not made.HasField("asleep") and not made.windows and not made.states:
                made.parent_manifest = found[0].manifest.hash
                self.commit_manifest(made, asleep(made))

    # --- what else changes versions ---

    def fork(self) -> None:
        source, namespace, name = self.dice.choice(_NAMES), self.namespace, self.name
        forked = self.twins.both(lambda _, store: store.agents.fork(namespace, source, name))
        if not isinstance(forked, tuple) and (mind := self.minds.get((namespace, source))):
            self.minds[namespace, name] = mind.fork(self.turns)

    def roll_back(self) -> None:
        version = self.head() - self.dice.randrange(3)
        self.twins.both(lambda _, store: store.agents.roll_back(self.namespace, self.name, max(version, 1)))

    def delete(self) -> None:
        self.twins.both(lambda _, store: store.agents.delete(self.namespace, self.name, force=True))

    def update(self) -> None:
        is_pinned, kept = self.dice.random() < 0.2, self.dice.choice((1, 2, 5))
        self.twins.both(
            lambda _, store: store.agents.update(self.namespace, self.name, is_pinned=is_pinned, retained_versions=kept)
        )

    # --- what happens to blobs ---

    def any_blob(self) -> Digest | None:
        return self.dice.choice([*self.written[self.namespace], None])

    def damage(self) -> None:
        if digest := self.any_blob():
            self.twins.both(lambda lab, _: lab.overwrite(digest, b"damaged", self.namespace))
            self.twins.both(lambda _, store: len([*store.care.verify(self.namespace)]))

    def lose(self) -> None:
        if digest := self.any_blob():
            self.twins.both(lambda lab, _: lab.blobs.of(self.namespace).remove(digest.hash))
            self.twins.both(lambda _, store: store.care.check(repair=True))

    def heal(self) -> None:
        blobs = {digest: data for digest, data in self.written[self.namespace].items() if self.dice.random() < 0.5}
        tensors = {digest: data for digest, data in blobs.items() if data[8:9] == b"{"}
        self.twins.both(lambda _, store: write_all(store, tensors, self.namespace))

    def tear(self) -> None:
        """The index loses that a version names a blob. Sometimes that is found before the next commit."""
        if found := self.versions():
            tear(self.twins, self.namespace, found[0].manifest, self.dice.randrange(4))
        if self.dice.random() < 0.5:
            self.let_time_pass()
        if self.dice.random() < 0.5:
            self.twins.both(lambda _, store: store.care.check(repair=True))

    def let_time_pass(self) -> None:
        seconds = self.dice.choice((1, 1.5 * GRACE_S))
        for lab in self.twins.labs:
            lab.clock.pass_s(seconds)
        self.twins.both(lambda _, store: store.care.collect_garbage())

    def make_room(self) -> None:
        wanted = self.dice.randrange(1, 200_000)
        self.twins.both(lambda _, store: make_room(store._core, self.namespace, wanted, Digest.of(b"none")))

    def restart(self) -> None:
        self.twins.close()
        self.twins.open()


def tear(twins: Twins, namespace: str, manifest: Digest, position: int) -> None:
    of_it = "SELECT id FROM blobs WHERE namespace_id = :namespace AND hash = :hash"
    torn = f"DELETE FROM manifest_blobs WHERE position = :position AND manifest_id = ({of_it})"

    def work(change: CatalogChange) -> int:
        return change.run(torn, position=position, hash=manifest.hash)

    twins.both(lambda _, store: store._core.write(namespace, work))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many commits knew blobs, and how many of those that might have known some did not."""
    found: Counter[bool] = Counter()
    look = versions.known_part

    def known_part(*given: Any) -> versions.KnownPart:
        known = look(*given)
        if not isinstance(given[0], RowsAhead):
            found[known.length > 0] += 1
        return known

    monkeypatch.setattr(versions, "known_part", known_part)
    return found


def live(root: Path, seeds: Sequence[int], new_catalog: Callable[[], str] = str) -> None:
    for seed in seeds:
        twins = twins_on(root / f"life {seed}", new_catalog)
        twins.open()
        try:
            Life(twins, seed).live()
        except BaseException as error:
            error.add_note(f"life {seed}")
            raise
        finally:
            twins.close()


@pytest.mark.long(6)
@pytest.mark.parametrize("first", range(0, sampled(_LIVES, of=1000), _LIVES))
def test_known_blobs_are_written_as_those_that_are_looked_up(
    memory_directory: Path, first: int, counted: Counter[bool]
) -> None:
    live(memory_directory, range(first, first + _LIVES))
    assert counted[True] > 10, counted
    assert counted[False], counted


@pytest.mark.fleet
@pytest.mark.parametrize("first", range(0, sampled(_LIVES, of=100), _LIVES))
def test_known_blobs_are_written_as_those_that_are_looked_up_on_a_server(
    memory_directory: Path,
    first: int,
    counted: Counter[bool],
    postgres: PostgresServer,  # noqa: F811
) -> None:
    live(memory_directory, range(first, first + _LIVES), lambda: postgres.url(postgres.new_database()))
    assert counted[True] > 10, counted
    assert counted[False], counted


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    made = twins_on(tmp_path)
    made.open()
    yield made
    made.compare()
    made.close()


def renamed(content: SyntheticSnapshot, place: int, by: Digest) -> SyntheticSnapshot:
    """The same memory, but that it names another block at a place."""
    manifest = manifest_pb2.Manifest.FromString(content.manifest_bytes)
    manifest.blocks[place].CopyFrom(by.to_proto())
    data = manifest.SerializeToString(deterministic=True)
    return SyntheticSnapshot(manifest, data, Digest.of(data), content.new_blobs)


def test_blocks_behind_a_known_one_that_was_marked_since_are_marked(twins: Twins) -> None:
    own, forged = SyntheticAgent(SMALL, 1), SyntheticAgent(SMALL, 1, engine_seed=FORGED)
    first = own.turn(3 * 256, is_prompt=True)
    twins.commit("own", first, 0, OF_ENGINE)
    brought = forged.turn(own.token_ids[:256])
    twins.commit("mallory", brought, 0, FROM_ELSEWHERE)
    twins.commit("mixed", renamed(first, 0, brought.digests[0]), 0, OF_ENGINE)
    made = twins.commit("own", own.turn(300), 1, OF_ENGINE)
    assert isinstance(made, SnapshotVersion)
    assert made.is_brought


def test_known_blocks_are_marked_where_a_window_of_them_was_brought(twins: Twins) -> None:
    own = SyntheticAgent(WINDOWED, 1, more_window_blocks=9)
    first = own.turn(600, is_prompt=True)
    twins.commit("own", first, 0, OF_ENGINE)
    own.engine_seed = FORGED
    own._window_blocks.clear()
    twins.commit("mallory", own.fork(2).turn(10), 0, FROM_ELSEWHERE)
    twins.commit("own too", first, 0, OF_ENGINE)  # it is the last one that was read
    made = twins.commit("own", own.turn(10), 1, OF_ENGINE)
    assert isinstance(made, SnapshotVersion)
    assert made.is_brought


def test_a_mark_of_a_collector_ends_on_known_blobs_too(twins: Twins) -> None:
    own = SyntheticAgent(SMALL, 1)
    first = own.turn(3 * 256)
    twins.commit("own", first, 0, OF_ENGINE)
    tear(twins, PLAIN_NS, first.manifest_digest, 1)
    assert twins.both(lambda _, store: store.care.collect_garbage().blobs_marked) == 1
    twins.both(lambda _, store: store.care.check(repair=True))
    twins.commit("own", own.turn(300), 1, OF_ENGINE)
    marked = "SELECT COUNT(*) FROM blobs WHERE marked_unix_ms IS NOT NULL"
    assert twins.both(lambda _, store: store._core.read(NS, lambda view: view.number(marked))) == 0


def test_a_manifest_that_another_namespace_holds_is_not_known_here(twins: Twins) -> None:
    own = SyntheticAgent(SMALL, 1)
    first, second = own.turn(3 * 256), own.turn(300)
    twins.commit("theirs", first, 0, OF_ENGINE, THIRD_NS)
    assert isinstance(twins.commit("ours", first, 5, OF_ENGINE), tuple), "it is read, and refused"
    assert isinstance(twins.commit("ours", second, 0, OF_ENGINE), SnapshotVersion)


def test_an_import_on_an_import_marks_blobs_that_no_other_version_holds(twins: Twins) -> None:
    own = SyntheticAgent(SMALL, 1)
    first = own.turn(3 * 256 + 10, is_prompt=True)
    twins.commit("own", first, 0, OF_ENGINE)
    again = own.turn(1)
    twins.commit("copy", again, 0, FROM_ELSEWHERE)
    twins.both(lambda _, store: store.agents.delete(NS, "own"))
    twins.commit("copy", own.turn(300), 1, FROM_ELSEWHERE)
    brought = "SELECT COUNT(*) FROM blobs WHERE is_brought = 0 AND kind = 'block'"
    assert twins.both(lambda _, store: store._core.read(NS, lambda view: view.number(brought))) == 0


def test_a_known_block_that_was_found_damaged_since_is_missing(twins: Twins) -> None:
    own = SyntheticAgent(SMALL, 1)
    first = own.turn(3 * 256)
    twins.commit("own", first, 0, OF_ENGINE)
    twins.both(lambda lab, _: lab.overwrite(first.digests[1], b"damaged"))
    twins.both(lambda _, store: len([*store.care.verify(NS)]))
    refused = twins.commit("own", own.turn(300), 1, OF_ENGINE)
    assert isinstance(refused, tuple)
    assert refused[1] == "BLOB_MISSING"
