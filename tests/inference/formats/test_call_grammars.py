"""Forced calls: whatever a model would say, mlx-lm's own parser reads calls of the tools that fit their schemas."""

import importlib
import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from kvasir.errors import FailedPrecondition, InvalidArgument
from llguidance import LLMatcher, LLTokenizer

from inference_svc.formats.call_grammars import FORMATS
from inference_svc.formats.call_writing import Spelling
from inference_svc.formats.grammar_trial_process import limits
from inference_svc.formats.reply_grammars import reply_grammar
from tests.made_models.sampling import sampled

TOKENIZER = LLTokenizer("byte")
LETTERS = Spelling({})
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "number"},
        "b": {"type": "boolean"},
        "xs": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["a", "b"],
}
TOOLS = [{"place": 0, "name": "weather", "parameters": WEATHER}, {"place": 1, "name": "add", "parameters": ADD}]
# How each format writes one call of weather, with {city} in its place.
WRITTEN = {
    "json_tools": '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{{"city": "{city}"}}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{{"city": "{city}"}}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
    '{{"city": "{city}"}}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "pythonic": '<|tool_call_start|>[weather(city="{city}")]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{city}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "glm47": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>{city}</longcat_arg_value>\n</longcat_tool_call>",
    "minicpm5": '<function name="weather"><param name="city">{city}</param></function>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">"{city}"'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
}
WRITTEN["laguna"] = WRITTEN["glm47"]
WRITTEN["gemma4"] = '<|tool_call>call:weather{{city:<|"|>{city}<|"|>}}<tool_call|>'
WRITTEN["function_gemma"] = "<start_function_call>call:weather{{city:<escape>{city}<escape>}}<end_function_call>"
EVERY = pytest.mark.parametrize("name", sorted(FORMATS))


def compiled(
    name: str, tools: list[dict[str, Any]], *, one_call: bool = False, spelling: Spelling = LETTERS
) -> LLMatcher:
    text = LLMatcher.grammar_from_lark(reply_grammar(name, tools, one_call=one_call, spelling=spelling))
    matcher = LLMatcher(TOKENIZER, text, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def admits(matcher: LLMatcher, text: str) -> bool:
    reply, given = matcher.deep_copy(), list(text.encode())
    return reply.validate_tokens(given) == len(given) and reply.consume_tokens(given) and reply.is_accepting()


def calls_in(name: str, text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a reply is read: markers first, then mlx-lm's parser of what stands between them."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    end = re.escape(module.tool_call_end) or "$"
    found: list[dict[str, Any]] = []
    for inner in re.findall(f"{re.escape(module.tool_call_start)}(.*?){end}", text, re.DOTALL):
        parsed = module.parse_tool_call(inner, [{"type": "function", "function": tool} for tool in tools])
        found += parsed if isinstance(parsed, list) else [parsed]
    return found


def random_reply(matcher: LLMatcher, chance: random.Random, most: int = 3000) -> str:
    """What a model with random weights would say: any allowed letter, mostly readable ones, to an end."""
    reply, said = matcher.deep_copy(), bytearray()
    while len(said) < most and not reply.is_stopped():
        mask = int.from_bytes(reply.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if reply.is_accepting() and (not allowed or chance.random() < 0.5):
            break
        readable = [byte for byte in allowed if 32 <= byte < 127]
        byte = chance.choice(readable if readable and chance.random() < 0.9 else allowed)
        reply.consume_token(byte)
        said.append(byte)
    assert reply.is_accepting(), bytes(said)
    return said.decode()


@EVERY
def test_what_a_model_writes_in_its_format_is_admitted_and_read_back(name: str) -> None:
    matcher = compiled(name, TOOLS)
    text = WRITTEN[name].format(city="Oslo")
    assert admits(matcher, text)
    assert [(call["name"], call["arguments"]) for call in calls_in(name, text, TOOLS)] == [
        ("weather", {"city": "Oslo"})
    ]


@EVERY
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("weather", "whether"), ("city", "place"), ("Oslo", "Llanfairpwllgwyngyll")],
)
def test_another_tool_another_property_or_another_value_is_not_admitted(name: str, right: str, wrong: str) -> None:
    assert not admits(compiled(name, TOOLS), WRITTEN[name].format(city="Oslo").replace(right, wrong))


@EVERY
def test_words_before_a_call_and_a_named_tools_sibling_are_not_admitted(name: str) -> None:
    text = WRITTEN[name].format(city="Oslo")
    assert not admits(compiled(name, TOOLS), "Well. " + text)
    assert not admits(compiled(name, TOOLS[1:], one_call=True), text)


@pytest.mark.long(2)
@EVERY
def test_one_call_is_exactly_one(name: str) -> None:
    chance = random.Random(name)
    several, one = compiled(name, TOOLS), compiled(name, TOOLS, one_call=True)
    most = max(len(calls_in(name, random_reply(several, chance), TOOLS)) for _ in range(12))
    assert most > 1, "without it there may be more"
    assert {len(calls_in(name, random_reply(one, chance), TOOLS)) for _ in range(12)} == {1}


@pytest.mark.long(2)
@EVERY
def test_every_random_reply_is_calls_that_fit_their_schemas(name: str) -> None:
    matcher, schemas = compiled(name, TOOLS), {"weather": WEATHER, "add": ADD}
    for case in range(sampled(20, of=1000)):
        calls = calls_in(name, random_reply(matcher, random.Random(f"{name} {case}")), TOOLS)
        assert calls
        for call in calls:
            jsonschema_rs.validate(schemas[call["name"]], call["arguments"])


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "minicpm5", "glm47", "longcat"])
def test_a_text_that_a_parser_reads_as_another_is_not_admitted(name: str) -> None:
    """Texts have no quotes in these formats: some read a word as nothing, and some drop white space."""
    matcher = compiled(name, TOOLS)
    for city in ("null", "Null", " Oslo", "Oslo ", "<![CDATA[a]]>", "nulla"):
        reply = WRITTEN[name].format(city=city)
        is_kept = calls_in(name, reply, TOOLS)[0]["arguments"] == {"city": city}
        assert admits(matcher, reply) == (is_kept and len(city) <= 12), city


