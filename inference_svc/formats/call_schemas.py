"""JSON schemas as a call's arguments may carry them: narrowed to values that parsers read as written. Pure."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvasir.errors import InvalidArgument

Schema = dict[str, Any]
Refused = Callable[[str], InvalidArgument]  # the refusal of a schema that a format cannot carry
_MAX_NUMBER = 10**15  # whole numbers up to here are exact as floats, which some parsers make of them


def narrowed(schema: Any, ends: Sequence[str], refused: Refused) -> Any:
    """A schema that admits no more, and nothing that a parser reads otherwise (exponents, ends of calls)."""
    if schema is True or schema == {}:
        return narrowed({"type": ["string", "number", "boolean", "null"]}, ends, refused)
    if not isinstance(schema, dict):
        return schema
    narrow = {
        key: _narrowed_part(key, value, ends, refused)
        for key, value in schema.items()
        if key not in ("default", "examples")
    }
    for option in [*narrow.get("enum", ()), *([narrow["const"]] if "const" in narrow else ())]:
        if any(end in json.dumps(option, ensure_ascii=False) for end in ends):
            raise refused("one of its values")
    kinds = narrow.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    is_open = "enum" not in narrow and "const" not in narrow
    if is_open and {"integer", "number"} & set(kinds):
        _bound(narrow)
    if is_open and "string" in kinds and "pattern" not in narrow and "format" not in narrow and ends:
        narrow["allOf"] = [*narrow.get("allOf", ()), {"pattern": f"^{without(ends)}$"}]
    if "object" in kinds or "properties" in narrow:
        if any(end in key for end in ends for key in narrow.get("properties", ())):
            raise refused("the name of a property")
        narrow.setdefault("additionalProperties", "properties" not in narrow and "patternProperties" not in narrow)
        if narrow["additionalProperties"] not in (False, None):
            narrow["additionalProperties"] = narrowed(narrow["additionalProperties"], ends, refused)
    return narrow


def _narrowed_part(key: str, value: Any, ends: Sequence[str], refused: Refused) -> Any:
    if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
        return {name: narrowed(each, ends, refused) for name, each in value.items()}
    if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
        return [narrowed(each, ends, refused) for each in value]
    return narrowed(value, ends, refused) if key == "items" else value


def _bound(schema: Schema) -> None:
    if "minimum" not in schema and "exclusiveMinimum" not in schema:
        schema["minimum"] = min(-_MAX_NUMBER, schema.get("maximum", 0), schema.get("exclusiveMaximum", 0) - 1)
    if "maximum" not in schema and "exclusiveMaximum" not in schema:
        schema["maximum"] = max(_MAX_NUMBER, schema.get("minimum", 0), schema.get("exclusiveMinimum", 0) + 1)


def without(words: Sequence[str]) -> str:
    """A regular expression of the texts that hold none of some words, in which "<" stands at the beginning alone."""
    tries = _trie([word[1:] for word in words])
    begun = _begun(tries)
    return f"(?:[^<]|<(?:{begun}<)*{_left(tries)})*(?:<(?:{begun}<)*{begun})?"


def _trie(words: Sequence[str]) -> dict[str, Any]:
    """Words by their first letters; where one ends, nothing follows."""
    first = sorted({word[0] for word in words if word})
    return {} if "" in words else {char: _trie([word[1:] for word in words if word[:1] == char]) for char in first}


def _begun(trie: dict[str, Any]) -> str:
    """The beginnings of words, not the whole ones; the empty one, too."""
    longer = [re.escape(char).replace("/", r"\/") + _begun(rest) for char, rest in trie.items() if rest]
    return f"(?:{'|'.join(longer)})?" if longer else ""


def _left(trie: dict[str, Any]) -> str:
    """A beginning of a word, and a character with which it is none."""
    own = [f"[^<{''.join(map(_in_class, trie))}]"]
    longer = [re.escape(char).replace("/", r"\/") + _left(rest) for char, rest in trie.items() if rest]
    return f"(?:{'|'.join([*own, *longer])})"


def _in_class(char: str) -> str:
    return "\\" + char if char in "^]\\-[/" else char
