"""Grammars of tool calls, for each call format: llguidance's text made of tools' names and schemas. Pure.

mlx-lm's parser of the format reads what a grammar admits as calls of these tools, with arguments that fit.
A grammar may admit less than a schema does (bounded numbers, no property that the schema does not name), never more.
"""

import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import InvalidArgument

from inference_svc.formats.call_schemas import Schema, narrowed, without

# A space, or a line's end with indentation. Without a bound a model could write white space until max_tokens.
WHITE_SPACE = r"\x20|\n\x20{0,16}"
_NAME, _KEY, _IDENTIFIER = (
    re.compile(r"[\w.-]+", re.ASCII),
    re.compile(r"[\w.$-]+", re.ASCII),
    re.compile(r"[A-Za-z_]\w*", re.ASCII),
)
_NOTES = {"title", "description", "$schema", "$id", "$comment", "default", "examples", "$defs", "definitions", "strict"}
_OF_OBJECTS = _NOTES | {"type", "properties", "required", "additionalProperties"}
_OF_TEXTS = _NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_JSON_TYPES = ("integer", "number", "boolean", "object", "array")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one tokenizer writes a format's markers: the ids of its special tokens, which no text spells."""

    special_ids: Mapping[str, int]

    def pieces(self, text: str) -> list[str | int]:
        """Text and special tokens, in order."""
        inside = [re.escape(each) for each in sorted(self.special_ids, key=len, reverse=True) if each in text]
        parts = re.split(f"({'|'.join(inside)})", text) if inside else [text]
        return [self.special_ids.get(part, part) for part in parts if part]

    def rule(self, text: str) -> str:
        """A rule's body that admits exactly this text."""
        return " ".join(f"<[{each}]>" if isinstance(each, int) else json.dumps(each) for each in self.pieces(text))


