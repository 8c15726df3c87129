"""Manifests from strangers: whatever the bytes, they are read or refused, and nothing else happens."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import row_groups
from kvasir.formats.manifest import MAX_MANIFEST_BYTES

from cachestore_svc.blobs.manifests import read_manifest
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import MIB, NS, write
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import MIXED, SMALL, WINDOWED, SyntheticAgent

MANIFEST = SyntheticAgent(MIXED, 1).turn(300).manifest_bytes
NUMBERS = st.integers(0, (1 << 32) - 1)
LAYER = st.builds(
    identity_pb2.LayerLayout,
    kind=st.integers(-2, 6),
    window=NUMBERS,
    kv_heads=NUMBERS,
    key_dim=NUMBERS,
    value_dim=NUMBERS,
    state_tensors=st.lists(
        st.builds(identity_pb2.StateTensor, type=st.integers(-1, 4), shape=st.lists(NUMBERS, max_size=9)), max_size=2
    ),
)
POLICY = st.builds(
    identity_pb2.KvPolicy,
    key_bits=st.sampled_from([0, 4, 5, 8, 16]),
    value_bits=st.sampled_from([4, 8, 16]),
    group_size=st.sampled_from([0, 1, 64, (1 << 32) - 1]),
    scale_type=st.integers(-1, 3),
    key_rotation=st.integers(-1, 3),
    exact_layers=st.lists(NUMBERS, max_size=2),
)


def reads_or_refuses(data: bytes) -> None:
    try:
        read_manifest(data)
    except InvalidArgument as refused:
        assert refused.reason == "MANIFEST_REFUSED"  # noqa: PT017  both ends are right


@settings(max_examples=sampled(60, of=200), deadline=None)
@given(
    st.lists(
        st.builds(
            manifest_pb2.WindowBlocks,
            window=st.sampled_from([0, 127, 128, (1 << 32) - 1]),
            first_block=st.sampled_from([0, 1, 2, (1 << 64) - 1]),
            blocks=st.lists(
                st.builds(manifest_pb2.Digest, hash=st.sampled_from(["ab" * 32, "cd" * 32, "x"])), max_size=2
            ),
            tail=st.sampled_from([None, manifest_pb2.Digest(hash="ef" * 32)]),
        ),
        max_size=3,
    )
)
def test_any_windows_are_read_or_refused(windows: list[manifest_pb2.WindowBlocks]) -> None:
    message = manifest_pb2.Manifest.FromString(MANIFEST)
    message.ClearField("windows")
    message.windows.extend(windows)
    reads_or_refuses(message.SerializeToString())


@settings(max_examples=sampled(80, of=300), deadline=None)
@given(st.integers(0, len(MANIFEST) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_changed_bytes_are_read_or_refused(position: int, new: bytes, removed: int) -> None:
    reads_or_refuses(MANIFEST[:position] + new + MANIFEST[position + removed :])


@settings(max_examples=sampled(60, of=200), deadline=None)
@given(st.lists(LAYER, max_size=3), POLICY)
def test_any_layout_and_policy_is_read_or_refused(
    layers: list[identity_pb2.LayerLayout], policy: identity_pb2.KvPolicy
) -> None:
    message = manifest_pb2.Manifest.FromString(MANIFEST)
    message.kv_identity.CopyFrom(identity_pb2.KvIdentity(weights_digest="ab" * 32, layers=layers, policy=policy))
    reads_or_refuses(message.SerializeToString())


@given(st.binary(max_size=200))
def test_no_bytes_whatever_do_anything_else(data: bytes) -> None:
    reads_or_refuses(data)


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 512, 513])
def test_what_an_engine_writes_is_read_with_a_blob_per_block_and_rest(tokens: int) -> None:
    for identity in (SMALL, MIXED, WINDOWED):
        content = SyntheticAgent(identity, 1).turn(tokens)
        facts = read_manifest(content.manifest_bytes)
        assert [blob.digest for blob in facts.named] == content.digests
        tails = [(blob.file.window, blob.file.tokens) for blob in facts.named if blob.file.kind == "tail"]
        assert tails == ([(group, tokens % 256) for group in row_groups(identity)] if tokens % 256 else [])


def test_a_tensor_file_is_not_taken_for_a_manifest(store: Store) -> None:
    digest, data = next(iter(SyntheticAgent(SMALL, 1).turn(256).new_blobs.items()))
    with pytest.raises(InvalidArgument):
        write(store, digest, data, BlobKind.MANIFEST, frame=1)
    write(store, digest, data, BlobKind.TENSORS)


def test_a_manifest_that_nobody_would_read_is_refused_before_a_byte_is_written(store: Store) -> None:
    digest = Digest("ab" * 32, MAX_MANIFEST_BYTES + 1)
    with pytest.raises(InvalidArgument) as refused:
        store.blobs.open_writer(NS, digest, BlobKind.MANIFEST)
    assert refused.value.reason == "BLOB_TOO_LARGE"
    assert store.statistics.of(NS).reserved_bytes == 0


def test_a_manifest_on_its_way_in_takes_no_memory(store: Store) -> None:
    with store.blobs.open_writer(NS, Digest("cd" * 32, MAX_MANIFEST_BYTES), BlobKind.MANIFEST) as writer:
        writer.write(0, b"\x08\x01")
        piece = bytes(MIB)
        tracemalloc.start()
        try:
            for number in range(8):
                writer.write(2 + number * MIB, piece)
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()
