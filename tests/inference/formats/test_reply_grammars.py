"""Calls in replies that need have none: once one begins it is bound, and beside a format there is nothing else."""

import importlib
import json
import random
from typing import Any

import jsonschema_rs
import pytest
from kvasir.errors import InvalidArgument
from llguidance import LLMatcher

from inference_svc.formats.call_grammars import FORMATS
from inference_svc.formats.call_writing import Spelling
from inference_svc.formats.constraint import ConstraintKind
from inference_svc.formats.grammar_trial_process import limits
from inference_svc.formats.reply_grammars import reply_grammar
from tests.inference.formats.test_call_grammars import (
    ADD,
    EVERY,
    LETTERS,
    TOKENIZER,
    TOOLS,
    WEATHER,
    WRITTEN,
    admits,
    calls_in,
    random_reply,
)
from tests.made_models.sampling import sampled

IN_TEXT, OR_FORMAT = ConstraintKind.CALLS_IN_TEXT, ConstraintKind.CALLS_OR_FORMAT
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
JSON = {"kind": "json_schema", "text": json.dumps(SCHEMA)}
REGEX = {"kind": "regex", "text": "(yes/no|a\n?b){1,2}"}
ESCAPED = {"kind": "regex", "text": "https?:\\/\\/[a-z\\/]+\\\nb|\\\\/"}


def compiled(
    name: str,
    kind: ConstraintKind,
    tools: list[dict[str, Any]] = TOOLS,
    *,
    one_call: bool = False,
    spelling: Spelling = LETTERS,
    reply_format: dict[str, str] | None = None,
) -> LLMatcher:
    lark = reply_grammar(name, tools, one_call=one_call, spelling=spelling, kind=kind, reply_format=reply_format)
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@EVERY
def test_the_marker_is_the_one_that_readers_know(name: str) -> None:
    assert FORMATS[name].marker == importlib.import_module(f"mlx_lm.tool_parsers.{name}").tool_call_start


@EVERY
def test_text_is_free_and_a_call_is_bound_once_it_begins(name: str) -> None:
    matcher, call = compiled(name, IN_TEXT), WRITTEN[name].format(city="Oslo")
    begun = FORMATS[name].marker
    for free in ("", "Well. ", "é < > [1] {}\n", begun[:-1] + " no"):
        assert admits(matcher, free)
        assert admits(matcher, free + call)
        assert not admits(matcher, free + call.replace("weather", "whether"))
        assert not admits(matcher, free + call.replace("city", "place"))
        assert not admits(matcher, f"{free}{begun} no")
    assert admits(matcher, f"{call}\nAnd so on.") == bool(FORMATS[name].end)
    assert admits(matcher, f"{call}{call}")


@EVERY
def test_a_reply_of_one_call_ends_with_it(name: str) -> None:
    matcher, call = compiled(name, IN_TEXT, one_call=True), WRITTEN[name].format(city="Oslo")
    assert admits(matcher, "Well.")
    assert admits(matcher, f"Well. {call}")
    for more in (call, "\n" + call, " And so on."):
        assert not admits(matcher, call + more)


@EVERY
def test_without_tools_a_reply_is_any_text_that_begins_no_call(name: str) -> None:
    marker, call = FORMATS[name].marker, WRITTEN[name].format(city="Oslo")
    matcher = compiled(name, IN_TEXT, [])
    for free in ("", "Well. ", "é < > [1] {}\n", marker[:-1], marker[:-1] + " no"):
        assert admits(matcher, free)
        assert not admits(matcher, free + marker)
        assert not admits(matcher, free + call)


@EVERY
def test_a_reply_is_calls_or_the_formats_text_and_nothing_else(name: str) -> None:
    call = WRITTEN[name].format(city="Oslo")
    for reply_format, right, wrong in (
        (JSON, '{"n": 5}', '{"n": "5"}'),
        (REGEX, "yes/noa\nb", "yes"),
        (ESCAPED, "https://a/\nb", "https:\\/\\/a\nb"),
        (ESCAPED, "\\/", "/"),
    ):
        matcher = compiled(name, OR_FORMAT, reply_format=reply_format)
        assert admits(matcher, right)
        assert admits(matcher, call)
        for other in (wrong, "", "Well. " + right, right + call, call.replace("city", "place")):
            assert not admits(matcher, other)