@dataclass(frozen=True, slots=True)
class Writing:
    """What a format's writer of one call needs: the field's name for refusals, the spelling, and the texts that end a
    call early wherever they stand.
    """

    format: str
    field: str
    spelling: Spelling
    ends: tuple[str, ...]

    def text(self, text: str) -> str:
        return self.spelling.rule(text)

    def json(self, schema: Schema) -> str:
        """A JSON value that a schema admits, in which no end of a call is spelled."""
        guarded = narrowed(schema, self.ends, self.refused)
        return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **guarded}, ensure_ascii=False)

    def refused(self, what: str) -> InvalidArgument:
        problem = (
            f"{self.field}: no call can be forced: {what}, which the calls of this model ({self.format}) cannot carry"
        )
        return InvalidArgument(problem, reason="FORMAT_INVALID", field=self.field)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`start` and `end` are around each call, or around all of them (`is_list`), with `between` them."""

    start: str
    end: str
    call: Callable[[str, Schema, Writing], str]
    ends: tuple[str, ...] = ()
    between: str = ""
    is_list: bool = False
    name: re.Pattern[str] = _NAME

    @property
    def marker(self) -> str:
        """Of `start` what a reader takes for the beginning of a call."""
        return self.start.rstrip("\n[")


@dataclass(frozen=True, slots=True)
class _Tags:
    """A call whose arguments are tags, one for each property."""

    head: str
    open: str  # before a value; {} is the property's name
    close: str
    tail: str
    reads_json: bool  # what is not a plain string is read as JSON, whatever its type
    is_stripped: bool  # white space around a text is lost
    texts_are_json: bool = False
    needs_arguments: bool = False  # a call without any is read in another form: as JSON
    barred: tuple[str, ...] = ()  # regular expressions of texts that are read as something else

    def __call__(self, name: str, schema: Schema, writing: Writing) -> str:
        _check_object(schema, writing)
        required, shared = schema.get("required", ()), _shared(schema)
        tags: dict[str, str] = {}
        for key, value in schema.get("properties", {}).items():
            if not _KEY.fullmatch(key):
                raise writing.refused(f"property {key[:80]!r} has such a name")
            tags[key] = f"{writing.text(self.open.format(key))} {self._value(key, value, shared, writing)}"
        maybe = {key: tag if key in required else f"({tag})?" for key, tag in tags.items()}
        head, tail = writing.text(self.head.format(name)), writing.text(self.tail)
        if not self.needs_arguments or required:
            return " ".join([head, *maybe.values(), tail])
        keys = list(tags)
        some = [" ".join([head, tags[key], *(maybe[k] for k in keys[at + 1 :]), tail]) for at, key in enumerate(keys)]
        return "(" + " | ".join([writing.text(json.dumps({"name": name, "arguments": {}})), *some]) + ")"

    def _value(self, key: str, schema: Any, shared: Schema, writing: Writing) -> str:
        schema = schema if isinstance(schema, dict) else {}
        kind = schema.get("type")
        if kind == "string" and not self.texts_are_json:
            return self._text(key, schema, writing)
        if kind not in _JSON_TYPES and not self.reads_json:
            raise writing.refused(f"property {key!r} has no single type")
        return f"{writing.json({**shared, **schema})} {writing.text(self.close)}"

    def _text(self, key: str, schema: Schema, writing: Writing) -> str:
        if not schema.keys() <= _OF_TEXTS | {"format"}:
            raise writing.refused(f"property {key!r} is a text with {', '.join(sorted(schema.keys() - _OF_TEXTS))}")
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if options is not None:
            fit = [each for each in options if isinstance(each, str) and self._is_plain(each, writing)]
            if not fit:
                raise writing.refused(f"property {key!r} is one of such texts")
            return "(" + " | ".join(writing.text(each + self.close) for each in fit) + ")"
        return self._free_text(schema, writing)

    def _is_plain(self, text: str, writing: Writing) -> bool:
        is_kept = not self.is_stripped or text == text.strip()
        return (
            is_kept
            and not any(end in text for end in (self.close, *writing.ends))
            and not any(re.fullmatch(each, text) for each in self.barred)
        )

    def _free_text(self, schema: Schema, writing: Writing) -> str:
        """Up to the first end of the value."""
        pieces = writing.spelling.pieces(self.close)
        tokens = [place for place, piece in enumerate(pieces) if isinstance(piece, int)]
        text_end = "".join(map(str, pieces[: tokens[0]] if tokens else pieces))
        rest = self.close[len(text_end) :]
        head = _literal(text_end)
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        ends = [end for end in writing.ends if end in self.close] + [
            end for end in writing.ends if end not in self.close
        ]
        parts = [f"/{without(ends)}{head}/"]
        if low or high != "":
            parts.append(f"/(?s:.{{{low},{high}}}){head}/")
        parts += [f"~/{each}{head}/" for each in self.barred]
        if self.is_stripped:
            parts += [rf"~/\s(?s:.*){head}/", rf"~/(?s:.*)\s{head}/"]
        if not text_end:
            parts.append("/(?s:.+)/")  # no terminal is empty
        body = f"TERMINAL({' & '.join(parts)})"
        return (body if text_end or low else f"({body})?") + (f" {writing.text(rest)}" if rest else "")


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


def _pythonic_call(name: str, schema: Schema, writing: Writing) -> str:
    """Arguments as `name=value`; JSON values are read as Python's."""
    _check_object(schema, writing)
    keys = list(schema.get("properties", {}))
    if not all(map(_is_identifier, [*keys, *name.split(".")])):
        raise writing.refused("a name is no Python identifier")
    shared = _shared(schema)
    required = set(schema.get("required", ()))
    # Those that are required come first: a comma stands between any two.
    first = [key for key in keys if key in required]
    rest = [key for key in keys if key not in required]
    values = {
        key: f"{writing.text(f'{key}=')} {writing.json({**shared, **_as_schema(schema['properties'][key])})}"
        for key in keys
    }
    body = f" {writing.text(', ')} ".join(values[key] for key in first)
    if first:
        body += "".join(f" ({writing.text(', ')} {values[key]})?" for key in rest)
    elif rest:
        tails = [
            " ".join([values[key], *(f"({writing.text(', ')} {values[k]})?" for k in rest[n + 1 :])])
            for n, key in enumerate(rest)
        ]
        body = "(" + " | ".join(tails) + ")?"
    return f"{writing.text(f'{name}(')} {body} {writing.text(')')}"


def _is_identifier(name: str) -> bool:
    return bool(_IDENTIFIER.fullmatch(name)) and not keyword.iskeyword(name)


