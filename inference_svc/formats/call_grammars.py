"""Grammars of tool calls, for each call format: calls that one admits, mlx-lm's parser reads as calls of these tools
with arguments that fit. A grammar may admit less than a schema does, never more. Pure.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inference_svc.formats.call_bare import WORD, WORD_OR_DASH, gemma_call, one_level_call
from inference_svc.formats.call_schemas import Schema
from inference_svc.formats.call_tags import GLM, LONGCAT, MINICPM, MINIMAX, MUSE, QWEN, Tags
from inference_svc.formats.call_writing import (
    CallFormat,
    Spelling,
    Writing,
    as_schema,
    check_object,
    is_identifier,
    listed,
    shared,
)


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


_GLM_FORMAT = CallFormat("<tool_call>", "</tool_call>", GLM, ("</arg_value>",), "\n")

FORMATS: Mapping[str, CallFormat] = {
    "json_tools": CallFormat("<tool_call>\n", "\n</tool_call>", _json_call, between="\n"),
    "mistral": CallFormat("[TOOL_CALLS]", "", _header_call),
    "kimi_k2": CallFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _kimi_k2_call,
        ("<|tool_call_end|>",),
        is_list=True,
    ),
    "kimi_k3": CallFormat("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _kimi_k3_call, ("<|close|>",), is_list=True),
    "pythonic": CallFormat("<|tool_call_start|>[", "]<|tool_call_end|>", _pythonic_call, between=", ", is_list=True),
    "qwen3_coder": CallFormat("<tool_call>\n", "\n</tool_call>", QWEN, ("</parameter>",), "\n"),
    "minimax_m2": CallFormat(
        "<minimax:tool_call>\n", "</minimax:tool_call>", MINIMAX, ("</parameter>", "</invoke>"), is_list=True
    ),
    "glm47": _GLM_FORMAT,
    "laguna": _GLM_FORMAT,
    "longcat": CallFormat("<longcat_tool_call>", "</longcat_tool_call>", LONGCAT, ("</longcat_arg_value>",), "\n"),
    "minicpm5": CallFormat("<function name=", "</function>", MINICPM, ("</param>",)),
    "gemma4": CallFormat("<|tool_call>", "<tool_call|>", gemma_call, ('<|"|>',), name=WORD_OR_DASH),
    "function_gemma": CallFormat(
        "<start_function_call>", "<end_function_call>", one_level_call, ("<escape>",), name=WORD
    ),
    "muse_spark": CallFormat(
        "<atem:function_calls>\n", "</atem:function_calls>", MUSE, ("</atem:parameter>", "</atem:invoke>"), is_list=True
    ),
}

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
        yield form.call(tool["name"], schema, writing)


def _any_arguments(form: CallFormat, schema: Schema) -> Schema:
    """Any object, or where properties are written apart, anything for those that can be written."""
    kinds: object = ["string", "number", "boolean", "null"]
    if form.call in (_pythonic_call, MUSE):
        kinds = ["string", "number", "boolean", "null", "array", "object"]
    elif isinstance(form.call, Tags):
        kinds = "string"
    elif form.call not in (gemma_call, one_level_call):
        return {"type": "object"}
    keys = filter(is_identifier, as_schema(schema.get("properties")))
    return {"type": "object", "properties": {key: {"type": kinds} for key in keys}}


def _one_bracket(text: str) -> str:
    return text[:at] if (at := text.find("<", 1)) > 0 else text
