"""Gemma's two call formats: arguments in braces, keys without quotes, texts between markers. Pure."""

import re
from typing import Any

from inference_svc.formats.call_schemas import Schema
from inference_svc.formats.call_writing import Text, Writing, as_schema, check_object, listed, shared

WORD, WORD_OR_DASH = re.compile(r"\w+", re.ASCII), re.compile(r"[\w-]+", re.ASCII)
_ANYTHING = ("string", "number", "boolean", "null")
# No NUL, which the parser takes for a place of its own, and in the flat format no brace, which ends the call.
_GEMMA_TEXT, _FLAT_TEXT = (
    Text('<|"|>', barred=(r"(?s:.*)\x00(?s:.*)",)),
    Text("<escape>", barred=(r"(?s:.*)\}(?s:.*)",)),
)


def gemma_call(name: str, schema: Schema, writing: Writing) -> str:
    return f"{writing.text(f'call:{name}')} {_object(schema, shared(schema), writing)}"


def one_level_call(name: str, schema: Schema, writing: Writing) -> str:
    """The same, whose values are single ones: its parser knows no nesting. A property that has one may be left out."""
    check_object(schema, writing)
    members, required = {}, schema.get("required", ())
    for key, value in schema.get("properties", {}).items():
        if key not in required and as_schema(value).get("type") in ("array", "object"):
            continue
        members[key] = _member(key, _scalar(key, as_schema(value), _FLAT_TEXT, "<escape>", writing), writing)
    body = listed(members, required, writing.text(","))
    return f"{writing.text(f'call:{name}' + '{')} {body} {writing.text('}')}"


def _object(schema: Schema, common: Schema, writing: Writing) -> str:
    check_object(schema, writing)
    members = {
        key: _member(key, _value(key, as_schema(value), common, writing), writing)
        for key, value in schema.get("properties", {}).items()
    }
    body = listed(members, schema.get("required", ()), writing.text(","))
    return f"{writing.text('{')} {body} {writing.text('}')}"


def _member(key: str, value: str, writing: Writing) -> str:
    if not WORD.fullmatch(key):
        raise writing.refused(f"property {key[:80]!r} has such a name")
    return f"{writing.text(key + ':')} {value}"


def _value(key: str, schema: Schema, common: Schema, writing: Writing) -> str:
    if "$ref" in schema:
        return _value(key, _referred(schema["$ref"], common, writing), common, writing)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return f"({' | '.join(_value(key, as_schema(each), common, writing) for each in schema[word])})"
    match schema.get("type"):
        case "object":
            return _object(schema, common, writing)
        case "array":
            return _array(key, schema, common, writing)
        case list() as kinds:
            kinds = [{**schema, "type": kind} for kind in kinds]
            return f"({' | '.join(_value(key, each, common, writing) for each in kinds)})"
        case _:
            return _scalar(key, schema, _GEMMA_TEXT, '<|"|>', writing)


def _array(key: str, schema: Schema, common: Schema, writing: Writing) -> str:
    if unknown := schema.keys() - {"type", "items", "minItems", "maxItems", "title", "description", "default"}:
        raise writing.refused(f"property {key!r} is an array with {', '.join(sorted(unknown))}")
    low, most = int(schema.get("minItems", 0)), schema.get("maxItems")
    one = _value(key, as_schema(schema.get("items")), common, writing)
    after = f"({writing.text(',')} {one})"
    more = f"{after}{{{max(low - 1, 0)},{'' if most is None else max(int(most) - 1, 0)}}}"
    body = "" if most == 0 else f"{one} {more}" if low else f"({one} {more})?"
    return f"{writing.text('[')} {body} {writing.text(']')}"


def _scalar(key: str, schema: Schema, text: Text, quote: str, writing: Writing) -> str:
    """A text between its markers, or a number, true, false or null as in JSON."""
    if "enum" in schema or "const" in schema:
        options = [schema["const"]] if "const" in schema else schema["enum"]
        return f"({' | '.join(_option(key, each, text, quote, writing) for each in options)})"
    kind = schema.get("type", list(_ANYTHING))
    if isinstance(kind, list):
        kinds = [{**schema, "type": each} for each in kind]
        return f"({' | '.join(_scalar(key, each, text, quote, writing) for each in kinds)})"
    if kind == "string":
        return f"{writing.text(quote)} {text.rule(key, schema, writing)}"
    if kind not in ("integer", "number", "boolean", "null"):
        raise writing.refused(f"property {key!r} is one of type {str(kind)[:40]}")
    return writing.json(schema)


def _option(key: str, option: Any, text: Text, quote: str, writing: Writing) -> str:
    if isinstance(option, str):
        return f"{writing.text(quote)} {text.rule(key, {'const': option}, writing)}"
    if isinstance(option, list | dict):
        raise writing.refused(f"property {key!r} is one of lists or objects")
    return writing.json({"const": option})


def _referred(name: object, common: Schema, writing: Writing) -> Schema:
    """A definition of the tool's own. One that refers to itself is nested too deeply."""
    match str(name).split("/"):
        case ["#", ("$defs" | "definitions") as place, key] if key in as_schema(common.get(place)):
            return as_schema(common[place][key])
        case _:
            raise writing.refused(f"it refers to {str(name)[:80]!r}")
