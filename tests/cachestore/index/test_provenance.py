"""Rows that came by import or pull are never shared with another agent and never bound, whatever is done since.

The attacker's rows have the right tokens and chains, and other numbers. A random walk imports, pulls, forks, rolls
back, goes on, deletes, collects and restarts; a model of the engine goes on as the real one does: what it lends is what
the store's answer lets it lend.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import NotFound
from kvasir.formats import manifest as manifests
from kvasir.formats.block_hash import BLOCK_TOKENS, block_hash_chain, kv_identity_hash
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import Origin, SnapshotVersion
from cachestore_svc.index.sqlite import versions
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, prefix_of, publish, upload
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import SMALL, WINDOWED, SyntheticAgent, SyntheticSnapshot
from tests.running import in_memory

KV = kv_identity_hash(SMALL)
HONEST, FORGED = 0, 666
# Two prompts that many agents begin with, and one that begins as the first does.
PROMPTS = tuple(tuple(SyntheticAgent(SMALL, seed).turn(600).manifest.token_ids) for seed in (1, 2))
PROMPTS = (*PROMPTS, (*PROMPTS[0][:512], *PROMPTS[1][:200]))
AGENTS = st.sampled_from(("ada", "bob", "carol"))
GRACE_S = 100.0


def archive(prompt: int, seed: int, turns: int) -> SyntheticSnapshot:
    """What a stranger sends: every row its own, and all of them said to be shareable."""
    agent = SyntheticAgent(SMALL, seed=turns, engine_seed=seed)
    return agent.turn(PROMPTS[prompt], is_prompt=True)


def bring(store: Store, agent_id: str, content: SyntheticSnapshot, origin: Origin) -> SnapshotVersion:
    upload(store, content)
    return store.snapshots.commit(
        NS, agent_id, content.manifest_digest, head_of(store, agent_id), CommitTerms(origin=origin)
    )


def head_of(store: Store, agent_id: str) -> int:
    try:
        return store.snapshots.get(NS, agent_id, KV).version
    except NotFound:
        return 0


class Engine:
    """What an engine does with the store's answers, without MLX. Rows that it computes on forged ones are forged too:
    the bytes say so, by their seed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rows: dict[str, int] = {}  # whose numbers each blob holds, by hash

    def made(self, content: SyntheticSnapshot, seed: int) -> None:
        for digest in content.new_blobs:
            self.rows.setdefault(digest.hash, seed)

    def manifest(self, version: SnapshotVersion) -> manifest_pb2.Manifest:
        return manifests.parse(self.store.blobs.read(NS, version.manifest))

    def lends(self, version: SnapshotVersion) -> list[str]:
        """Hashes of the blocks that others may begin with while this memory is hot."""
        manifest = self.manifest(version)
        shareable = 0 if version.is_brought else manifest.shareable_tokens
        return [block.hash for block in manifest.blocks[: shareable // BLOCK_TOKENS]]

    def begin(self, agent_id: str, prompt: int) -> None:
        """A turn that finds no memory of its agent: what it computes itself, or what is shared, which is the same."""
        content = SyntheticAgent(SMALL, engine_seed=HONEST).turn(PROMPTS[prompt], is_prompt=True)
        self.commit(agent_id, content, HONEST, is_brought=False)

    def go_on(self, version: SnapshotVersion, number: int, keep_blocks: int) -> None:
        """A turn that extends a memory, or (DIVERGE) its first blocks."""
        known = self.manifest(version)
        agent = SyntheticAgent(SMALL, seed=number, token_ids=list(known.token_ids), turns=number)
        agent.shareable_tokens = 0 if version.is_brought else known.shareable_tokens
        agent._new_blocks()  # for their chains
        agent._blocks = [Digest.from_proto(block) for block in known.blocks]
        if keep_blocks < len(agent._blocks):
            agent.trim(keep_blocks * BLOCK_TOKENS)
        is_brought = version.is_brought and bool(agent.token_ids)
        agent.engine_seed = max([HONEST, *(self.rows.get(digest.hash, HONEST) for digest in agent._blocks)])
        content = agent.turn(300, is_prompt=agent.shareable_tokens == len(agent.token_ids))
        self.commit(version.agent_id, content, agent.engine_seed, is_brought=is_brought)

    def commit(self, agent_id: str, content: SyntheticSnapshot, seed: int, *, is_brought: bool) -> None:
        self.made(content, seed)
        upload(self.store, content)
        head = head_of(self.store, agent_id)
        self.store.snapshots.commit(
            NS, agent_id, content.manifest_digest, head, CommitTerms(bind_shared=True, is_brought=is_brought)
        )


class Walk(RuleBasedStateMachine):
    """What clients, engines and time do to one namespace."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="provenance", dir=in_memory.directory())
        self.lab = Lab(Path(self.directory.name) / "store")
        self.turns = 0
        self.open()

    def open(self) -> None:
        rows = self.engine.rows if hasattr(self, "engine") else {}
        self.store = self.lab.open(grace_period_s=GRACE_S, retained_versions=4)
        self.engine = Engine(self.store)
        self.engine.rows = rows

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()

    def versions(self, agent_id: str) -> list[SnapshotVersion]:
        try:
            return list(self.store.snapshots.page(NS, agent_id).snapshots)
        except NotFound:
            return []

    @rule(agent_id=AGENTS, prompt=st.integers(0, 2), seed=st.sampled_from((HONEST, FORGED)), is_pull=st.booleans())
    def a_stranger_brings_a_memory(self, agent_id: str, prompt: int, seed: int, is_pull: bool) -> None:
        self.turns += 1
        content = archive(prompt, seed, self.turns)
        self.engine.made(content, seed)
        bring(self.store, agent_id, content, Origin.PULL if is_pull else Origin.IMPORT)

    @rule(source=AGENTS, agent_id=AGENTS)
    def somebody_brings_back_what_was_exported(self, source: str, agent_id: str) -> None:
        for version in self.versions(source)[:1]:
            bytes_ = bytes(self.store.blobs.read(NS, version.manifest))
            manifest = self.engine.manifest(version)
            manifest.shareable_tokens = len(manifest.token_ids)
            forged = manifest.SerializeToString(deterministic=True)
            for data in (bytes_, forged):
                content = SyntheticSnapshot(manifest, data, Digest.of(data), {})
                bring(self.store, agent_id, content, Origin.IMPORT)

    @rule(agent_id=AGENTS, prompt=st.integers(0, 2), keep_blocks=st.integers(0, 4), is_cold=st.booleans())
    def an_engine_does_a_turn(self, agent_id: str, prompt: int, keep_blocks: int, is_cold: bool) -> None:
        self.turns += 1
        found = self.versions(agent_id)
        if is_cold or not found:
            self.engine.begin(agent_id, prompt)
        else:
            self.engine.go_on(found[0], self.turns, keep_blocks)

    @rule(source=AGENTS, agent_id=AGENTS, old=st.booleans())
    def somebody_forks(self, source: str, agent_id: str, old: bool) -> None:
        found = self.versions(source)
        if found and not self.versions(agent_id):
            self.store.agents.fork(NS, source, agent_id, KV, found[-1 if old else 0].version)

    @rule(agent_id=AGENTS)
    def somebody_rolls_back(self, agent_id: str) -> None:
        found = self.versions(agent_id)
        if found:
            self.store.agents.roll_back(NS, agent_id, found[-1].version, KV)

    @rule(agent_id=AGENTS)
    def somebody_deletes(self, agent_id: str) -> None:
        if self.versions(agent_id):
            self.store.agents.delete(NS, agent_id)

    @rule(passes=st.integers(1, 3))
    def garbage_is_collected(self, passes: int) -> None:
        for _ in range(passes):
            self.store.care.collect_garbage()
            self.lab.clock.pass_s(2 * GRACE_S)

    @rule()
    def the_store_restarts(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def nothing_brought_is_found_by_its_hash(self) -> None:
        for prompt in PROMPTS:
            found = prefix_of(self.store, NS, KV, block_hash_chain(NS, KV, prompt))
            assert {self.engine.rows.get(digest.hash, HONEST) for digest in found} <= {HONEST}

    @invariant()
    def nothing_brought_is_bound(self) -> None:
        """Not even where FindPrefix would pass it over."""
        bound = "SELECT hash FROM prefixes JOIN blobs ON blobs.id = prefixes.blob_id"
        for (hash_,) in self.store._core.catalog.read(NS, lambda rows: rows.all(bound)):
            assert self.engine.rows.get(str(hash_), HONEST) == HONEST

    @invariant()
    def nothing_brought_is_lent_from_a_hot_memory(self) -> None:
        for agent_id in ("ada", "bob", "carol"):
            for version in self.versions(agent_id):
                lent = self.engine.lends(version)
                assert {self.engine.rows.get(hash_, HONEST) for hash_ in lent} <= {HONEST}, version


Walk.TestCase.settings = settings(
    max_examples=sampled(10, of=30), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_row_that_was_brought_is_ever_lent_or_bound = Walk.TestCase


def own(store: Store, agent_id: str, seed: int = 5) -> SyntheticAgent:
    agent = SyntheticAgent(SMALL, seed)
    publish(store, agent_id, agent.turn(600, is_prompt=True), 0, bind_shared=True)
    return agent


def brought(store: Store, agent_id: str) -> bool:
    return store.snapshots.get(NS, agent_id, KV).is_brought


@pytest.mark.parametrize("origin", [Origin.IMPORT, Origin.PULL])
@pytest.mark.parametrize("way", ["fork", "rollback"])
def test_a_fork_or_a_rollback_does_not_wash_what_was_brought(store: Store, way: str, origin: Origin) -> None:
    bring(store, "mallory", archive(0, FORGED, 1), origin)
    name = "mallory"
    if way == "fork":
        store.agents.fork(NS, "mallory", name := "forked")
    else:
        store.agents.roll_back(NS, "mallory", 1)
    assert brought(store, name)
    assert store.snapshots.get(NS, name).origin in (Origin.FORK, Origin.ROLLBACK)


def test_a_turn_on_an_imported_version_has_no_text_of_its_own_though_the_newest_has(store: Store) -> None:
    own(store, "ada")
    mallory = SyntheticAgent(SMALL, 1, engine_seed=FORGED)
    bring(store, "ada", mallory.turn(PROMPTS[0], is_prompt=True), Origin.IMPORT)
    store.agents.roll_back(NS, "ada", 1)
    assert not brought(store, "ada")
    content = mallory.turn(300)
    upload(store, content)
    made = store.snapshots.commit(NS, "ada", content.manifest_digest, 3, CommitTerms(base_version=2))
    assert made == store.snapshots.get(NS, "ada")
    assert (made.is_brought, made.is_text_own) == (True, False)


def test_a_turn_on_what_was_brought_binds_nothing_also_if_its_manifest_claims_it(store: Store) -> None:
    """The engine never says so; the store does not depend on it."""
    for identity in (SMALL, WINDOWED):
        agent = SyntheticAgent(identity, 1, engine_seed=FORGED)
        name, source = f"forked-{len(identity.layers)}", f"mallory-{len(identity.layers)}"
        bring(store, source, agent.turn(PROMPTS[0], is_prompt=True), Origin.IMPORT)
        store.agents.fork(NS, source, name, kv_identity_hash(identity))
        publish(store, name, agent.turn(300, is_prompt=True), 1, bind_shared=True)
        assert store.snapshots.get(NS, name, kv_identity_hash(identity)).is_brought
        assert prefix_of(store, NS, kv_identity_hash(identity), agent.block_hashes(NS)) == []
        assert store._core.catalog.read(NS, lambda rows: rows.all("SELECT COUNT(*) FROM prefixes")) == [(0,)]


def test_the_mark_outlives_its_agent_a_restart_and_the_rewriting_of_its_bytes(lab: Lab) -> None:
    agent = SyntheticAgent(SMALL, 1, engine_seed=FORGED)
    with lab.open() as store:
        first = agent.turn(PROMPTS[0], is_prompt=True)
        bring(store, "mallory", first, Origin.IMPORT)
        store.agents.fork(NS, "mallory", "forked")
        store.agents.delete(NS, "mallory")
    with lab.open() as store:
        lab.overwrite(first.digests[0], b"damaged")
        list(store.care.verify(NS))
        upload(store, first)
        publish(store, "forked", agent.turn(300, is_prompt=True), 1, bind_shared=True)
        assert brought(store, "forked")
        assert prefix_of(store, NS, KV, agent.block_hashes(NS)) == []


def test_bringing_what_is_here_already_takes_nothing_from_who_made_it(store: Store) -> None:
    """Equal bytes are as good as those that an engine of this store wrote; else any client could end all sharing."""
    agent = own(store, "ours")
    version = store.snapshots.get(NS, "ours")
    data = bytes(store.blobs.read(NS, version.manifest))
    store.snapshots.commit(NS, "copy", version.manifest, 0, CommitTerms(origin=Origin.IMPORT))
    assert data
    assert not brought(store, "ours")
    assert len(prefix_of(store, NS, KV, agent.block_hashes(NS))) == 2


def test_what_a_manifest_says_is_not_believed_even_if_its_blobs_are_ours(store: Store) -> None:
    agent = own(store, "ours")
    version = store.snapshots.get(NS, "ours")
    manifest = manifests.parse(store.blobs.read(NS, version.manifest))
    manifest.shareable_tokens = 0
    data = manifest.SerializeToString(deterministic=True)
    bring(store, "copy", SyntheticSnapshot(manifest, data, Digest.of(data), {}), Origin.IMPORT)
    assert brought(store, "copy")
    assert not brought(store, "ours")
    assert len(prefix_of(store, NS, KV, agent.block_hashes(NS))) == 2


def test_an_engine_that_knows_where_its_rows_came_from_can_report_it(store: Store) -> None:
    """Its hot memory may outlive the store's last copy of the bytes, and their mark."""
    content = archive(0, FORGED, 1)
    upload(store, content)
    made = store.snapshots.commit(
        NS, "late", content.manifest_digest, 0, CommitTerms(bind_shared=True, is_brought=True)
    )
    assert made.is_brought
    assert prefix_of(store, NS, KV, block_hash_chain(NS, KV, PROMPTS[0])) == []


def test_rows_computed_before_those_that_were_brought_stay_shareable(store: Store) -> None:
    """The mark spreads to what was computed on brought rows, and to nothing before them."""
    agent = own(store, "ours")
    forged = agent.fork(seed=9)
    forged.engine_seed = FORGED
    bring(store, "copy", forged.turn(300, is_prompt=True), Origin.IMPORT)
    assert brought(store, "copy")
    assert len(prefix_of(store, NS, KV, forged.block_hashes(NS))) == 2


def marked(store: Store) -> set[str]:
    """Hashes of the blobs that are marked."""
    state = store._core.catalog.read(NS, lambda view: view.state())
    return state[NS].brought if NS in state else set()


def test_a_commit_marks_what_was_computed_on_brought_rows_and_nothing_else(store: Store) -> None:
    agent = own(store, "ours")
    own_blobs = {digest.hash for digest in agent._blocks}
    forged = agent.fork(seed=9)
    forged.engine_seed = FORGED
    bring(store, "copy", forged.turn(300, is_prompt=True), Origin.IMPORT)
    after = forged.fork(seed=10)
    content = after.turn(300)
    upload(store, content)
    store.snapshots.commit(NS, "copy", content.manifest_digest, 1, CommitTerms(bind_shared=True))
    assert {digest.hash for digest in content.new_blobs} <= marked(store)
    assert content.manifest_digest.hash in marked(store)
    assert not own_blobs & marked(store)


def test_what_no_version_of_ours_holds_any_more_is_brought_when_it_comes_again(store: Store) -> None:
    """Also if its bytes are still here, and still bound: nobody answers for them."""
    agent = own(store, "ours")
    data = store.blobs.read(NS, store.snapshots.get(NS, "ours").manifest)
    store.agents.delete(NS, "ours")
    assert prefix_of(store, NS, KV, agent.block_hashes(NS))
    store.snapshots.commit(NS, "copy", Digest.of(data), 0, CommitTerms(origin=Origin.IMPORT))
    assert brought(store, "copy")
    assert prefix_of(store, NS, KV, agent.block_hashes(NS)) == []


def test_a_dropped_version_is_known_for_so_many_more(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_DROPPED_REMEMBERED", 3)
    with lab.open(retained_versions=1) as store:
        agent = SyntheticAgent(SMALL, 1)
        turns = [agent.turn(30) for _ in range(6)]
        for number, turn in enumerate(turns):
            publish(store, "a", turn, number)
        known = [store.snapshots.has_had(NS, "a", turn.manifest_digest.hash) for turn in turns]
        assert known == [False, False, True, True, True, True]
