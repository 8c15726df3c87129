"""What all writers of calls need: the spelling of markers, refusals, and the texts and objects of a schema. Pure."""

import json
import keyword
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import InvalidArgument

from inference_svc.formats.call_schemas import Schema, narrowed, without

# A space, or a line's end with indentation. Without a bound a model could write white space until max_tokens.
WHITE_SPACE = r"\x20|\n\x20{0,16}"
NAME = re.compile(r"[\w.-]+", re.ASCII)
KEY = re.compile(r"[\w.$-]+", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NOTES = {"title", "description", "$schema", "$id", "$comment", "default", "examples", "$defs", "definitions", "strict"}
_OF_OBJECTS = _NOTES | {"type", "properties", "required", "additionalProperties"}
_OF_TEXTS = _NOTES | {"type", "enum", "const", "minLength", "maxLength"}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one tokenizer writes a format's markers: the ids of its special tokens, which no text spells."""

    special_ids: Mapping[str, int]

    def pieces(self, text: str) -> list[str | int]:
        inside = [re.escape(each) for each in sorted(self.special_ids, key=len, reverse=True) if each in text]
        parts = re.split(f"({'|'.join(inside)})", text) if inside else [text]
        return [self.special_ids.get(part, part) for part in parts if part]

    def rule(self, text: str) -> str:
        return " ".join(f"<[{each}]>" if isinstance(each, int) else json.dumps(each) for each in self.pieces(text))


@dataclass(frozen=True, slots=True)
class Writing:
    """What a writer of one call needs: the field's name, the spelling, the texts that would end a call early."""

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
        problem = f"no call can be forced: {what}, which the calls of this model ({self.format}) cannot carry"
        return InvalidArgument.of(self.field, problem, reason="FORMAT_INVALID")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`start` and `end` are around each call, or around all of them (`is_list`), with `between` them."""

    start: str
    end: str
    call: Callable[[str, Schema, Writing], str]
    ends: tuple[str, ...] = ()
    between: str = ""
    is_list: bool = False
    ends_reply: bool = False  # a call is a message of its own, and `end` the token that ends the reply
    name: re.Pattern[str] = NAME

    @property
    def marker(self) -> str:
        return self.start.rstrip("\n[")


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a schema, as it stands up to its closing mark."""

    close: str
    is_stripped: bool = False  # white space around it is lost
    barred: tuple[str, ...] = ()  # regular expressions of texts that are read as something else

    def rule(self, key: str, schema: Schema, writing: Writing) -> str:
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
        pieces = writing.spelling.pieces(self.close)
        tokens = [place for place, piece in enumerate(pieces) if isinstance(piece, int)]
        text_end = "".join(map(str, pieces[: tokens[0]] if tokens else pieces))
        rest = self.close[len(text_end) :]
        head = literal(text_end)
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


def listed(values: Mapping[str, str], required: Collection[str], comma: str) -> str:
    """Rules of an object's members with a comma between any two: those that are required come first."""
    first = [value for key, value in values.items() if key in required]
    rest = [value for key, value in values.items() if key not in required]
    if first:
        return f" {comma} ".join(first) + "".join(f" ({comma} {value})?" for value in rest)
    tails = [" ".join([value, *(f"({comma} {more})?" for more in rest[at + 1 :])]) for at, value in enumerate(rest)]
    return f"({' | '.join(tails)})?" if tails else ""


def is_identifier(name: str) -> bool:
    return bool(_IDENTIFIER.fullmatch(name)) and not keyword.iskeyword(name)


def literal(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/").replace("\\ ", " ")


def as_schema(schema: Any) -> Schema:
    return schema if isinstance(schema, dict) else {}


def shared(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key in ("$defs", "definitions")}


def check_object(schema: Schema, writing: Writing) -> None:
    """Raise InvalidArgument for rules of an object that tags and keywords cannot express."""
    if schema.get("type") != "object" or not schema.keys() <= _OF_OBJECTS:
        raise writing.refused(
            "its parameters use " + ", ".join(sorted(schema.keys() - _OF_OBJECTS) or ["another type"])
        )
    if missing := set(schema.get("required", ())) - set(schema.get("properties", {})):
        raise writing.refused(f"required {sorted(missing)[0][:80]!r} is no property")
