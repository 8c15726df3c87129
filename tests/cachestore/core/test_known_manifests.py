"""A manifest that is read behind the one before it has the facts that it has alone, for any bytes."""

import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats import manifest as manifests
from kvasir.formats.digest import Digest
from kvasir.formats.manifest_checks import MANIFEST_FORMAT

from cachestore_svc.blobs.known_manifests import KEPT_BYTES, KnownManifest, KnownManifests, bytes_of
from cachestore_svc.blobs.manifests import ManifestFacts, read_manifest, shareable_hashes, shared_blocks
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import MIXED, SMALL, WINDOWED, SyntheticAgent, kv_identity, window_layer

NS = "home"
T = TypeVar("T")


def read(known: KnownManifests, data: bytes, namespace: str = NS, *, bind_shared: bool = True) -> KnownManifest:
    return known.read(namespace, Digest.of(data), data, bind_shared=bind_shared)


def written_otherwise(data: bytes) -> bytes:
    """The same manifest, whose character counts are not packed: nothing but protobuf reads it."""
    message = manifest_pb2.Manifest.FromString(data)
    chars = list(message.token_chars)
    message.ClearField("token_chars")
    number = manifest_pb2.Manifest.DESCRIPTOR.fields_by_name["token_chars"].number
    return message.SerializeToString() + b"".join(bytes((number << 3, count)) for count in chars)


def facts_of(found: ManifestFacts) -> list[object]:
    named = [found.kv_identity_hash, list(found.token_ids), found.shareable_blocks, found.request_id, found.named]
    return [found.kv_identity.SerializeToString(), *named, list(found.chain), found.parent, found.wake_ms]


TURN = st.tuples(
    st.sampled_from(["goes on", "is cut", "is forked", "is another's", "shares nothing"]),
    st.integers(1, 700),
    st.booleans(),
)


@settings(max_examples=sampled(40, of=200), deadline=None)
@example(SMALL, [("goes on", 600, True), ("is another model's", 100, True)])
@example(WINDOWED, [("shares nothing", 900, True), ("goes on", 300, True), ("goes on", 300, True)])
@given(st.sampled_from([SMALL, MIXED, WINDOWED]), st.lists(TURN, min_size=1, max_size=5))
def test_it_has_the_facts_that_it_has_alone(identity: object, turns: Sequence[tuple[str, int, bool]]) -> None:
    known, agent = KnownManifests(least_tokens=0), SyntheticAgent(identity, 1)  # type: ignore[arg-type]
    for number, (how, tokens, is_prompt) in enumerate(turns):
        if how == "is cut":
            agent.trim(len(agent.token_ids) * 2 // 3)
        elif how == "is forked":
            agent = agent.fork(number + 2)
        elif how == "is another's":  # under the same parent
            agent = SyntheticAgent(SMALL, number + 2, parent_manifest=agent.parent_manifest)
        elif how == "is another model's":  # of the same tokens
            other = kv_identity(f"model {number}", SMALL.layers)
            agent = SyntheticAgent(
                other, number + 2, token_ids=list(agent.token_ids), parent_manifest=agent.parent_manifest
            )
        data = agent.turn(tokens, is_prompt=is_prompt).manifest_bytes
        is_shared = how != "shares nothing"
        found, alone = read(known, data, bind_shared=is_shared), read_manifest(written_otherwise(data))
        assert not alone.packed_ids
        assert facts_of(found.facts) == facts_of(alone)
        assert found.shared == shared_blocks(alone, shareable_hashes(alone, NS) if is_shared else ())


def test_blocks_of_the_one_before_are_not_hashed_again() -> None:
    known, agent = KnownManifests(), SyntheticAgent(SMALL, 1)
    first = read(known, agent.turn(5_000, is_prompt=True).manifest_bytes)
    found = read(known, agent.turn(300).manifest_bytes)
    assert (first.facts.known_blocks, found.facts.known_blocks) == (0, 5_000 // 256)
    assert found.facts.named[0] is first.facts.named[0]
    assert read(known, agent.turn(300).manifest_bytes, "another").facts.known_blocks == 0


def test_one_namespace_keeps_a_bounded_part_and_takes_nothing_of_anothers() -> None:
    known, lines = KnownManifests(), SyntheticAgent(SMALL, 1)
    theirs = SyntheticAgent(SMALL, 2)
    read(known, theirs.turn(5_000).manifest_bytes, "theirs")
    base = lines.turn(60_000).manifest
    base.parent_manifest = ""
    for number in range(60):
        base.turn.request_id = f"line-{number}"
        read(known, base.SerializeToString(deterministic=True))
    kept = list(known._kept.values())
    assert KEPT_BYTES // 2 < sum(map(bytes_of, kept)) <= KEPT_BYTES
    assert kept[-1].facts.request_id == "line-59"
    assert read(known, theirs.turn(10).manifest_bytes, "theirs").facts.known_blocks == 5_000 // 256


def test_a_kept_manifest_is_counted_by_all_that_it_names() -> None:
    """Here the blocks of 60 windows, of few tokens: no blob of them has to exist."""
    identity = kv_identity("windows", [window_layer(5_000 + number) for number in range(60)])
    message = manifest_pb2.Manifest(format=MANIFEST_FORMAT, kv_identity=identity, token_chars=[0] * 4_200)
    known = KnownManifests()
    for first in range(2):  # what all share is made for the first one
        message.token_ids[:] = range(first, first + 4_200)
        del message.windows[:]
        for window in range(5_000, 5_060):
            *blocks, tail = ((Digest.of(b"%d %d %d" % (first, window, number))).to_proto() for number in range(17))
            message.windows.add(window=window, blocks=blocks, tail=tail)
        data = message.SerializeToString(deterministic=True)
        tracemalloc.start()
        found = read(known, data)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(known._kept) == 2
    assert taken <= bytes_of(found) <= 2 * taken


AGENT = SyntheticAgent(MIXED, 1)
ONE_MORE = manifest_pb2.Manifest(token_ids=[7], token_chars=[0]).SerializeToString()  # a reader joins the numbers
BEFORE, DATA = AGENT.turn(300, is_prompt=True).manifest_bytes, AGENT.turn(40).manifest_bytes


def numbers_first(data: bytes) -> bytes:
    """The same manifest as an engine writes it."""
    message = manifest_pb2.Manifest.FromString(data)
    numbers = {"token_ids": list(message.token_ids), "token_chars": list(message.token_chars)}
    for name in (*numbers, "format"):
        message.ClearField(name)  # type: ignore[arg-type]
    begin = manifest_pb2.Manifest(format=MANIFEST_FORMAT, **numbers).SerializeToString()  # type: ignore[arg-type]
    return begin + message.SerializeToString(deterministic=True)


@settings(max_examples=sampled(300, of=3_000), deadline=None)
@given(
    st.sampled_from([DATA, numbers_first(DATA), DATA + ONE_MORE]),
    st.integers(0, 2_000),
    st.binary(max_size=4),
    st.integers(0, 4),
)
def test_changed_bytes_are_read_as_without_it_or_refused_for_the_same_reason(
    data: bytes, at: int, new: bytes, removed: int
) -> None:
    data = data[:at] + new + data[at + removed :]
    expected, refusal = outcome(lambda: manifests.parse(data))
    found, refused = outcome(lambda: read_manifest(data, lambda _: read_manifest(BEFORE)))
    assert refused == refusal
    if found is not None and expected is not None:
        assert found.token_ids == array("I", expected.token_ids)
        assert [each.digest for each in found.named] == manifests.digests(expected)


def outcome(work: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return work(), ""
    except InvalidArgument as refused:
        return None, refused.message