_NULL = r"[nN][uU][lL][lL]"
_QWEN = _Tags("<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>", False, False, barred=(_NULL,))
_MINIMAX = _Tags(
    '<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n", False, True, barred=(_NULL,)
)
_GLM = _Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "", True, True)
_LONGCAT = _Tags(
    "{}\n",
    "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
    "</longcat_arg_value>\n",
    "",
    True,
    True,
    needs_arguments=True,
)
_MINICPM = _Tags(
    '"{}">',
    '<param name="{}">',
    "</param>",
    "",
    False,
    True,
    barred=(_NULL, r"<!\[CDATA(?s:.*)"),
)
_MUSE = _Tags(
    '<atem:invoke name="{}">\n',
    '<atem:parameter name="{}">',
    "</atem:parameter>\n",
    "</atem:invoke>\n",
    True,
    False,
    texts_are_json=True,
)
_TAGS = (_QWEN, _MINIMAX, _GLM, _LONGCAT, _MINICPM, _MUSE)
_GLM_FORMAT = CallFormat("<tool_call>", "</tool_call>", _GLM, ("</arg_value>",), "\n")

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
    "qwen3_coder": CallFormat("<tool_call>\n", "\n</tool_call>", _QWEN, ("</parameter>",), "\n"),
    "minimax_m2": CallFormat(
        "<minimax:tool_call>\n", "</minimax:tool_call>", _MINIMAX, ("</parameter>", "</invoke>"), is_list=True
    ),
    "glm47": _GLM_FORMAT,
    "laguna": _GLM_FORMAT,
    "longcat": CallFormat("<longcat_tool_call>", "</longcat_tool_call>", _LONGCAT, ("</longcat_arg_value>",), "\n"),
    "minicpm5": CallFormat("<function name=", "</function>", _MINICPM, ("</param>",)),
    "muse_spark": CallFormat(
        "<atem:function_calls>\n",
        "</atem:function_calls>",
        _MUSE,
        ("</atem:parameter>", "</atem:invoke>"),
        is_list=True,
    ),
}


def call_rules(format_name: str, tools: Sequence[Mapping[str, Any]], spelling: Spelling) -> Iterator[str]:
    """A rule's body for a call of each tool, which fits its schema unless it is said not to be strict. Raises
    InvalidArgument that names the tool.
    """
    form = FORMATS[format_name]
    ends = tuple(dict.fromkeys(text for text in (form.end.strip(), *form.ends) if text.startswith("<")))
    for tool in tools:
        writing = Writing(format_name, f"tools[{tool['place']}]", spelling, tuple(_one_bracket(end) for end in ends))
        if not form.name.fullmatch(tool["name"]):
            raise writing.refused(f"its name {tool['name'][:80]!r}")
        schema = {"type": "object", **_as_schema(tool["parameters"] or {})}
        yield form.call(tool["name"], schema if tool.get("strict", True) else _any_arguments(form, schema), writing)


def _any_arguments(form: CallFormat, schema: Schema) -> Schema:
    """Any object, or where properties are written apart, anything for those that can be written."""
    if form.call not in (_pythonic_call, *_TAGS):
        return {"type": "object"}
    is_json = form.call in (_pythonic_call, _MUSE)
    anything = {"type": ["string", "number", "boolean", "null", "array", "object"] if is_json else "string"}
    keys = filter(_is_identifier, _as_schema(schema.get("properties")))
    return {"type": "object", "properties": dict.fromkeys(keys, anything)}


def _one_bracket(text: str) -> str:
    """The text up to its second "<"."""
    return text[:at] if (at := text.find("<", 1)) > 0 else text


def _literal(text: str) -> str:
    """A regular expression of a text, as it stands between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/").replace("\\ ", " ")


def _as_schema(schema: Any) -> Schema:
    return schema if isinstance(schema, dict) else {}


def _shared(schema: Schema) -> Schema:
    """What a schema's parts refer to."""
    return {key: value for key, value in schema.items() if key in ("$defs", "definitions")}


def _check_object(schema: Schema, writing: Writing) -> None:
    """Raise InvalidArgument for what tags and keywords cannot say of an object."""
    if schema.get("type") != "object" or not schema.keys() <= _OF_OBJECTS:
        raise writing.refused(
            "its parameters use " + ", ".join(sorted(schema.keys() - _OF_OBJECTS) or ["another type"])
        )
    if missing := set(schema.get("required", ())) - set(schema.get("properties", {})):
        raise writing.refused(f"required {sorted(missing)[0][:80]!r} is no property")