@pytest.mark.long(5)
@EVERY
def test_every_random_reply_beside_a_format_is_calls_that_fit_or_the_format(name: str) -> None:
    matcher, schemas = compiled(name, OR_FORMAT, reply_format=JSON), {"weather": WEATHER, "add": ADD}
    kinds = set()
    for case in range(sampled(20, of=1000)):
        reply = random_reply(matcher, random.Random(f"{name} {case}"))
        calls = calls_in(name, reply, TOOLS)
        kinds.add(bool(calls))
        for call in calls:
            jsonschema_rs.validate(schemas[call["name"]], call["arguments"])
        if not calls:
            jsonschema_rs.validate(SCHEMA, json.loads(reply))
    assert kinds == {True, False}


@EVERY
def test_a_tool_that_is_not_strict_stays_callable_beside_one_that_is(name: str) -> None:
    loose = {"place": 2, "name": "log", "strict": False, "parameters": {"properties": {"x": {"pattern": "^(?=a)"}}}}
    weather = {**TOOLS[0], "strict": True}
    assert admits(compiled(name, IN_TEXT, [weather, loose]), WRITTEN[name].format(city="Oslo"))


SPECIALS = {"<tool_call>": 256, "</tool_call>": 257, "<think>": 258, "<|open|>": 259, "<|sep|>": 260}


def ids(*parts: str | int) -> list[int]:
    return [each for part in parts for each in ([part] if isinstance(part, int) else list(part.encode()))]


def takes(matcher: LLMatcher, given: list[int]) -> bool:
    reply = matcher.deep_copy()
    return reply.validate_tokens(given) == len(given) and reply.consume_tokens(given) and reply.is_accepting()


def test_special_tokens_stand_in_text_and_the_markers_token_alone_begins_a_call() -> None:
    matcher = compiled("json_tools", IN_TEXT, spelling=Spelling(SPECIALS))
    call = '\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
    assert takes(matcher, ids(258, "So <tool_call> in letters", 258, "b"))
    assert takes(matcher, ids(258, "a", 256, call, 257, "c", 256, call, 257))
    for wrong in (ids(256, "no"), ids(256, call.replace("city", "town"), 257), ids(256, call), ids(256, 258)):
        assert not takes(matcher, wrong)


def test_the_markers_token_is_no_part_of_a_reply_without_calls() -> None:
    matcher = compiled("json_tools", IN_TEXT, [], spelling=Spelling(SPECIALS))
    assert takes(matcher, ids(258, "So <tool_call> in letters", 258, "b", 257))
    assert not takes(matcher, ids(258, "a", 256))
    others = compiled("kimi_k3", IN_TEXT, [], spelling=Spelling({**SPECIALS, "<|close|>": 257}))
    assert takes(others, ids(259, "think", 260, "so", 257, "think", 260, "text"))
    assert not takes(others, ids("text", 259, "tools", 260))


def test_a_token_that_begins_other_things_too_binds_only_what_is_a_call() -> None:
    matcher = compiled("kimi_k3", IN_TEXT, spelling=Spelling({**SPECIALS, "<|close|>": 257}))
    call = ids(259, "tools", 260, 259, 'call tool="weather" index="1"', 260, 259, 'json type="object"', 260)
    call += ids('{"city": "Oslo"}', 257, "json", 260, 257, "call", 260, 257, "tools", 260)
    assert takes(matcher, ids(259, "think", 260, "so", 257, "think", 260, "text", *call))
    assert takes(matcher, ids("text", 259, "think", 260, "so"))
    assert not takes(matcher, ids("text", 259, "tools", 260, "so"))
    assert not takes(matcher, [token if token != ord("c") else ord("d") for token in call])


@pytest.mark.parametrize("text", ["{", "true"])
def test_a_format_that_is_none_is_refused_by_name(text: str) -> None:
    """Without tools `true` was refused; beside them it was taken, with white space of any length."""
    with pytest.raises(InvalidArgument, match="json_schema"):
        reply_grammar(
            "json_tools",
            TOOLS,
            one_call=False,
            spelling=LETTERS,
            kind=OR_FORMAT,
            reply_format={"kind": "json_schema", "text": text},
        )
