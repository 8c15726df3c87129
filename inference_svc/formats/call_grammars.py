"""Grammars of tool calls, for each call format: calls that one admits, mlx-lm's parser reads as calls of these tools
with arguments that fit. A grammar may admit less than a schema does, never more. Pure.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.formats.call_schemas import Schema
from inference_svc.formats.call_writing import (
    KEY,
    NAME,
    CallFormat,
    Spelling,
    Text,
    Writing,
    as_schema,
    check_object,
    is_identifier,
    listed,
    shared,
)

_JSON_TYPES = ("integer", "number", "boolean", "object", "array")


@dataclass(frozen=True, slots=True)
class Tags:
    """Calls whose arguments are tags, one for each property."""

    head: str
    open: str  # before a value; {} is the property's name
    close: str
    tail: str
    reads_json: bool = False  # anything but a plain string is read as JSON, of any type
    is_stripped: bool = False  # white space around a text is lost
    texts_are_json: bool = False
    needs_arguments: bool = False  # a call without any is read in another form: as JSON
    barred: tuple[str, ...] = ()  # regular expressions of texts that are read as something else

    def __call__(self, name: str, schema: Schema, writing: Writing) -> str:
        check_object(schema, writing)
        required, common = schema.get("required", ()), shared(schema)
        tags: dict[str, str] = {}
        for key, value in schema.get("properties", {}).items():
            if not KEY.fullmatch(key):
                raise writing.refused(f"property {key[:80]!r} has such a name")
            tags[key] = f"{writing.text(self.open.format(key))} {self._value(key, value, common, writing)}"
        maybe = {key: tag if key in required else f"({tag})?" for key, tag in tags.items()}
        head, tail = writing.text(self.head.format(name)), writing.text(self.tail)
        if not self.needs_arguments or required:
            return " ".join([head, *maybe.values(), tail])
        keys = list(tags)
        some = [" ".join([head, tags[key], *(maybe[k] for k in keys[at + 1 :]), tail]) for at, key in enumerate(keys)]
        return "(" + " | ".join([writing.text(json.dumps({"name": name, "arguments": {}})), *some]) + ")"

    def _value(self, key: str, schema: Any, common: Schema, writing: Writing) -> str:
        schema = schema if isinstance(schema, dict) else {}
        kind = schema.get("type")
        if kind == "string" and not self.texts_are_json:
            return Text(self.close, self.is_stripped, self.barred).rule(key, schema, writing)
        if kind not in _JSON_TYPES and not self.reads_json:
            raise writing.refused(f"property {key!r} has no single type")
        return f"{writing.json({**common, **schema})} {writing.text(self.close)}"


# Gemma's two call formats: arguments in braces, keys without quotes, texts between markers.
_WORD = re.compile(r"\w+", re.ASCII)
_ANYTHING = ("string", "number", "boolean", "null")
# No NUL, which the parser takes for a place of its own, and in the flat format no brace, which ends the call.
_GEMMA_TEXT = Text('<|"|>', barred=(r"(?s:.*)\x00(?s:.*)",))
_FLAT_TEXT = Text("<escape>", barred=(r"(?s:.*)\}(?s:.*)",))


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
    if not _WORD.fullmatch(key):
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


def _json_call(name: str, schema: Schema, writing: Writing) -> str:
    head = writing.text('{"name": ' + json.dumps(name) + ', "arguments": ')
    return f"{head} {writing.json(schema)} {writing.text('}')}"


def _header_call(name: str, schema: Schema, writing: Writing) -> str:
    return f"{writing.text(f'{name}[ARGS]')} {writing.json(schema)}"


def _kimi_k2_call(name: str, schema: Schema, writing: Writing) -> str:
    begin, end = writing.text(f"<|tool_call_begin|>functions.{name}:"), writing.text("<|tool_call_end|>")
    return f"{begin} /[0-9]{{1,3}}/ {writing.text('<|tool_call_argument_begin|>')} {writing.json(schema)} {end}"


def _kimi_k3_call(name: str, schema: Schema, writing: Writing) -> str:
    begin, index = writing.text(f'<|open|>call tool="{name}" index="'), "/[0-9]{1,3}/"
    head, end = '"<|sep|><|open|>json type="object"<|sep|>', "<|close|>json<|sep|><|close|>call<|sep|>"
    return f"{begin} {index} {writing.text(head)} {writing.json(schema)} {writing.text(end)}"


def _harmony_call(name: str, schema: Schema, writing: Writing) -> str:
    return f"{writing.text(f'{name}<|channel|>commentary json<|message|>')} {writing.json(schema)}"


def _pythonic_call(name: str, schema: Schema, writing: Writing) -> str:
    """Arguments as `name=value`; JSON values are read as Python's."""
    check_object(schema, writing)
    properties, common = schema.get("properties", {}), shared(schema)
    if not all(map(is_identifier, [*properties, *name.split(".")])):
        raise writing.refused("a name is no Python identifier")
    values = {
        key: f"{writing.text(f'{key}=')} {writing.json({**common, **as_schema(value)})}"
        for key, value in properties.items()
    }
    body = listed(values, schema.get("required", ()), writing.text(", "))
    return f"{writing.text(f'{name}(')} {body} {writing.text(')')}"


