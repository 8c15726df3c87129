"""The JSON in a request: bounded before it is parsed, parsed once, and never on the event loop."""

import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from kvasir.errors import InvalidArgument

MAX_BYTES = 1 << 20  # bytes of all JSON in one request
MAX_VALUES = 1 << 15
MAX_DEPTH = 64
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[][{},]', re.DOTALL)

JsonField = tuple[str, str]  # A field's name and its text: a JSON object, or nothing for an empty one


class GivenJson:
    """The JSON objects of one request and of its remembered messages. May be read from several threads."""

    def __init__(self, fields: Iterable[JsonField] = (), known: Mapping[str, dict[str, Any]] | None = None) -> None:
        self._fields = [(field, text) for field, text in fields if text]
        self._known = dict(known or {})
        self._reading = threading.Lock()

    @property
    def is_read(self) -> bool:
        return all(text in self._known for _, text in self._fields)

    def check_size(self) -> None:
        """Raise InvalidArgument, the field named, when it is too large to be parsed."""
        size_bytes = 0
        for field, text in self._fields:
            # A character is at least a byte, so a text that is far too long need not be encoded.
            size_bytes += len(text) if len(text) > MAX_BYTES else len(text.encode())
            if size_bytes > MAX_BYTES:
                raise _refused(field, f"expected at most {MAX_BYTES} bytes of JSON in all, got {size_bytes} or more")

    def read(self) -> None:
        """Parse the fields that are not parsed yet. Blocks. Raises InvalidArgument that names the field."""
        with self._reading:
            values = 0
            for field, text in self._fields:
                values += _values(text, field)
                if values > MAX_VALUES:
                    raise _refused(field, f"expected at most {MAX_VALUES} JSON values in all")
                if text not in self._known:
                    self._known[text] = _object(field, text)

    def also(self, fields: Iterable[JsonField]) -> "GivenJson":
        return GivenJson([*fields, *self._fields], self._known)

    def knowing(self, known: Mapping[str, dict[str, Any]]) -> "GivenJson":
        return GivenJson(self._fields, {**self._known, **known})

    def object(self, text: str) -> dict[str, Any]:
        """The object of a field's text, which must have been parsed. Callers must not change it."""
        return self._known[text] if text else {}


def is_bounded(text: str) -> bool:
    try:
        return len(text) <= MAX_BYTES and _values(text) <= MAX_VALUES
    except InvalidArgument:
        return False


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair (\ud800); no prompt can hold it.
        raise _refused(field, "expected text, got half of a surrogate pair") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _refused(field, "expected a JSON object")
    return value


def _values(text: str, field: str = "") -> int:
    """About how many values a text has, or more than `MAX_VALUES`. Raises InvalidArgument for brackets too deep."""
    if (most := sum(map(text.count, ",[{"))) <= MAX_DEPTH:
        return most
    values = depth = 0
    for match in _STRUCTURE.finditer(text):
        first = text[match.start()]
        values += first in ",[{"
        depth += (first in "[{") - (first in "]}")
        if depth > MAX_DEPTH:
            raise _refused(field, f"expected at most {MAX_DEPTH} levels of nesting")
        if values > MAX_VALUES:
            break
    return values


def _refused(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument.of(field, problem)