def test_a_special_token_stands_for_its_spelling() -> None:
    text = reply_grammar("json_tools", TOOLS, one_call=True, spelling=Spelling({"<tool_call>": 65, "</tool_call>": 66}))
    assert text.startswith('start: <[65]> "\\n" call "\\n" <[66]>\n')


def test_a_text_may_hold_what_does_not_end_the_call() -> None:
    tool = {"place": 0, "name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
    for name, text in (("qwen3_coder", "<p>a</p> </para"), ("json_tools", "<p>a</p> </tool_")):
        reply = WRITTEN[name].format(city=text).replace("weather", "write").replace("city", "text")
        assert admits(compiled(name, [tool]), reply)
        assert calls_in(name, reply, [tool])[0]["arguments"] == {"text": text}


@pytest.mark.parametrize("name", ["none", "another"])
def test_a_format_without_a_grammar_is_refused_by_name(name: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"tool_choice: .*{name}") as refused:
        reply_grammar(name, TOOLS, one_call=True, spelling=LETTERS)
    assert refused.value.reason == "NO_FORCED_CALLS"


@pytest.mark.parametrize(
    ("name", "tool", "schema"),
    [
        ("qwen3_coder", "f", {"properties": {"a": {"type": ["string", "integer"]}}}),
        ("qwen3_coder", "f", {"properties": {"a": {"type": "string", "pattern": "^a"}}}),
        ("minimax_m2", "f", {"properties": {"a b": {"type": "string"}}}),
        ("glm47", "f", {"patternProperties": {"^a": {}}}),
        ("glm47", "f", {"required": ["a"]}),
        ("pythonic", "f", {"properties": {"class": {"type": "string"}}}),
        ("pythonic", "f-g", {}),
        ("json_tools", "f g", {}),
        *((name, "f", {"type": "array"}) for name in ("json_tools", "mistral", "kimi_k2", "qwen3_coder")),
        ("json_tools", "f", {"properties": {"a": {"enum": ["</tool_call>"]}}}),
    ],
)
def test_what_a_format_cannot_carry_is_refused_with_the_tools_place(
    name: str, tool: str, schema: dict[str, Any]
) -> None:
    tools = [{"place": 3, "name": tool, "parameters": schema}]
    with pytest.raises(InvalidArgument) as refused:
        reply_grammar(name, tools, one_call=True, spelling=LETTERS)
    assert refused.value.field == "tools[3]"
    assert name in json.dumps(str(refused.value))


@EVERY
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["a"]},
        {"required": [{}]},
        {"properties": {"a": {"type": "integer", "maximum": "10"}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": ["string", ["x"]]}}},
    ],
    ids=json.dumps,
)
def test_parameters_that_are_no_json_schema_are_refused_with_the_tools_place_or_by_the_library(
    name: str, schema: dict[str, Any]
) -> None:
    """They are a caller's mistake: "maximum": "10" was an internal error."""
    tools = [*TOOLS, {"place": 3, "name": "f", "parameters": schema}]
    refused = [False]
    try:
        grammar = LLMatcher.grammar_from_lark(reply_grammar(name, tools, one_call=True, spelling=LETTERS))
        refused = [LLMatcher(TOKENIZER, grammar, log_level=0, limits=limits()).is_error()]
    except InvalidArgument as error:
        refused = [error.field == "tools[3]", error.reason == "FORMAT_INVALID"]
    assert all(refused)
