"""Thinking on, off and with a budget, and settings of templates: what each family's template makes of them."""

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvasir.errors import InvalidArgument

from inference_svc.text.replies.reasoning_limit import ReasoningLimit, ReasoningWatch
from inference_svc.text.templates.template_names import names_read
from inference_svc.text.templates.template_settings import AppliedThinking, AskedThinking, applied
from inference_svc.text.token_text import TokenText
from tests.made_models.thinking_models import TEMPLATES

ON, OFF, EFFORT = AskedThinking(is_on=True), AskedThinking(is_on=False), AskedThinking(effort="minimal")
LETTERS = [*"abcdefghijklmnopqrstuvwxyz:\n", "<think>", "</think>"]
START, END = 28, 29


@cache
def reads(name: str) -> frozenset[str]:
    return names_read(TEMPLATES[name]).settings


def made(name: str, asked: AskedThinking, **more: Any) -> AppliedThinking:
    return applied(asked, reads(name), **{"thinks": True, "begins_with_answer": False, **more})


@pytest.mark.parametrize(
    ("name", "asked", "settings", "most"),
    [
        ("qwen3", OFF, {"enable_thinking": False}, None),
        ("qwen3", ON, {"enable_thinking": True}, None),
        ("glm", OFF, {"enable_thinking": False}, None),
        ("deepseek-v3.1", ON, {"thinking": True}, None),
        ("deepseek-v3.1", OFF, {"thinking": False}, None),
        ("minimax", OFF, {}, 0),
        ("deepseek-r1", OFF, {}, 0),
        ("deepseek-r1", ON, {}, None),
        ("gpt-oss", EFFORT, {"reasoning_effort": "low"}, None),
        ("qwen3", AskedThinking(most_tokens=7), {}, 7),
        ("glm", AskedThinking(settings={"clear_thinking": False}), {"clear_thinking": False}, None),
    ],
)
def test_a_family_is_asked_in_its_own_words(
    name: str, asked: AskedThinking, settings: dict[str, Any], most: int | None
) -> None:
    assert made(name, asked) == AppliedThinking(settings, most)


