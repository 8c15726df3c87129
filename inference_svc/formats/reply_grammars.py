"""Grammars of replies with tool calls: calls alone, calls or a format's text, or any text with calls. Pure."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.errors import FailedPrecondition, InvalidArgument

from inference_svc.formats.call_grammars import call_rules, format_of
from inference_svc.formats.call_schemas import Schema
from inference_svc.formats.call_writing import WHITE_SPACE, CallFormat, Spelling
from inference_svc.formats.constraint import ConstraintKind

_ANY_TEXT = "(?s:.*)"
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # in a terminal, which slashes enclose


def reply_grammar(
    format_name: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    one_call: bool,
    spelling: Spelling,
    kind: ConstraintKind = ConstraintKind.TOOL_CHOICE,
    reply_format: Mapping[str, str] | None = None,
    stop_ids: Collection[int] = (),
) -> str:
    """llguidance's Lark text. `tools`: name and parameters of each that may be called; with none the reply is any text
    without calls. `reply_format`: kind and text of the format that a reply without calls has. `stop_ids`: tokens that
    end replies and are no part of them. Raises FailedPrecondition for a format of calls that no grammar describes,
    InvalidArgument that names the tool for a schema that the format cannot carry.
    """
    field = kind.value
    form = format_of(format_name)
    if form is None or (form.ends_reply and kind is not ConstraintKind.TOOL_CHOICE):
        raise FailedPrecondition.of(
            field, f"no grammar describes this model's calls ({format_name})", reason="NO_FORCED_CALLS"
        )
    if not tools:
        return _with_terminals(_without_calls(form, spelling))
    calls = "\n    | ".join(call_rules(format_name, tools, spelling))
    if kind is ConstraintKind.CALLS_IN_TEXT:
        rules = _in_text(form, spelling, one_call=one_call)
    else:
        if form.ends_reply:
            form = replace(form, end="" if spelling.special_ids.get(form.end) in stop_ids else form.end)
        rules = f"start: {_all_calls(form, spelling, one_call=one_call or form.ends_reply)}\n"
        if reply_format is not None:
            rules = f"{rules.strip()}\n    | format\nformat: {_format(reply_format)}\n"
    return _with_terminals(f"{rules}call: {calls}\n")


def _all_calls(form: CallFormat, spelling: Spelling, *, one_call: bool) -> str:
    start, end, between = (spelling.rule(text) for text in (form.start, form.end, form.between))
    if form.is_list:
        more = "" if one_call else f" ({between} call)*"
        return f"{start} call{more} {end}"
    more = "" if one_call else f" ({between} {start} call {end})*"
    return f"{start} call {end}{more}"


def _free_text(form: CallFormat, spelling: Spelling) -> tuple[list[str], str]:
    """Text without a call: its parts, which end with a special token, and its end."""
    first, *others = spelling.pieces(form.marker)
    free = set(spelling.special_ids.values()) - {first}
    specials = f"<[{','.join(map(str, sorted(free)))}]>" if free else ""
    parts = [f"TEXT {specials}"] if specials else []
    if isinstance(first, str) or not others or not isinstance(others[0], str):
        return parts, "TEXT"
    # The marker's token begins other things, too.
    other = f"TERMINAL(/{_ANY_TEXT}/ & ~/{re.escape(others[0])}/)"
    return [*parts, f"TEXT <[{first}]> {other} {specials}"], f"TEXT (<[{first}]> {other} )?"


def _without_calls(form: CallFormat, spelling: Spelling) -> str:
    """Text in which no marker of a call stands."""
    first, *_ = spelling.pieces(form.marker)
    parts, tail = _free_text(form, spelling)
    marked = f" & ~/{_ANY_TEXT}{re.escape(first)}{_ANY_TEXT}/" if isinstance(first, str) else ""
    before = f"({' | '.join(parts)})* " if parts else ""
    return f"start: {before}{tail}\nTEXT: /{_ANY_TEXT}/{marked}\n"


def _in_text(form: CallFormat, spelling: Spelling, *, one_call: bool) -> str:
    """Text, in which each marker of a call is followed by a call. Special tokens stand in text, too."""
    first, *others = spelling.pieces(form.marker)
    rest, end, start, between = (
        spelling.rule(text) for text in (form.start.removeprefix(form.marker), form.end, form.start, form.between)
    )
    parts, tail = _free_text(form, spelling)
    if isinstance(first, str):
        mark = "mark[lazy]: TEXT " + json.dumps(first)
    else:
        following = " ".join(f"<[{each}]>" if isinstance(each, int) else json.dumps(each) for each in others)
        mark = f"mark: TEXT <[{first}]> {following}"
    many = f" ({between} call)*" if form.is_list and not one_call else ""
    bound = f"mark {rest} call{many} {end}"
    free_part = f"part: {' | '.join(parts)}\n" if parts else ""
    before = "part* " if parts else ""
    if one_call:
        rules = f"start: {before}tail | {before}bound\n"
    elif form.end:
        rules = f"start: ({'part | ' if parts else ''}bound)* tail\n"
    else:  # a call goes on to the next one's beginning, or the reply's end
        rules = f"start: {before}tail | {before}bound ({between} {start} call)*\n"
    return f"{rules}bound: {bound}\n{mark}\n{free_part}tail: {tail}\nTEXT: /{_ANY_TEXT}/\n"


def _format(reply_format: Mapping[str, str]) -> str:
    text = reply_format["text"]
    if reply_format["kind"] == ConstraintKind.REGEX.value:
        return "/" + re.sub(r"\\.|/|\n", lambda each: _ESCAPED.get(each[0], each[0]), text, flags=re.DOTALL) + "/"
    try:
        schema = json.loads(text)
    except ValueError:
        schema = None
    if not isinstance(schema, dict):  # `true` too, which would allow white space without a bound
        raise InvalidArgument.of("json_schema", "expected a JSON object", reason="FORMAT_INVALID")
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **schema}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """How one model writes calls: the name of mlx-lm's parser, and the tokens that its tokenizer added."""

    format: str
    spelling: Spelling
    stop_ids: frozenset[int] = frozenset()  # of the model

    def end_ids(self, kind: ConstraintKind) -> frozenset[int]:
        """The tokens that may end a reply which is calls alone; empty: any of the model's."""
        form = format_of(self.format)
        if kind is not ConstraintKind.TOOL_CHOICE or form is None or not form.ends_reply:
            return frozenset()
        return self.stop_ids & {self.spelling.special_ids.get(form.end, -1)}

    def grammar(self, kind: ConstraintKind, asked: str, spelling: Spelling) -> str:
        """The grammar of a constraint's text. Raises as `reply_grammar`."""
        wanted = json.loads(asked)
        try:
            tools = [{**tool, "parameters": _parameters(tool)} for tool in wanted["tools"]]
            return reply_grammar(
                self.format,
                tools,
                one_call=wanted["one_call"],
                spelling=spelling,
                kind=kind,
                reply_format=wanted.get("format"),
                stop_ids=self.stop_ids,
            )
        except RecursionError:
            raise InvalidArgument.of("tools", "nested too deeply", reason="FORMAT_TOO_COMPLEX") from None


NO_CALLS = ModelCalls("none", Spelling({}))


def _parameters(tool: Mapping[str, Any]) -> Schema:
    field = f"tools[{tool['place']}].parameters_json"
    try:
        schema = json.loads(tool["parameters"] or "{}")
    except ValueError:
        raise InvalidArgument.of(field, "expected a JSON object") from None
    if not isinstance(schema, dict):
        raise InvalidArgument.of(field, "expected a JSON object")
    return schema


def _with_terminals(grammar: str) -> str:
    """Each intersection of regular expressions becomes a terminal of its own: rules cannot hold one."""
    terminals: list[str] = []
    pieces = re.split(r"TERMINAL\((/.*?/)\)(?=[ )?\n]|$)", grammar)
    for number in range(1, len(pieces), 2):
        if pieces[number] not in terminals:
            terminals.append(pieces[number])
        pieces[number] = f"TEXT_{terminals.index(pieces[number])}"
    return "".join(pieces) + "".join(f"TEXT_{number}: {body}\n" for number, body in enumerate(terminals))
