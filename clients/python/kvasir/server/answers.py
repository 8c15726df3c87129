"""Fills a message from records by name: durations of a record end with `_s`, its times with `_unix_ms`."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvasir.formats.digest import Digest
from kvasir.formats.manifest_checks import MAX_TEMPLATE_TIME_MS

Answer = TypeVar("Answer", bound=Message)
_MISSING = object()
_DURATION, _TIME = "google.protobuf.Duration", "google.protobuf.Timestamp"


def written(kind: type[Answer], *records: object, **given: object) -> Answer:
    """Each field is `given`, or is that of the first record that has one of its name. None leaves it out."""
    fields, values = kind.DESCRIPTOR.fields_by_name, dict(given)
    for name, record_name in _names(kind.DESCRIPTOR):
        if name not in given:
            found = (getattr(each, record_name, _MISSING) for each in records)
            values[name] = next((each for each in found if each is not _MISSING), None)
    return kind(**{name: _on_wire(fields[name], value) for name, value in values.items() if value is not None})


def name_in_record(field: Any) -> str:
    kind = _message_name(field)
    if kind == _TIME:
        return f"{field.name.removesuffix('_at')}_unix_ms"
    return f"{field.name}_s" if kind == _DURATION else str(field.name)


def duration(seconds: float) -> duration_pb2.Duration:
    found = duration_pb2.Duration()
    found.FromNanoseconds(round(seconds * 1e9))
    return found


def timestamp(unix_ms: int) -> timestamp_pb2.Timestamp:
    found = timestamp_pb2.Timestamp()
    # An expiry is later than the clock, and a clock may be anywhere.
    found.FromMilliseconds(min(max(unix_ms, 0), MAX_TEMPLATE_TIME_MS))
    return found


@cache
def _names(message: Any) -> list[tuple[str, str]]:
    return [(name, name_in_record(field)) for name, field in message.fields_by_name.items()]


def _on_wire(field: Any, value: Any) -> Any:
    match value:
        case Digest():
            return value.to_proto()
        case Enum() if field.enum_type is not None:
            return field.enum_type.values_by_name[_prefix(field) + value.name].number
        case int() | float() if _message_name(field) == _DURATION:
            return duration(value)
        case int() if _message_name(field) == _TIME:
            return timestamp(value)
        case Mapping():
            return {name.value if isinstance(name, Enum) else name: number for name, number in value.items()}
        case list() | tuple() if field.message_type is not None:
            return [_on_wire(field, each) for each in value]
        case _ if is_dataclass(value):
            return written(GetMessageClass(field.message_type), value)
    return value


def _prefix(field: Any) -> str:
    return str(field.enum_type.values[0].name).removesuffix("UNSPECIFIED")


def _message_name(field: Any) -> str:
    return "" if field.message_type is None else str(field.message_type.full_name)