_CALLS: Mapping[str, Callable[[str, Schema, Writing], str]] = {
    "json_tools": _json_call,
    "mistral": _header_call,
    "kimi_k2": _kimi_k2_call,
    "kimi_k3": _kimi_k3_call,
    "pythonic": _pythonic_call,
    "gemma4": gemma_call,
    "function_gemma": one_level_call,
}


def _form(parser: str, row: dict[str, Any]) -> CallFormat:
    tags = row.pop("tags", None)
    if tags is not None:
        tags["barred"] = tuple(tags.get("barred", ()))
    row["ends"] = tuple(row.get("ends", ()))
    row["name"] = re.compile(row["name"], re.ASCII) if "name" in row else NAME
    return CallFormat(call=_CALLS[parser] if tags is None else Tags(**tags), **row)


_ROWS = tomllib.loads(Path(__file__).with_name("call_forms.toml").read_text(encoding="utf-8"))
FORMATS: dict[str, CallFormat] = {parser: _form(parser, row) for parser, row in _ROWS.items()}
FORMATS["laguna"] = FORMATS["glm47"]

HARMONY = "channels"  # by the names of mlx-lm's parsers; of gpt-oss's it has none
_HARMONY_FORMAT = CallFormat(" to=functions.", "<|call|>", _harmony_call, ends_reply=True)


def format_of(name: str) -> CallFormat | None:
    return _HARMONY_FORMAT if name == HARMONY else FORMATS.get(name)


def call_rules(format_name: str, tools: Sequence[Mapping[str, Any]], spelling: Spelling) -> Iterator[str]:
    """A rule's body for a call of each tool, which fits a strict one's schema. Raises InvalidArgument that names it."""
    form = format_of(format_name)
    assert form is not None
    ends = tuple(dict.fromkeys(text for text in (form.end.strip(), *form.ends) if text.startswith("<")))
    for tool in tools:
        writing = Writing(format_name, f"tools[{tool['place']}]", spelling, tuple(_one_bracket(end) for end in ends))
        if not form.name.fullmatch(tool["name"]):
            raise writing.refused(f"its name {tool['name'][:80]!r}")
        schema = {"type": "object", **as_schema(tool["parameters"] or {})}
        if not tool.get("strict", True):
            schema = _any_arguments(form, schema)
        if schema["type"] not in ("object", ["object"]):
            raise writing.refused("parameters that are no object")
        try:
            rule = form.call(tool["name"], schema, writing)
        except (AttributeError, KeyError, TypeError, ValueError):  # a word's value may be anything: "maximum": "10"
            raise writing.refused("parameters that are no JSON schema") from None
        yield rule


def _any_arguments(form: CallFormat, schema: Schema) -> Schema:
    """Any object, or where properties are written apart, anything for those that can be written."""
    kinds: object = ["string", "number", "boolean", "null"]
    if form.call is _pythonic_call or (isinstance(form.call, Tags) and form.call.texts_are_json):
        kinds = ["string", "number", "boolean", "null", "array", "object"]
    elif isinstance(form.call, Tags):
        kinds = "string"
    elif form.call not in (gemma_call, one_level_call):
        return {"type": "object"}
    keys = filter(is_identifier, as_schema(schema.get("properties")))
    return {"type": "object", "properties": {key: {"type": kinds} for key in keys}}


def _one_bracket(text: str) -> str:
    return text[:at] if (at := text.find("<", 1)) > 0 else text
