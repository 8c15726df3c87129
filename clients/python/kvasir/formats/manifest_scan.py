"""Counts the records of a serialized message before it is parsed. Pure.

An empty submessage costs 2 bytes on the wire and a hundred times as much in memory, so a size limit is not enough.
"""

from functools import cache
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class ScanError(ValueError):
    """The bytes are not the wire form of a message, or have too many records."""


def count_records(data: bytes, descriptor: Any, most: int) -> int:
    """How often fields occur in a message and in the messages inside it; `descriptor` describes its type.

    Raises ScanError as soon as there are more than `most`.
    """
    return _count(data, 0, len(data), _table(descriptor), 0, most)


@cache
def _table(descriptor: Any) -> dict[int, Any]:
    """Field number → the table of the messages in that field. No message type contains itself."""
    return {field.number: _table(field.message_type) for field in descriptor.fields if field.message_type is not None}


def _count(data: bytes, position: int, end: int, table: dict[int, Any], count: int, most: int) -> int:
    while position < end:
        count += 1
        if count > most:
            raise ScanError(f"expected at most {most} fields")
        tag, position = _varint(data, position, end)
        wire_type = tag & 7
        if wire_type == _BYTES:
            size, position = _varint(data, position, end)
            if size > end - position:
                raise ScanError("a field is longer than what holds it")
            inner = table.get(tag >> 3)
            if inner is not None:
                count = _count(data, position, position + size, inner, count, most)
            position += size
        elif wire_type == _VARINT:
            _, position = _varint(data, position, end)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        else:
            raise ScanError(f"wire type {wire_type}")
    if position != end:
        raise ScanError("the last field is cut")
    return count


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """A number, and the position behind it."""
    value = shift = 0
    for place in range(position, min(end, position + _MAX_VARINT_BYTES)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise ScanError("a number is cut or too long")
