"""Messages of frames that protobuf's own code does not copy: the same bytes, and read as protobuf reads them."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import carrier_bytes, carrier_reader
from kvasir.formats.frames import frame_messages

READS = {kind: carrier_reader(kind) for kind in (pb.WriteBlobsRequest, pb.ReadBlobsResponse)}
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
HEADS = st.builds(
    pb.BlobFrame,
    digest=st.none() | st.builds(manifest_pb2.Digest, hash=st.text(max_size=64), size_bytes=NUMBERS),
    kind=st.integers(-(1 << 31), (1 << 31) - 1),
    offset=NUMBERS,
)
SIZES = st.sampled_from((0, 1, 127, 128, 16_383, 16_384, 300_000))


def fields_of(read: Any, message: bytes) -> Any:
    """What a parser finds in a message."""
    try:
        found = read(message)
    except DecodeError:
        return DecodeError
    frame = found.frame
    has_digest = frame.HasField("digest")
    return has_digest, frame.digest, frame.kind, frame.offset, bytes(frame.data), getattr(found, "handed", "")


@given(HEADS, SIZES)
def test_a_message_has_the_bytes_that_protobuf_makes_and_its_data_are_not_copied_again(
    head: pb.BlobFrame, size: int
) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    message = carrier_bytes(head, memoryview(data))
    head.data = data
    for kind, read in READS.items():
        assert message == kind(frame=head).SerializeToString(deterministic=True)
        found = read(message).frame.data
        assert found == data
        assert not size or found.obj is message


@given(HEADS, st.binary(max_size=300), st.data())
def test_a_message_of_any_other_form_is_read_as_protobuf_reads_it(
    head: pb.BlobFrame, data: bytes, draw: st.DataObject
) -> None:
    message = bytearray(carrier_bytes(head, memoryview(data)))
    for _ in range(draw.draw(st.integers(0, 3))):
        at = draw.draw(st.integers(0, len(message)))
        message[at : at + draw.draw(st.integers(0, 3))] = draw.draw(st.binary(max_size=3))
    for kind, read in READS.items():
        assert fields_of(read, bytes(message)) == fields_of(kind.FromString, bytes(message))


ONE = b"\x22\x01x"


@pytest.mark.parametrize(
    ("frame", "behind"),
    [
        (ONE + b"\x18\x05", b""),  # the offset behind the data
        (ONE + b"\x22\x02yz", b""),  # data twice
        (b"\x2a\x01u" + ONE, b""),  # a field that is not known
        (b"\x18\x05" * 2 + ONE, b""),
        (b"\x18" + b"\xff" * 9 + b"\x7f" + ONE, b""),  # a number of more than 64 bits
        (ONE, b"\x0a\x02\x18\x07"),  # two frames
        (b"\x18\x05", b"\x12\x20" + b"a" * 32),  # a handed file
        (b"", b""),
    ],
)
def test_a_message_in_an_unusual_order_is_read_as_protobuf_reads_it(frame: bytes, behind: bytes) -> None:
    message = b"\x0a" + bytes((len(frame),)) + frame + behind
    assert fields_of(READS[pb.WriteBlobsRequest], message) == fields_of(pb.WriteBlobsRequest.FromString, message)
    for end in range(len(message)):
        cut = message[:end]
        assert fields_of(READS[pb.WriteBlobsRequest], cut) == fields_of(pb.WriteBlobsRequest.FromString, cut)


def test_a_blobs_frames_copy_its_bytes_once() -> None:
    data = bytes(3 << 20)
    [*messages] = frame_messages(Digest.of(data), data, pb.BLOB_KIND_TENSORS, 5)
    assert sum(map(len, messages)) < len(data) + 200
    assert b"".join(READS[pb.WriteBlobsRequest](each).frame.data for each in messages) == data[5:]