@pytest.mark.parametrize(
    ("asked", "more", "field"),
    [
        (EFFORT, {}, "thinking.effort"),
        (ON, {"thinks": False, "reads": frozenset()}, "thinking.mode"),
        (AskedThinking(most_tokens=1), {"thinks": False}, "thinking.budget_tokens"),
        (AskedThinking(most_tokens=1), {"begins_with_answer": True}, "thinking.budget_tokens"),
        (AskedThinking(settings={"messages": "x"}), {}, "template_settings.messages"),
        (AskedThinking(settings={"thoughts": "x"}), {}, "template_settings.thoughts"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name_or_left_out_and_named(
    asked: AskedThinking, more: dict[str, Any], field: str
) -> None:
    given: dict[str, Any] = {"reads": reads("qwen3"), "thinks": True, "begins_with_answer": False, **more}
    with pytest.raises(InvalidArgument) as refused:
        applied(asked, **given)
    assert refused.value.field == field
    lenient = AskedThinking(asked.is_on, asked.most_tokens, asked.effort, asked.settings, ignores_unread=True)
    assert applied(lenient, **given) == AppliedThinking(ignored=(field,))


def test_a_model_that_does_not_reason_is_off_already() -> None:
    assert applied(OFF, frozenset(), thinks=False, begins_with_answer=False) == AppliedThinking()


# --- the budget ---


def watch(most: int, *, is_open: bool, spacing: str = "\n", start_id: int | None = START) -> ReasoningWatch:
    spaced = (LETTERS.index("\n"), END) if spacing else (END,)
    limit = ReasoningLimit(most, "<think>", ("</think>", "call:"), spacing, (END,), spaced, start_id, is_open)
    return ReasoningWatch(limit, TokenText.of_bytes(lambda token_id: LETTERS[token_id].encode()))


def reply(watched: ReasoningWatch, wanted: list[int]) -> list[int]:
    """What comes of a model that wants these tokens, with each draw planned as late as `waits` allows."""
    said: list[int] = []
    unread: list[int] = []
    for token in wanted:
        if watched.waits:
            while unread:
                watched.accept(unread.pop(0))
        chosen = token if watched.forced is None else watched.forced
        if chosen == watched.banned:
            chosen = 0
        unread.append(chosen)
        said.append(chosen)
        if len(unread) > 1:
            watched.accept(unread.pop(0))
    return said


@given(
    most=st.integers(0, 6),
    wanted=st.lists(st.integers(0, len(LETTERS) - 1), max_size=40),
    is_open=st.booleans(),
    start_id=st.sampled_from([START, None]),
)
def test_no_reply_has_more_thoughts_than_its_budget_and_no_answer_is_touched(
    most: int, wanted: list[int], is_open: bool, start_id: int | None
) -> None:
    said = reply(watch(most, is_open=is_open, start_id=start_id), wanted)
    thoughts, opened, before = 0, is_open, list[int]()
    for place, token in enumerate(said):
        if not opened and token != wanted[place]:
            assert wanted[place] == START  # which is left out once nothing is left
            assert thoughts >= most
        thoughts += opened and token != END
        opened = token == START if not opened else token != END
        before.append(thoughts)
    # The line's end before a forced end is the template's, once for each time that the reply opened its thoughts.
    opens = is_open + sum(token == START for token in said)
    assert thoughts <= most + opens


@pytest.mark.parametrize(
    ("most", "is_open", "wanted", "said"),
    [
        (3, True, "abcdefg", "abc\n</think>fg"),
        (3, True, "ab\ncdef", "ab\n</think>def"),
        (0, True, "abcd", "\n</think>cd"),
        (2, False, "x<think>abcdefgh", "x<think>ab\n</think>efgh"),
        (3, True, "ab</think>cd<think>ef</think>", "ab</think>cd<think>e\n</think>"),
        (0, False, "ab<think>cd", "abacd"),
        (7, True, "abcall:defghijkl", "abcall:defghijkl"),
    ],
)
def test_the_end_is_forced_when_the_budget_is_spent(most: int, is_open: bool, wanted: str, said: str) -> None:
    def tokens(text: str) -> list[int]:
        found = []
        while text:
            piece = next(each for each in (*LETTERS[START:], text[0]) if text.startswith(each))
            found.append(LETTERS.index(piece))
            text = text[len(piece) :]
        return found

    came = reply(watch(most, is_open=is_open), tokens(wanted))
    assert "".join(LETTERS[token] for token in came) == said


SPELLED = [*"abc:\n", "<", "<th", "ink", ">", "think>", "<think>", "</think>"]  # the marker's token is not its only way


@given(
    most=st.integers(0, 3),
    wanted=st.lists(st.integers(0, len(SPELLED) - 1), max_size=24),
    is_open=st.booleans(),
    start_id=st.sampled_from([10, None]),
)
@example(most=0, wanted=[6, 7, 8, 0, 1, 2, 3], is_open=False, start_id=10)
def test_a_reply_is_the_same_however_late_its_tokens_are_read(
    most: int, wanted: list[int], is_open: bool, start_id: int | None
) -> None:
    """As late as `waits` allows, or at once, as beside a prompt: neighbours decide that, and change no reply."""
    limit = ReasoningLimit(most, "<think>", ("</think>", "c:"), "\n", (11,), (4, 11), start_id, is_open)
    late, soon = (
        ReasoningWatch(limit, TokenText.of_bytes(lambda token_id: SPELLED[token_id].encode())) for _ in range(2)
    )
    at_once = []
    for token in wanted:
        chosen = token if soon.forced is None else soon.forced
        at_once.append(0 if chosen == soon.banned else chosen)
        soon.accept(at_once[-1])
    assert reply(late, wanted) == at_once
