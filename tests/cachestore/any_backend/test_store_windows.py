"""Windows in blocks: each window's blocks are named, checked, shared, kept and collected like any others."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir.formats.block_file import FileIdentity, encode
from kvasir.formats.block_hash import chain_hash, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import row_groups
from kvasir.formats.tensor_layouts import expected_tensors

from cachestore_svc.facts.records import BlobKind, FoundPrefix, Origin
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, damaged, prefix_of, publish, upload, write
from tests.made_models.synthetic import (
    SMALL,
    WINDOWED,
    SyntheticAgent,
    SyntheticSnapshot,
    kv_identity,
    random_tensors,
    tensor_file,
    window_layer,
)

KV = kv_identity_hash(WINDOWED)
GROUPS = (0, 300, 512)
TOKENS = list(range(600))
ONLY_WINDOW = kv_identity("only a window", [window_layer(512)])


def find(store: Store, agent: SyntheticAgent, tokens: int | None = None) -> FoundPrefix:
    hashes = agent.block_hashes(NS)
    count = len(hashes) if tokens is None else tokens // 256
    return store.prefixes.find(NS, kv_identity_hash(agent.identity), hashes[:count], row_groups(agent.identity))


def listed(snapshot: SyntheticSnapshot, group: int) -> dict[int, Digest]:
    """Digests of a group's full blocks, by their index."""
    message = snapshot.manifest
    if group == 0:
        return dict(enumerate(map(Digest.from_proto, message.blocks)))
    [found] = (each for each in message.windows if each.window == group)
    return {found.first_block + place: Digest.from_proto(digest) for place, digest in enumerate(found.blocks)}


# --- commits ---


def test_a_turn_of_50_tokens_writes_at_most_a_block_and_a_tail_of_each_group_and_a_manifest(store: Store) -> None:
    agent = SyntheticAgent(WINDOWED, 1)
    publish(store, "a", agent.turn(2000), 0)
    for turn in range(1, 12):
        before = store.statistics.of(NS).counters["blobs_written"]
        content = agent.turn(50)
        assert_restores(store, publish(store, "a", content, turn), content)
        filled = len(agent.token_ids) // 256 - (len(agent.token_ids) - 50) // 256
        tails = bool(len(agent.token_ids) % 256)
        assert store.statistics.of(NS).counters["blobs_written"] - before == 3 * filled + 3 * tails + 1
    assert store.care.check().is_clean


