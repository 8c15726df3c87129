"""Messages of frames that protobuf's own code does not copy: the same bytes, and read as protobuf reads them."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import (
    LEAST_KEPT_BYTES,
    LEAST_KEPT_PART,
    MAX_FRAMES,
    Carrier,
    carrier_bytes,
    carrier_reader,
)
from kvasir.formats.frames import FRAME_BYTES, FrameAssembler, frame_messages, frames_of, joined_messages

READS = {kind: carrier_reader(kind) for kind in (pb.WriteBlobsRequest, pb.ReadBlobsResponse)}
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
HEADS = st.builds(
    pb.BlobFrame,
    digest=st.none() | st.builds(manifest_pb2.Digest, hash=st.text(max_size=64), size_bytes=NUMBERS),
    kind=st.integers(-(1 << 31), (1 << 31) - 1),
    offset=NUMBERS,
)
SIZES = st.sampled_from((0, 1, 127, 128, 16_383, 16_384, 300_000))
SIZES_IN_ORDER = (300_000, 300_000, 300_000, 300_000, 0, 5, (2 << 20) + 1, 300_000)


def fields_of(read: Any, message: bytes) -> Any:
    """What a parser finds in a message."""
    try:
        found = read(message)
    except DecodeError:
        return DecodeError
    frames = found.frames if isinstance(found, Carrier) else (found.frame, *found.more)
    fields = [(each.HasField("digest"), each.digest, each.kind, each.offset, bytes(each.data)) for each in frames]
    return fields, getattr(found, "handed", "")


@given(st.lists(st.tuples(HEADS, SIZES), min_size=1, max_size=4))
def test_a_message_has_the_bytes_that_protobuf_makes_and_its_data_are_not_copied_again(
    frames: list[tuple[pb.BlobFrame, int]],
) -> None:
    data = [bytes(range(256)) * (size // 256) + bytes(size % 256) for _, size in frames]
    message = carrier_bytes((head, memoryview(each)) for (head, _), each in zip(frames, data, strict=True))
    for (head, _), each in zip(frames, data, strict=True):
        head.data = each
    first, *more = [head for head, _ in frames]
    for kind, read in READS.items():
        assert message == kind(frame=first, more=more).SerializeToString(deterministic=True)
        found = [frame.data for frame in read(message).frames]
        assert found == data
        if all(data):  # else protobuf reads it
            least = max(LEAST_KEPT_BYTES, len(message) // LEAST_KEPT_PART) if len(data) > 1 else 0
            assert [isinstance(each, memoryview) for each in found] == [len(each) >= least for each in data]
            assert all(each.obj is message for each in found if isinstance(each, memoryview))


@given(st.lists(st.tuples(HEADS, st.binary(max_size=300)), min_size=1, max_size=3), st.data())
def test_a_message_of_any_other_form_is_read_as_protobuf_reads_it(
    frames: list[tuple[pb.BlobFrame, bytes]], draw: st.DataObject
) -> None:
    message = bytearray(carrier_bytes((head, memoryview(data)) for head, data in frames))
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
        (ONE, b"\x1a\x03" + ONE),  # a further frame
        (ONE, b"\x1a\x02\x18\x07\x1a\x03" + ONE),  # one without data
        (ONE, b"\x1a\x03" + ONE + b"\x0a\x02\x18\x07"),  # the first frame goes on behind it
        (ONE, b"\x1a\x05\x0a\x03\x22\x01x" + ONE),  # a digest that ends where its frame does
        (b"", b""),
    ],
)
def test_a_message_in_an_unusual_order_is_read_as_protobuf_reads_it(frame: bytes, behind: bytes) -> None:
    message = b"\x0a" + bytes((len(frame),)) + frame + behind
    assert fields_of(READS[pb.WriteBlobsRequest], message) == fields_of(pb.WriteBlobsRequest.FromString, message)
    for end in range(len(message)):
        cut = message[:end]
        assert fields_of(READS[pb.WriteBlobsRequest], cut) == fields_of(pb.WriteBlobsRequest.FromString, cut)


def test_a_number_of_more_bytes_than_numbers_have_is_refused() -> None:
    """To add up a mebibyte of them would keep the event loop for half a minute."""
    for read in READS.values():
        for size in (b"\x83" + b"\x80" * 10 + b"\x00", b"\xff" * (1 << 20)):
            with pytest.raises(DecodeError):
                read(b"\x0a" + size + ONE)


def test_a_field_that_repeats_for_long_is_read_by_protobuf() -> None:
    """To walk through a mebibyte of them would keep the event loop for a third of a second."""
    message = b"\x0a\xd3\x0f" + b"\x18\x05" * 1000 + ONE
    for kind, read in READS.items():
        assert fields_of(read, message) == fields_of(kind.FromString, message)
        assert isinstance(read(message).frames[0].data, bytes)


def test_data_of_a_frame_keeps_at_most_four_times_as_much() -> None:
    message = carrier_bytes((pb.BlobFrame(), memoryview(bytes(size))) for size in (LEAST_KEPT_BYTES, 7 << 18, 7 << 18))
    for read in READS.values():
        for frame in read(message).frames:
            kept = frame.data.obj if isinstance(frame.data, memoryview) else frame.data
            assert len(kept) <= 4 * len(frame.data)


def test_a_message_of_more_frames_than_may_be_is_refused() -> None:
    some = [pb.BlobFrame(offset=number, data=b"x") for number in range(MAX_FRAMES)]
    for kind, read in READS.items():
        assert len(read(kind(frame=some[0], more=some[1:]).SerializeToString()).frames) == MAX_FRAMES
        for empty in (pb.BlobFrame(), some[0]):
            with pytest.raises(DecodeError):
                read(kind(frame=some[0], more=[*some[1:], empty]).SerializeToString())


class Unparsed:
    """A message that nobody may parse."""

    @staticmethod
    def FromString(_message: bytes) -> None:  # noqa: N802 - protobuf names it
        raise AssertionError("it was parsed")


@pytest.mark.parametrize("first", [b"", b"\x12\x01t", b"\x78\x01", b"\x7b\x7c", b"\x79" + bytes(8), b"\x7d" + bytes(4)])
def test_frames_without_number_are_counted_before_they_are_parsed(first: bytes) -> None:
    """Whichever fields are among them: the token of files, and those of a later version."""
    for frames in (b"\x0a\x00" + b"\x1a\x00" * 1_000_000, b"\x1a\x00" * 100, b"\x1a\x02\x18\x01" * 100 + b"\x07"):
        with pytest.raises(DecodeError):
            carrier_reader(Unparsed)(first + frames)
    for kind, read in READS.items():
        message = first + ONE + b"\x1a\x00" * (MAX_FRAMES - 1)
        assert len(read(message).frames) == MAX_FRAMES == len(kind.FromString(message).more) + 1


def test_small_blobs_share_messages_of_a_mebibyte_and_large_ones_do_not() -> None:
    blobs = {Digest.of(data): data for data in (bytes((n,)) * size for n, size in enumerate(SIZES_IN_ORDER))}
    digests = list(blobs)
    found = [READS[pb.WriteBlobsRequest](each).frames for each in joined_messages(digests, blobs, 1, 7)]
    assert [[len(frame.data) for frame in frames] for frames in found] == [
        [300_000 - 7, 300_000, 300_000],
        [300_000, 0, 5],
        [FRAME_BYTES],
        [FRAME_BYTES],
        [1, 300_000],
    ]
    assembler = FrameAssembler(digests)
    named = [frame.digest.hash for frames in found for frame in frames if frame.HasField("digest")]
    assert named == [digest.hash for digest in digests]
    rest = [frame for frames in found for frame in frames][1:]
    whole = frames_of(digests[0], blobs[digests[0]], 1)
    assert [bytes(blob[1]) for frame in (*whole, *rest) if (blob := assembler.add(frame))] == list(blobs.values())
    tiny = {Digest.of(bytes((n,))): bytes((n,)) for n in range(MAX_FRAMES + 1)}
    many = [READS[pb.WriteBlobsRequest](each).frames for each in joined_messages(tiny, tiny, 1)]
    assert [len(frames) for frames in many] == [MAX_FRAMES, 1]


def test_a_blobs_frames_copy_its_bytes_once() -> None:
    data = bytes(3 << 20)
    [*messages] = frame_messages(Digest.of(data), data, pb.BLOB_KIND_TENSORS, 5)
    assert sum(map(len, messages)) < len(data) + 200
    assert b"".join(READS[pb.WriteBlobsRequest](each).frames[0].data for each in messages) == data[5:]
