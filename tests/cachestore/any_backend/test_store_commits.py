"""Commits: a version is one manifest with exactly its blobs, made by one writer, or it is not made."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats.block_file import encode, parse_header
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import BlobKind, Origin
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, prefix_of, publish, upload, write
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import (
    MIXED,
    SMALL,
    TINY,
    WINDOWED,
    SyntheticAgent,
    full_layers,
    kv_identity,
    random_tensors,
    state_file,
    tensor_file,
)

KV = kv_identity_hash(SMALL)


def test_a_snapshot_of_every_layout_comes_back_whole(store: Store) -> None:
    for name, identity in (("tiny", TINY), ("mixed", MIXED), ("windowed", WINDOWED)):
        agent = SyntheticAgent(identity, 1)
        for turn, tokens in enumerate((300, 212, 1)):
            content = agent.turn(tokens)
            done = publish(store, name, content, turn)
            assert (done.version, done.parent_version, done.token_count) == (turn + 1, turn, len(agent.token_ids))
            assert done.total_bytes == content.manifest_digest.size_bytes + sum(d.size_bytes for d in content.digests)
            assert_restores(store, done, content)


def test_a_turn_of_50_tokens_writes_at_most_a_block_a_tail_and_a_manifest(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    publish(store, "a", agent.turn(700), 0)
    for turn in range(1, 12):
        before = store.statistics.of(NS).counters["blobs_written"]
        publish(store, "a", agent.turn(50), turn)
        assert store.statistics.of(NS).counters["blobs_written"] - before <= 3


@pytest.mark.long(6)
def test_many_agents_with_one_prefix_hold_its_blocks_once(store: Store) -> None:
    count = sampled(150, of=1000)
    first = SyntheticAgent(SMALL, 0)
    publish(store, "agent-0", first.turn(2048, is_prompt=True), 0, bind_shared=True)
    blocks = prefix_of(store, NS, KV, first.block_hashes(NS))
    assert len(blocks) == 8

    def begin(number: int) -> None:
        publish(store, f"agent-{number}", first.fork(seed=number).turn([number]), 0)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(begin, range(1, count)))
    stats = store.statistics.of(NS)
    assert stats.agent_count == count
    # Eight blocks, and a manifest and, but for the first, a tail for each.
    assert stats.blob_count == 8 + count + count - 1
    assert stats.logical_bytes > 5 * stats.blob_bytes


# --- compare and swap ---


def test_a_commit_answers_the_version_that_is_read_from_then_on(store: Store) -> None:
    agent, head = SyntheticAgent(SMALL, 1), 0
    turns = CommitTerms(origin=Origin.TURN), CommitTerms(origin=Origin.TURN, base_version=1, handed_over_by="peer")
    brought = [CommitTerms(origin=each, origin_detail="elsewhere") for each in (Origin.IMPORT, Origin.PULL)]
    moved = CommitTerms(origin=Origin.MOVE, is_text_own=True)
    for terms in (turns[0], turns[1], moved, *turns, *brought, *turns, moved, *turns):
        content = agent.turn(30)
        upload(store, content)
        terms = terms if head > terms.base_version else replace(terms, base_version=0)
        done = store.snapshots.commit(NS, "a", content.manifest_digest, head, terms)
        again = store.snapshots.commit(NS, "a", content.manifest_digest, head, terms)
        assert done == store.snapshots.get(NS, "a") == again
        head = done.version


def test_a_commit_on_a_head_that_moved_is_refused_with_the_head(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first = agent.turn(30)
    loser = agent.fork(seed=9).turn(20)
    publish(store, "a", first, 0)
    publish(store, "a", agent.turn(30), 1)
    for parent in (0, 1, 3):
        with pytest.raises(Conflict) as refused:
            publish(store, "a", loser, parent)
        assert refused.value.reason == "HEAD_MOVED"
        assert refused.value.metadata["head_version"] == "2"
    assert store.snapshots.get(NS, "a").version == 2


def test_a_repeated_commit_answers_its_version_again(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first = agent.turn(30)
    done = publish(store, "a", first, 0)
    second = publish(store, "a", agent.turn(30), 1)
    cursor = store.events.after(NS, None).cursor
    assert store.snapshots.commit(NS, "a", first.manifest_digest, 0) == done
    assert store.snapshots.commit(NS, "a", second.manifest, 1) == second
    assert store.events.after(NS, cursor).events == ()
    assert store.snapshots.get(NS, "a").version == 2


def test_of_eight_writers_exactly_one_wins_each_version(store: Store) -> None:
    versions = 6
    wins: list[tuple[int, int]] = []
    conflicts: list[int] = []
    barrier = threading.Barrier(8)

    def writer(number: int) -> None:
        for parent in range(versions):
            content = SyntheticAgent(SMALL, 100 * number + parent).turn(40)
            upload(store, content)
            barrier.wait()
            try:
                done = store.snapshots.commit(NS, "contested", content.manifest_digest, parent)
                wins.append((done.version, number))
            except Conflict:
                conflicts.append(number)
            barrier.wait()

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(version for version, _ in wins) == list(range(1, versions + 1))
    assert len(conflicts) == 7 * versions
    assert store.statistics.of(NS).counters["conflicts"] == 7 * versions


# --- what a manifest needs ---


def test_a_missing_blob_refuses_the_commit_and_is_named(store: Store) -> None:
    content = SyntheticAgent(MIXED, 1).turn(600)
    write(store, content.manifest_digest, content.manifest_bytes, BlobKind.MANIFEST)
    for digest, data in content.new_blobs.items():
        with pytest.raises(FailedPrecondition) as refused:
            store.snapshots.commit(NS, "a", content.manifest_digest, 0)
        assert (refused.value.reason, refused.value.metadata["digest"]) == ("BLOB_MISSING", digest.hash)
        with pytest.raises(NotFound):
            store.agents.get(NS, "a")
        write(store, digest, data, BlobKind.TENSORS)
    store.snapshots.commit(NS, "a", content.manifest_digest, 0)


def test_a_missing_or_damaged_manifest_refuses_the_commit(lab: Lab, store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(30)
    with pytest.raises(FailedPrecondition, match="manifest"):
        store.snapshots.commit(NS, "a", content.manifest_digest, 0)
    upload(store, content)
    lab.overwrite(content.manifest_digest, b"")
    with pytest.raises(FailedPrecondition) as refused:
        store.snapshots.commit(NS, "a", content.manifest_digest, 0)
    assert refused.value.reason == "BLOB_MISSING"


def test_a_damaged_blob_refuses_the_commit(lab: Lab, store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    upload(store, content)
    digest = content.digests[1]
    lab.overwrite(digest, b"")
    list(store.care.verify(NS))
    with pytest.raises(FailedPrecondition) as refused:
        store.snapshots.commit(NS, "a", content.manifest_digest, 0)
    assert refused.value.metadata["digest"] == digest.hash


def block_of(tokens: list[int], index: int, parent: str, identity: identity_pb2.KvIdentity = SMALL) -> bytes:
    return tensor_file(identity, index, parent, tuple(tokens))


TOKENS = list(range(512))
OTHER_WEIGHTS = kv_identity("other weights", full_layers(1, 1, 64))
OTHER_SHAPES = kv_identity("small", full_layers(2, 1, 64))


UNFIT: tuple[tuple[int, bytes, str], ...] = (
    (1, block_of(TOKENS[256:], 0, ""), "start"),
    (1, block_of(TOKENS[:256], 1, ""), "chain"),
    (0, block_of([*TOKENS[:255], 7], 0, ""), "chain"),
    (0, block_of(TOKENS[:256], 0, "", OTHER_WEIGHTS), "kv_identity"),
    (0, block_of(TOKENS[:255], 0, ""), "kind"),
    (0, state_file(MIXED, TOKENS), "kv_identity"),
)


def test_a_block_of_other_tokens_place_or_weights_refuses_the_commit(store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(TOKENS)
    upload(store, content)
    for number, data, why in UNFIT:
        write(store, Digest.of(data), data, BlobKind.TENSORS)
        manifest = manifest_pb2.Manifest.FromString(content.manifest_bytes)
        manifest.blocks[number].CopyFrom(Digest.of(data).to_proto())
        refuse_unfit(store, manifest, Digest.of(data), why)


def write_and_commit(store: Store, manifest: bytes) -> None:
    write(store, Digest.of(manifest), manifest, BlobKind.MANIFEST)
    store.snapshots.commit(NS, "a", Digest.of(manifest), 0)


def refuse_unfit(store: Store, manifest: manifest_pb2.Manifest, named: Digest, why: str) -> None:
    raw = manifest.SerializeToString()
    write(store, Digest.of(raw), raw, BlobKind.MANIFEST)
    with pytest.raises(FailedPrecondition, match=why) as refused:
        store.snapshots.commit(NS, "a", Digest.of(raw), 0)
    assert refused.value.reason == "BLOB_UNFIT"
    assert refused.value.metadata["digest"] == named.hash


def test_a_block_with_tensors_of_another_layout_refuses_the_commit(store: Store) -> None:
    """It says that it is of our KV identity, but its tensors are of another."""
    content = SyntheticAgent(SMALL, 1).turn(TOKENS[:256])
    upload(store, content)
    other = block_of(TOKENS[:256], 0, "", OTHER_SHAPES)
    raw = other.replace(kv_identity_hash(OTHER_SHAPES).encode(), KV.encode())
    chain = SyntheticAgent(SMALL, 1)
    chain.turn(TOKENS[:256])
    other_chain = SyntheticAgent(OTHER_SHAPES, 1)
    other_chain.turn(TOKENS[:256])
    raw = raw.replace(other_chain._chains[0].encode(), chain._chains[0].encode())
    write(store, Digest.of(raw), raw, BlobKind.TENSORS)
    manifest = manifest_pb2.Manifest.FromString(content.manifest_bytes)
    manifest.blocks[0].CopyFrom(Digest.of(raw).to_proto())
    refuse_unfit(store, manifest, Digest.of(raw), "tensors")


def test_a_state_of_another_moment_refuses_the_commit(store: Store) -> None:
    content = SyntheticAgent(MIXED, 1).turn(TOKENS)
    upload(store, content)
    early = state_file(MIXED, TOKENS[:300])
    write(store, Digest.of(early), early, BlobKind.TENSORS)
    manifest = manifest_pb2.Manifest.FromString(content.manifest_bytes)
    manifest.states[0].digest.CopyFrom(Digest.of(early).to_proto())
    refuse_unfit(store, manifest, Digest.of(early), "tokens: expected 512, found 300")


def test_a_state_of_another_shape_refuses_the_commit(store: Store) -> None:
    """It says that it is of this moment, and one of its tensors has a row more (LESSONS 12)."""
    content = SyntheticAgent(MIXED, 1).turn(TOKENS)
    upload(store, content)
    state = Digest.from_proto(content.manifest.states[0].digest)
    header = parse_header(content.new_blobs[state], state.size_bytes)
    first, second = header.tensors
    specs = [replace(first, shape=(first.shape[0] + 1, *first.shape[1:])), second]
    wrong = encode(header.identity, random_tensors(specs, "larger"))
    write(store, Digest.of(wrong), wrong, BlobKind.TENSORS)
    manifest = manifest_pb2.Manifest.FromString(content.manifest_bytes)
    manifest.states[0].digest.CopyFrom(Digest.of(wrong).to_proto())
    refuse_unfit(store, manifest, Digest.of(wrong), "tensors: not those of a state of the layout")


def _without_chars(message: manifest_pb2.Manifest) -> None:
    """All text belongs to the first token."""
    message.token_chars[:] = [len(message.text)] + [0] * (len(message.token_ids) - 1)


def test_a_blob_that_is_a_manifest_is_no_block_and_a_block_is_no_manifest(store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(TOKENS)
    upload(store, content)
    manifest = manifest_pb2.Manifest.FromString(content.manifest_bytes)
    manifest.blocks[1].CopyFrom(content.manifest_digest.to_proto())
    refuse_unfit(store, manifest, content.manifest_digest, "kind: expected block, found manifest")
    with pytest.raises(InvalidArgument):
        store.snapshots.commit(NS, "a", content.digests[0], 0)


CONTRADICTIONS: tuple[tuple[str, Callable[[manifest_pb2.Manifest], object]], ...] = (
    ("format", lambda m: setattr(m, "format", 2)),
    ("token_ids", lambda m: m.ClearField("token_ids")),
    ("blocks", lambda m: m.blocks.pop()),
    ("blocks", lambda m: (m.token_ids.extend(range(256)), m.token_chars.extend([0] * 256))),
    ("tail", lambda m: m.ClearField("tail")),
    ("tail", lambda m: (_without_chars(m), [(m.token_ids.pop(), m.token_chars.pop()) for _ in range(44)])),
    ("token_chars", lambda m: m.token_chars.pop()),
    ("token_chars", lambda m: m.ClearField("token_chars")),
    ("token_chars", lambda m: setattr(m, "text", m.text + "x")),
    ("shareable_tokens", lambda m: setattr(m, "shareable_tokens", 601)),
    ("parent_manifest", lambda m: setattr(m, "parent_manifest", "../x")),
    ("kv_identity.weights_digest", lambda m: setattr(m.kv_identity, "weights_digest", "AB" * 32)),
    ("kv_identity.layers", lambda m: m.kv_identity.ClearField("layers")),
    ("kv_identity.layers[0].kind", lambda m: setattr(m.kv_identity.layers[0], "kind", 99)),
    ("kv_identity.policy.group_size", lambda m: setattr(m.kv_identity.policy, "group_size", 0)),
    ("kv_identity.policy.scale_type", lambda m: setattr(m.kv_identity.policy, "scale_type", 0)),
    ("kv_identity.policy.key_rotation", lambda m: setattr(m.kv_identity.policy, "key_rotation", -1)),
    ("kv_identity.policy.key_bits", lambda m: setattr(m.kv_identity.policy, "key_bits", 5)),
    ("states", lambda m: m.states.add(tokens=5)),
    ("blocks[0]", lambda m: setattr(m.blocks[0], "hash", "../../x")),
    ("blocks[1]", lambda m: setattr(m.blocks[1], "size_bytes", -1)),
    ("blobs", lambda m: m.blocks[1].CopyFrom(m.blocks[0])),
)


def test_a_manifest_that_contradicts_itself_is_refused_by_field(store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(556)
    for number, (field, change) in enumerate(CONTRADICTIONS):
        manifest = manifest_pb2.Manifest.FromString(content.manifest_bytes)
        change(manifest)
        with pytest.raises(InvalidArgument) as refused:
            write_and_commit(store, manifest.SerializeToString())
        assert refused.value.reason == "MANIFEST_REFUSED", number
        assert field in str(refused.value), number


def test_a_hostile_name_is_refused(store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(30)
    publish(store, "a", content, 0)
    for name in ("", "a\x00b", "a\nb", "e\u0301", "x" * 257, "\u202eevil"):
        with pytest.raises(InvalidArgument):
            publish(store, name, content, 0)
        with pytest.raises(InvalidArgument):
            publish(store, "a", content, 0, namespace=name)
        with pytest.raises(InvalidArgument):
            store.agents.fork(NS, "a", name)


# --- lines ---
