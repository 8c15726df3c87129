"""A reply taken apart, whatever a model writes and wherever its tokens end: nothing is lost and nothing crashes."""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.formats.manifest import call_id

from inference_svc.model.reply_machine import reply_marks
from inference_svc.text.replies.reply_parts import Markup, ReplyReader, ToolParser
from inference_svc.text.replies.reply_spacing import NO_SPACING, Spacing

CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
NO_MARKERS: dict[str, Any] = {
    **dict.fromkeys(("think_start", "think_end", "tool_call_start", "tool_call_end")),
    **dict.fromkeys(("has_thinking", "has_tool_calling"), False),
    "response_transitions": {},
    "structural_markers": (),
    **dict.fromkeys(("response_initial_state", "tool_parser")),
    "convert_tokens_to_ids": lambda _: None,
    "unk_token_id": None,
}
THINKING = {"has_thinking": True, "think_start": "<think>", "think_end": "</think>"}
FIRST, SECOND = (call_id("r", number) for number in range(2))
PARSERS = [module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__) if module.name != "laguna"]
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "_call>", "</", "think", "<", ">", "{", "}"]
REPLIES = st.lists(st.sampled_from([*PIECES, CALL, '{"name": "x"}', "ab\n", "é漢"]), max_size=12).map("".join)


def reader(
    parse: ToolParser = json.loads,
    initial: str = "normal",
    tool_end: str = "",
    spacing: Spacing = NO_SPACING,
    **markers: Any,
) -> ReplyReader:
    machine = reply_marks(SimpleNamespace(**{**NO_MARKERS, **markers})).machine
    known_end = markers.get("tool_call_end", "</tool_call>")
    markup = Markup(machine, parse, tool_end or known_end, initial, spacing, before=spacing.before)
    return ReplyReader(markup, "r")


def read(
    reader: ReplyReader, pieces: Iterable[str], stop_text: str = ""
) -> tuple[str, str, list[tuple[str, str, str]]]:
    parts = [*(reader.push(piece) for piece in pieces), reader.end(stop_text)]
    calls = [(call.id, call.name, call.arguments_json) for call in reader.calls]
    return "".join(part.answer for part in parts), "".join(part.reasoning for part in parts), calls


def _raises(_text: str) -> Any:
    raise RuntimeError("a parser")


def read_by_hand(reply: str, parse: ToolParser) -> tuple[str, str, int]:
    """Answer, reasoning and count of calls, by searching the whole reply for what may come next."""
    nexts = {"normal": "<think>|<tool_call>", "reasoning": "</think>|<tool_call>", "tool": "</tool_call>"}
    told, calls, state, opened = {"normal": "", "reasoning": ""}, 0, "normal", ""
    while found := re.search(nexts[state], reply):
        before, reply = reply[: found.start()], reply[found.end() :]
        if state != "tool":
            told[state] += before
        elif is_call(before, parse):
            calls += 1
        else:
            told["normal"] += opened + before + found[0]
        opened = found[0]
        state = {"<think>": "reasoning", "<tool_call>": "tool"}.get(opened, "normal")
    told["normal" if state == "tool" else state] += (opened if state == "tool" else "") + reply
    return told["normal"], told["reasoning"], calls


def is_call(text: str, parse: ToolParser) -> bool:
    try:
        return isinstance(parse(text), dict) and "name" in parse(text)
    except (ValueError, RuntimeError):
        return False


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_reply_that_must_begin_with_a_call_is_all_answer_where_it_begins_otherwise(size: int) -> None:
    for text in (f"[{CALL}]", f" {CALL}", "<tool", "<tool_cal", "", "<think>a</think>", f"<think>{CALL}"):
        machine = reply_marks(SimpleNamespace(**NO_MARKERS | THINKING)).machine
        bound = ReplyReader(Markup(machine, json.loads, "</tool_call>"), "r", begins_with="<tool_call>")
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(bound, pieces) == (text, "", [])
    machine = reply_marks(SimpleNamespace(**NO_MARKERS)).machine
    bound = ReplyReader(Markup(machine, json.loads, "</tool_call>"), "r", begins_with="<tool_call>")
    pieces = [CALL[at : at + size] for at in range(0, len(CALL), size)]
    assert len(read(bound, pieces)[2]) == 1


def test_reasoning_answer_and_calls_are_distinguished() -> None:
    told = read(reader(**THINKING), [f"<think>hm</think>It is {CALL}."])
    assert told == ("It is .", "hm", [(FIRST, "weather", '{"place": "Oslo"}')])


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    assert read(reader(initial="reasoning", **THINKING), ["hm</think>yes"]) == ("yes", "hm", [])


def test_calls_are_read_in_order_and_what_is_none_is_text() -> None:
    wrong = "<tool_call>not json</tool_call> <tool_call>[1]</tool_call>"
    open_end = '<tool_call>{"name": '
    answer, _, calls = read(reader(), [f"{CALL} then {wrong} {CALL}{open_end}"])
    assert answer == f" then {wrong} {open_end}"
    assert [call[0] for call in calls] == [FIRST, SECOND]


def test_markers_cut_anywhere_are_markers() -> None:
    reply = f"a<think>b<thin</think>c{CALL}d</think><tool_cal<tool_call>[1]</tool_call>"
    expected = ("acd</think><tool_cal<tool_call>[1]</tool_call>", "b<thin", [(FIRST, "weather", '{"place": "Oslo"}')])
    for cut in range(len(reply)):
        assert read(reader(**THINKING), [reply[:cut], reply[cut:]]) == expected
    assert read(reader(**THINKING), reply) == expected