def window_file(window: int, start: int, tokens: list[int], identity: identity_pb2.KvIdentity = WINDOWED) -> bytes:
    chain, kv_hash = "", kv_identity_hash(identity)
    for first in range(0, start, 256):
        chain = chain_hash(kv_hash, chain, TOKENS[first : first + 256])
    return tensor_file(identity, start // 256, chain, tuple(tokens), engine_seed=9, group=window)


def forged(says: int, holds: int) -> bytes:
    """A file that says it is of one group, with the tensors of another."""
    kv_hash = kv_identity_hash(WINDOWED)
    chain = chain_hash(kv_hash, "", TOKENS[:256])
    chain = chain_hash(kv_hash, chain, TOKENS[256:512])
    return encode(
        FileIdentity("block", kv_hash, 256, 256, chain, says),
        random_tensors(expected_tensors(WINDOWED, 256, holds), "forged"),
    )


OTHER_WEIGHTS = kv_identity("other weights", WINDOWED.layers)


UNFIT: tuple[tuple[bytes, str], ...] = (
    (window_file(512, 256, TOKENS[256:512]), "window: expected 300, found 512"),
    (window_file(0, 256, TOKENS[256:512]), "window: expected 300, found 0"),
    (window_file(300, 0, TOKENS[:256]), "start"),
    (window_file(300, 256, [*TOKENS[256:511], 7]), "chain"),
    (window_file(300, 256, TOKENS[256:511]), "kind"),
    (window_file(300, 256, TOKENS[256:512], OTHER_WEIGHTS), "kv_identity"),
    (forged(says=300, holds=512), "tensors"),
    (forged(says=512, holds=300), "window"),
)


def test_a_window_block_of_another_group_place_or_turn_refuses_the_commit(store: Store) -> None:
    content = SyntheticAgent(WINDOWED, 1).turn(TOKENS)
    upload(store, content)
    message = manifest_pb2.Manifest.FromString(content.manifest_bytes)
    assert (message.windows[0].window, message.windows[0].first_block, len(message.windows[0].blocks)) == (300, 1, 1)
    for data, why in UNFIT:
        write(store, Digest.of(data), data, BlobKind.TENSORS)
        message.windows[0].blocks[0].CopyFrom(Digest.of(data).to_proto())
        raw = message.SerializeToString()
        write(store, Digest.of(raw), raw, BlobKind.MANIFEST)
        with pytest.raises(FailedPrecondition, match=why) as refused:
            store.snapshots.commit(NS, "a", Digest.of(raw), 0)
        assert (refused.value.reason, refused.value.metadata["digest"]) == ("BLOB_UNFIT", Digest.of(data).hash)


def test_a_window_block_that_is_not_stored_refuses_the_commit(store: Store) -> None:
    content = SyntheticAgent(WINDOWED, 1).turn(TOKENS)
    [missing] = listed(content, 300).values()
    upload(store, replace(content, new_blobs={d: b for d, b in content.new_blobs.items() if d != missing}))
    with pytest.raises(FailedPrecondition) as refused:
        store.snapshots.commit(NS, "a", content.manifest_digest, 0)
    assert (refused.value.reason, refused.value.metadata["digest"]) == ("BLOB_MISSING", missing.hash)


# --- prefixes ---


def test_a_prefix_is_found_where_every_window_has_what_the_next_token_sees(store: Store) -> None:
    """1,100 tokens: window 300 lists block 3, and window 512 blocks 2 and 3. So the last border is the only one."""
    agent = SyntheticAgent(WINDOWED, 1)
    content = agent.turn(1100, is_prompt=True)
    publish(store, "a", content, 0, bind_shared=True)
    found = find(store, agent)
    # Behind 1,024 tokens, window 300 sees block 2 too, which this memory no longer lists.
    assert (sorted(listed(content, 300)), sorted(listed(content, 512))) == ([3], [2, 3])
    assert found.tokens == 0
    wider = SyntheticAgent(WINDOWED, 1, more_window_blocks=1)
    content = wider.turn(1100, is_prompt=True)
    publish(store, "b", content, 0, bind_shared=True)
    found = find(store, wider)
    assert found.tokens == 1024
    assert {each.group: each.first_block for each in found.groups} == {0: 0, 300: 2, 512: 2}
    for each in found.groups:
        there = listed(content, each.group)
        assert each.blocks == tuple(there[index] for index in range(each.first_block, 4))
    # At 768 tokens, window 300 lacks block 1; the layers that keep all tokens have it.
    assert find(store, wider, 768).tokens == 0
    assert prefix_of(store, NS, KV, wider.block_hashes(NS)) == list(listed(content, 0).values())


def test_a_prefix_from_position_0_is_found_at_every_border(store: Store) -> None:
    agent = SyntheticAgent(WINDOWED, 1, more_window_blocks=10)
    content = agent.turn(1100, is_prompt=True)
    publish(store, "a", content, 0, bind_shared=True)
    for tokens in (256, 512, 768, 1024):
        found = find(store, agent, tokens)
        assert found.tokens == tokens
        for each in found.groups:
            first_row = max(0, tokens - (each.group - 1)) if each.group else 0
            assert each.first_block == first_row // 256
            assert list(each.blocks) == list(listed(content, each.group).values())[each.first_block : tokens // 256]


def test_a_layout_of_windows_alone_is_found_by_its_windows(store: Store) -> None:
    agent = SyntheticAgent(ONLY_WINDOW, 1, more_window_blocks=1)
    content = agent.turn(1100, is_prompt=True)
    publish(store, "a", content, 0, bind_shared=True)
    [found] = find(store, agent).groups
    assert (find(store, agent).tokens, found.group, found.first_block) == (1024, 512, 2)
    assert found.blocks == tuple(listed(content, 512)[index] for index in (2, 3))


def test_generated_tokens_are_found_in_no_group(store: Store) -> None:
    agent = SyntheticAgent(WINDOWED, 1, more_window_blocks=10)
    publish(store, "a", agent.turn(600, is_prompt=True), 0, bind_shared=True)
    publish(store, "a", agent.turn(600), 1, bind_shared=True)
    assert find(store, agent).tokens == 512


@pytest.mark.long(6)
def test_many_agents_with_one_prefix_hold_its_blocks_once(store: Store) -> None:
    first = SyntheticAgent(WINDOWED, 0)
    content = first.turn(2048, is_prompt=True)
    publish(store, "agent-0", content, 0, bind_shared=True)
    assert find(store, first).tokens == 2048
    before = store.statistics.of(NS).blob_count
    for number in range(1, 40):
        publish(store, f"agent-{number}", first.fork(seed=number).turn([number]), 0)
    # Each adds a tail of each group and a manifest.
    assert store.statistics.of(NS).blob_count - before == 39 * 4


def test_the_first_binding_wins_in_every_group(store: Store) -> None:
    """What was computed on another machine's rows is not found behind these, also where these list no block."""
    ours = SyntheticAgent(WINDOWED, 1, engine_seed=1)
    theirs = SyntheticAgent(WINDOWED, 1, engine_seed=2, more_window_blocks=10)
    first = ours.turn(1024, is_prompt=True)
    publish(store, "a", first, 0, bind_shared=True)
    publish(store, "b", theirs.turn(list(ours.token_ids), is_prompt=True), 0, bind_shared=True)
    for agent in (ours, theirs):
        found = find(store, agent)
        assert found.tokens == 1024
        assert {each.group: each.blocks for each in found.groups} == {
            group: tuple(listed(first, group).values()) for group in GROUPS
        }
        assert find(store, agent, 256).tokens == 0


def test_a_damaged_or_brought_window_block_is_not_found(lab: Lab, store: Store) -> None:
    agent = SyntheticAgent(WINDOWED, 1, more_window_blocks=10)
    content = agent.turn(1100, is_prompt=True)
    publish(store, "a", content, 0, bind_shared=True)
    bad = listed(content, 512)[1]
    good = content.new_blobs[bad]
    lab.overwrite(bad, b"")
    list(store.care.verify(NS))
    assert damaged(store) == [bad]
    # Behind 512 and 768 tokens the window sees the damaged block; behind 1,024 no more.
    assert [find(store, agent, tokens).tokens for tokens in (256, 512, 768, 1024)] == [256, 256, 256, 1024]
    assert find(store, agent, 768) == find(store, agent, 256)
    write(store, bad, good, BlobKind.TENSORS)
    assert find(store, agent, 768).tokens == 768
    brought = SyntheticAgent(WINDOWED, 2, more_window_blocks=10)
    publish(store, "b", brought.turn(600, is_prompt=True), 0, bind_shared=True, origin=Origin.IMPORT)
    publish(store, "b", brought.turn(300, is_prompt=True), 1, bind_shared=True)
    assert find(store, brought).tokens == 0


def test_groups_that_no_layout_has_are_refused(store: Store) -> None:
    for groups in ((), (300, 0), (0, 0), (0, 1 << 32), (-1, 0), tuple(range(17))):
        with pytest.raises(InvalidArgument) as refused:
            store.prefixes.find(NS, KV, [], groups)
        assert refused.value.field == "groups", groups


def test_another_layouts_groups_find_nothing(store: Store) -> None:
    agent = SyntheticAgent(SMALL, 1)
    publish(store, "a", agent.turn(600, is_prompt=True), 0, bind_shared=True)
    found = store.prefixes.find(NS, kv_identity_hash(SMALL), agent.block_hashes(NS), (0, 300))
    assert found.tokens == 0


# --- garbage ---


def test_blocks_that_left_the_window_stay_with_the_versions_that_list_them_and_no_longer(lab: Lab) -> None:
    agent = SyntheticAgent(WINDOWED, 1)
    turns = [agent.turn(700) for _ in range(4)]
    early = set(listed(turns[0], 300).values()) | set(listed(turns[0], 512).values())
    late = {digest for turn in turns[1:] for digest in turn.digests}
    assert early.isdisjoint(late)

    def there(store: Store) -> bool:
        return not store.blobs.find_missing(NS, list(early))

    def collect(store: Store) -> None:
        for _ in range(2):
            store.care.collect_garbage(NS)
            lab.clock.pass_s(10_000)
        store.care.collect_garbage(NS)

    with lab.open(retained_versions=2) as store:
        publish(store, "a", turns[0], 0)
        store.agents.fork(NS, "a", "fork")
        for version, turn in enumerate(turns[1:], start=1):
            publish(store, "a", turn, version)
        collect(store)
        assert there(store)  # the fork lists them
        assert_restores(store, store.snapshots.get(NS, "fork"), turns[0])
        store.agents.delete(NS, "fork")
        collect(store)
        assert store.blobs.find_missing(NS, list(early)) == list(early)
        assert_restores(store, store.snapshots.get(NS, "a"), turns[-1])
        assert store.care.check().is_clean


def test_a_rolled_back_memory_has_the_blocks_of_its_windows(store: Store) -> None:
    agent = SyntheticAgent(WINDOWED, 1)
    turns = [agent.turn(700) for _ in range(3)]
    for version, turn in enumerate(turns):
        publish(store, "a", turn, version)
    back = store.agents.roll_back(NS, "a", 1)
    assert_restores(store, back, turns[0])


# --- manifests ---


CHANGES: dict[str, Callable[[manifest_pb2.Manifest], object]] = {
    "a window is missing": lambda m: m.windows.pop(),
    "a window of no layer": lambda m: setattr(m.windows[1], "window", 513),
    "no window at all": lambda m: m.ClearField("windows"),
    "begins behind the window": lambda m: (m.windows[0].ClearField("blocks"), setattr(m.windows[0], "first_block", 2)),
}


def test_a_manifest_whose_windows_are_not_the_layouts_is_refused(store: Store) -> None:
    content = SyntheticAgent(WINDOWED, 1).turn(TOKENS)
    upload(store, content)
    for name, change in CHANGES.items():
        message = manifest_pb2.Manifest.FromString(content.manifest_bytes)
        change(message)
        raw = message.SerializeToString()
        write(store, Digest.of(raw), raw, BlobKind.MANIFEST)
        with pytest.raises(InvalidArgument, match="windows") as refused:
            store.snapshots.commit(NS, "a", Digest.of(raw), 0)
        assert refused.value.reason == "MANIFEST_REFUSED", name
