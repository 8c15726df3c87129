"""The messages that carry one frame, WriteBlobsRequest and ReadBlobsResponse: to bytes with one copy of its data, and
back with none.

Both have the frame as field 1, and a frame has its data as its last field. Protobuf's own code copies the data seven
times from one process to the other. What it would read in another way than this file is left to it.
"""

from collections.abc import Callable
from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2 as pb

_FRAME, _DIGEST, _KIND, _OFFSET, _DATA = 0x0A, 0x0A, 0x10, 0x18, 0x22  # tags: a field's number and wire type


class CarriedFrame:
    """A BlobFrame whose data was not copied."""

    __slots__ = ("_head", "data")

    def __init__(self, head: pb.BlobFrame, data: bytes | memoryview) -> None:
        self._head = head
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class Carrier:
    """A message with its frame; `handed` as in WriteBlobsRequest."""

    __slots__ = ("frame", "handed")

    def __init__(self, frame: CarriedFrame, handed: str = "") -> None:
        self.frame = frame
        self.handed = handed


def carrier_bytes(head: pb.BlobFrame, data: memoryview) -> bytes:
    """The message, serialized, whose frame is `head` with these data."""
    start = head.SerializeToString()
    if data.nbytes:
        start += bytes((_DATA,)) + _varint(data.nbytes)
    return b"".join((bytes((_FRAME,)), _varint(len(start) + data.nbytes), start, data))


def carrier_reader(message_type: type[Any]) -> Callable[[bytes], Carrier]:
    """What parses a serialized message of this type. It raises DecodeError as the type's FromString does."""

    def read(message: bytes) -> Carrier:
        try:
            places = _places(message)
        except IndexError:  # it ends within a number
            places = None
        if places is None:
            whole = message_type.FromString(message)
            return Carrier(CarriedFrame(whole.frame, whole.frame.data), getattr(whole, "handed", ""))
        begin, end, data = places
        return Carrier(CarriedFrame(pb.BlobFrame.FromString(message[begin:end]), memoryview(message)[data:]))

    return read


def _places(message: bytes) -> tuple[int, int, int] | None:
    """Where the frame's other fields begin and end, and where its data begin; None for a message that is anything but
    one frame that ends with data."""
    if message[0] != _FRAME:
        return None
    size, begin = _read_varint(message, 1)
    if begin + size != len(message):
        return None
    at = begin
    while message[at] != _DATA:
        tag = message[at]
        if tag not in (_DIGEST, _KIND, _OFFSET):
            return None
        value, at = _read_varint(message, at + 1)
        at += value if tag == _DIGEST else 0
    size, data = _read_varint(message, at + 1)
    return (begin, at, data) if data + size == len(message) else None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The number there, and where it ends. Raises IndexError behind the message's end."""
    value = shift = 0
    while message[at] > 0x7F:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | message[at] << shift, at + 1
