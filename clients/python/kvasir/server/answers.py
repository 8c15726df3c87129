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
    plain, record_names = _names(kind.DESCRIPTOR)
    for name, record_name in record_names:
        if name in given:
            continue
        for each in records:
            if (value := getattr(each, record_name, _MISSING)) is not _MISSING:
                values[name] = value
                break
    return kind(
        **{
            name: value if name in plain else _on_wire(fields[name], value)
            for name, value in values.items()
            if value is not None
        }
    )


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
def _names(message: Any) -> tuple[frozenset[str], list[tuple[str, str]]]:
    """Its fields that take a record's values as they are; and each field's name there."""
    fields = message.fields_by_name.items()
    plain = frozenset(name for name, field in fields if field.message_type is None and field.enum_type is None)
    return plain, [(name, name_in_record(field)) for name, field in fields]


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
        case list() | tuple() if field.message_type is not None:
            return [_on_wire(field, each) for each in value]
        case _ if is_dataclass(value):
            return written(GetMessageClass(field.message_type), value)
        case Mapping():
            return {name.value if isinstance(name, Enum) else name: number for name, number in value.items()}
    return value


def _prefix(field: Any) -> str:
    return str(field.enum_type.values[0].name).removesuffix("UNSPECIFIED")


@cache
def _message_name(field: Any) -> str:
    return "" if field.message_type is None else str(field.message_type.full_name)
