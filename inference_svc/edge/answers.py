"""Fills a message from records by name: a record's times end with `_s`, and its enums have the names of the wire's."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, TypeVar

from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvasir.formats.digest import Digest

Answer = TypeVar("Answer", bound=Message)
_MISSING = object()


def written(kind: type[Answer], *records: object, **given: object) -> Answer:
    """Each field is `given`, or is that of the first record that has one of its name. None leaves it out."""
    values = {}
    for name, field in kind.DESCRIPTOR.fields_by_name.items():
        found = (getattr(each, name_in_record(field), _MISSING) for each in records)
        value = given[name] if name in given else next((each for each in found if each is not _MISSING), None)
        if value is not None:
            values[name] = _on_wire(field, value)
    return kind(**values)


def name_in_record(field: Any) -> str:
    return f"{field.name}_s" if _is_time(field) else str(field.name)


def duration(seconds: float) -> duration_pb2.Duration:
    found = duration_pb2.Duration()
    found.FromNanoseconds(round(seconds * 1e9))
    return found


def _on_wire(field: Any, value: Any) -> Any:
    match value:
        case Digest():
            return value.to_proto()
        case Enum():
            return field.enum_type.values_by_name[_prefix(field) + value.name].number
        case int() | float() if _is_time(field):
            return duration(value)
        case Mapping():
            return {name.value if isinstance(name, Enum) else name: number for name, number in value.items()}
        case _ if is_dataclass(value):
            return written(GetMessageClass(field.message_type), value)
    return value


def _prefix(field: Any) -> str:
    return str(field.enum_type.values[0].name).removesuffix("UNSPECIFIED")


def _is_time(field: Any) -> bool:
    return field.message_type is not None and field.message_type.full_name == "google.protobuf.Duration"
