"""The messages that carry frames, WriteBlobsRequest and ReadBlobsResponse: to bytes with one copy of their data, and
back with none.

Both have a frame as field 1 and further frames as field 3, and a frame has its data as its last field. Protobuf's own
code copies the data seven times from one process to the other. What it would read in another way than this file is left
to it."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from kvasir.cachestore.v1 import cachestore_pb2 as pb

# Of one message. Many empty frames take a lot more memory than bytes of a message.
MAX_FRAMES = 64
# Smaller data that came with others, or a smaller part of their message, are copied: whoever keeps them would keep the
# whole message, which may have as many bytes as gRPC takes.
LEAST_KEPT_BYTES, LEAST_KEPT_PART = 256 << 10, 4
_OTHER_FIELDS = 16
_MOST_SHIFT = 63  # of the last of a number's ten bytes
_MOST_HEAD_BYTES = 256  # the fields before the data have a hundred
_NUMBER, _BYTES, _FIXED_BYTES = 0, 2, {1: 8, 5: 4}  # types of fields
_FRAME, _MORE, _DIGEST, _KIND, _OFFSET, _DATA = 0x0A, 0x1A, 0x0A, 0x10, 0x18, 0x22  # tags: a field's number and type


class CarriedFrame:
    """A BlobFrame whose data was not copied again."""

    __slots__ = ("_head", "data")

    def __init__(self, head: pb.BlobFrame, data: bytes | memoryview) -> None:
        self._head = head
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class Carrier:
    """A message with its frames, one at least; `handed` as in WriteBlobsRequest."""

    __slots__ = ("frames", "handed")

    def __init__(self, frames: Sequence[CarriedFrame], handed: str = "") -> None:
        self.frames = frames
        self.handed = handed


def carrier_bytes(frames: Iterable[tuple[pb.BlobFrame, memoryview]]) -> bytes:
    """The message, serialized, whose frames are these heads with these data."""
    parts: list[bytes | memoryview] = []
    for head, data in frames:
        start = head.SerializeToString()
        if data.nbytes:
            start += bytes((_DATA,)) + varint(data.nbytes)
        parts += (bytes((_MORE if parts else _FRAME,)) + varint(len(start) + data.nbytes) + start, data)
    return b"".join(parts)


def carrier_reader(message_type: type[Any]) -> Callable[[bytes], Carrier]:
    """What parses a serialized message of this type. It raises DecodeError as the type's FromString does, and for more
    than MAX_FRAMES frames."""

    def read(message: bytes) -> Carrier:
        try:
            places = _places(message)
        except IndexError:  # it ends within a number, or that does not end
            places = None
        if places is None:
            _check_count(message)
            return _of_protobuf(message_type.FromString(message))
        least = max(LEAST_KEPT_BYTES, len(message) // LEAST_KEPT_PART) if len(places) > 1 else 0
        view = memoryview(message)
        return Carrier(
            [
                CarriedFrame(pb.BlobFrame.FromString(message[a:b]), view[c:d] if d - c >= least else message[c:d])
                for a, b, c, d in places
            ]
        )

    return read


def _check_count(message: bytes) -> None:
    """Raise DecodeError for more fields than MAX_FRAMES frames and a few: parsed, each takes fifty times the memory."""
    at = 0
    with contextlib.suppress(IndexError):
        for _ in range(MAX_FRAMES + _OTHER_FIELDS):
            tag, at = _read_varint(message, at)
            kind = tag & 7
            if kind in (_NUMBER, _BYTES):
                size, at = _read_varint(message, at)
                at += size if kind == _BYTES else 0
            at += _FIXED_BYTES.get(kind, 0)
        if at < len(message):
            raise DecodeError(f"expected at most {MAX_FRAMES} frames")


def _of_protobuf(whole: Any) -> Carrier:
    if len(whole.more) >= MAX_FRAMES:
        raise DecodeError(f"expected at most {MAX_FRAMES} frames")
    frames = [CarriedFrame(frame, frame.data) for frame in (whole.frame, *whole.more)]
    return Carrier(frames, getattr(whole, "handed", ""))


def _places(message: bytes) -> list[tuple[int, int, int, int]] | None:
    """Where each frame's other fields begin and end, and where its data do; None for a message that is anything but
    frames that end with data."""
    places: list[tuple[int, int, int, int]] = []
    at, tag = 0, _FRAME
    while at < len(message) or not places:
        if message[at] != tag or len(places) == MAX_FRAMES:
            return None
        size, begin = _read_varint(message, at + 1)
        end = begin + size
        if (found := _data_of(message, begin, end)) is None:
            return None
        places.append((begin, *found, end))
        at, tag = end, _MORE
    return places


def _data_of(message: bytes, begin: int, end: int) -> tuple[int, int] | None:
    """Where the fields before a frame's data end, and where its data begin, which end with the frame."""
    at = begin
    while message[at] != _DATA:
        tag = message[at]
        if tag not in (_DIGEST, _KIND, _OFFSET) or at - begin > _MOST_HEAD_BYTES:
            return None
        value, at = _read_varint(message, at + 1)
        at += value if tag == _DIGEST else 0
    size, data = _read_varint(message, at + 1)
    return (at, data) if data + size == end <= len(message) else None


def varint(value: int) -> bytes:
    """A number as the wire has it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The number there, and its end. Raises IndexError behind the message's end, and for too many bytes."""
    value = shift = 0
    while message[at] > 0x7F:
        if shift == _MOST_SHIFT:
            raise IndexError
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | message[at] << shift, at + 1