@given(reply=REPLIES, cuts=st.lists(st.integers(0, 200), max_size=6), parse=st.sampled_from([json.loads, _raises]))
def test_nothing_that_a_model_says_is_lost(reply: str, cuts: list[int], parse: ToolParser) -> None:
    """Nested, open, split or malformed: the same as a reading of the whole by other means."""
    edges = sorted({0, len(reply), *(cut for cut in cuts if cut < len(reply))})
    answer, reasoning, calls = read(reader(parse, **THINKING), [reply[a:b] for a, b in pairwise(edges)])
    assert (answer, reasoning, len(calls)) == read_by_hand(reply, parse)


@given(reply=REPLIES)
def test_a_model_that_does_not_think_says_all_that_is_no_call(reply: str) -> None:
    answer, reasoning, calls = read(reader(_raises), [reply])
    assert (answer, reasoning, calls) == (reply, "", [])


@pytest.mark.parametrize(
    "parsed", [None, 7, "text", [{"name": "x"}, 7], [], {"name": 7}, {"name": "x", "arguments": {1, 2}}]
)
def test_what_a_parser_gives_that_is_no_call_is_text(parsed: object) -> None:
    assert read(reader(lambda _: parsed), [CALL]) == (CALL, "", [])


def test_a_call_that_is_no_text_is_reported_as_it_was_written_and_harms_no_other() -> None:
    """Half of a surrogate pair: JSON can spell it, UTF-8 cannot."""
    broken = "".join(
        f"<tool_call>{inner}</tool_call>"
        for inner in ('{"name": "x", "arguments": {"a": "\\ud800"}}', '{"name": "\\ud800", "arguments": {}}')
    )
    answer, _, calls = read(reader(), [broken + CALL])
    assert answer == broken
    assert [name for _, name, _ in calls] == ["weather"]


@pytest.mark.parametrize(
    "arguments", ['"Oslo"', "[1]", "7", "true", "[]", "0", "false", '"[1]"', '"{"', r'"{\"a\": \"\\ud800\"}"']
)
def test_arguments_that_no_caller_could_send_back_make_no_call(arguments: str) -> None:
    """The engine refuses them in the messages of the next turn, and the conversation could never go on."""
    wrong = f'<tool_call>{{"name": "x", "arguments": {arguments}}}</tool_call>'
    assert read(reader(), [wrong]) == (wrong, "", [])


@pytest.mark.parametrize("arguments", ["null", '""', "{}", '"{}"'])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    call = f'<tool_call>{{"name": "x", "arguments": {arguments}}}</tool_call>'
    assert read(reader(), [call]) == ("", "", [(FIRST, "x", "{}")])


def test_calls_have_ids_that_every_template_takes() -> None:
    """Nine letters and digits: with any other, Mistral's templates refuse the conversation from then on."""
    ids = [call_id(f"{request}-{choice}", number) for request in "ab" for choice in range(3) for number in range(100)]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    assert len(set(ids)) == len(ids)
    assert call_id("a-1", 1) == call_id("a-1", 1), "a retry tells the same"


def test_an_end_token_may_be_a_calls_end() -> None:
    """Its text is no part of the reply, and yet the call is whole."""
    open_call = CALL.removesuffix("</tool_call>")
    assert read(reader(), [open_call], "</tool_call>")[2] == [(FIRST, "weather", '{"place": "Oslo"}')]
    assert read(reader(), [open_call], "<|im_end|>") == (open_call, "", [])


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=30)
@given(reply=st.lists(st.sampled_from(["START", "END", *'{}()[]"<=,1', "name"]), max_size=9))
def test_every_parser_of_mlx_lm_gets_anything_and_nothing_is_lost(name: str, reply: list[str]) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    start, end = module.tool_call_start, module.tool_call_end
    text = "".join({"START": start, "END": end}.get(piece, piece) for piece in reply)
    markers = {"has_tool_calling": True, "tool_call_start": start, "tool_call_end": end}
    answer, _, calls = read(reader(lambda inner: module.parse_tool_call(inner, None), **markers), text)
    assert answer == text or calls


def test_without_markup_all_is_answer() -> None:
    assert read(ReplyReader(), ["<think>x", CALL]) == (f"<think>x{CALL}", "", [])


LINES = st.sampled_from(["", "\n", "\n\n", " "])
SPACED = st.lists(st.sampled_from([*PIECES, CALL, "\n", "\n\n", " ", "a", "é"]), max_size=14).map("".join)


@given(SPACED, st.lists(LINES, min_size=7, max_size=7), st.sampled_from(["normal", "reasoning"]), st.data())
def test_white_space_alone_is_dropped_and_the_same_wherever_tokens_end(
    text: str, lines: list[str], initial: str, data: Any
) -> None:
    spacing = Spacing("", *lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    whole, plain = (read(reader(initial=initial, spacing=each, **THINKING), [text]) for each in (spacing, NO_SPACING))
    assert read(reader(initial=initial, spacing=spacing, **THINKING), pieces) == whole
    assert ["".join(part.split()) for part in whole[:2]] == ["".join(part.split()) for part in plain[:2]]
    assert whole[2] == plain[2]
