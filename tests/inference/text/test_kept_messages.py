"""Which messages stay when a conversation outgrew its context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.text.kept_messages import (
    SUMMARY_MESSAGES,
    Messages,
    Shorter,
    as_remembered,
    as_summary,
    leading_system,
    shorter,
    summary_of,
    with_summary,
)
from inference_svc.turns.shortening import kept_tokens

STEP = ["assistant", "tool"]


def said(role: str, number: int) -> manifest_pb2.Message:
    return manifest_pb2.Message(role=role, content=f"{role} {number} " + "x" * (number % 7))


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    """System messages, then questions with replies, with tool calls and results between."""
    roles = ["system"] * draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 8))):
        steps = draw(st.sampled_from([0, 0, 1, 2, 5])) * [*STEP, *["tool"] * draw(st.integers(0, 1))]
        roles += ["user", *steps, *draw(st.sampled_from([["assistant"], []]))]
    return tuple(said(role, number) for number, role in enumerate(roles))


def tokens_of(messages: Messages) -> int:
    return sum(len(message.content) for message in messages)


def candidates(messages: Messages) -> list[Messages]:
    """All that may be left: what begins with a question; or the last question, with steps that are whole behind it."""
    lead = leading_system(messages)
    asked = [index for index in range(lead, len(messages)) if messages[index].role == "user"]
    steps = [index for index in range(asked[-1] + 2, len(messages)) if messages[index].role == "assistant"]
    begun = [(*messages[:lead], *messages[index:]) for index in asked if index > lead]
    return begun + [(*messages[:lead], messages[asked[-1]], *messages[index:]) for index in steps]


@given(conversations(), st.integers(0, 300), st.integers(0, 300))
def test_the_system_the_last_question_and_the_newest_stay_and_no_result_without_its_call(
    messages: Messages, wanted: int, more: int
) -> None:
    found = shorter(messages, tokens_of, wanted_tokens=wanted, most_tokens=wanted + more)
    left = candidates(messages)
    if found is None:
        assert all(tokens_of(candidate) > wanted + more for candidate in left)
        return
    assert found.dropped == len(messages) - len(found.messages) > 0
    fitting = [candidate for candidate in left if tokens_of(candidate) <= wanted]
    assert found.messages == (max(fitting, key=len) if fitting else left[-1])
    assert tokens_of(found.messages) <= wanted + more


@given(st.lists(conversations(), min_size=3, max_size=5), st.integers(0, 200), st.booleans())
def test_a_whole_conversation_goes_on_as_its_agent_has_it(
    parts: list[Messages], wanted: int, has_summary: bool
) -> None:
    """Shortened again and again, with new summaries or none; the client sends everything each time."""
    whole = remembered = parts[0]
    left_out = manifest_pb2.Shortened()
    for part in parts[1:]:
        # What comes may go on behind the question before.
        news = part[leading_system(part) + len(part) % 2 :]
        found = shorter(
            remembered,
            tokens_of,
            wanted_tokens=wanted,
            most_tokens=10**9,
            before=left_out,
            keeps_summary=not has_summary,
        )
        if found is None:
            return
        remembered, left_out = found.messages, found.shortened
        if has_summary:
            remembered, left_out.has_summary = with_summary(remembered, as_summary("That.")), True
        assert left_out.dropped_messages == len(whole) + 2 * has_summary - len(remembered)
        assert as_remembered(whole, remembered, left_out) == remembered
        assert as_remembered((*whole, *news), remembered, left_out) == (*remembered, *news)
        gone = leading_system(whole) + left_out.dropped_messages + bool(left_out.dropped_behind_question)
        assert as_remembered(whole[:gone], remembered, left_out) is None
        whole, remembered = (*whole, *news), (*remembered, *news)


def called(*ids: str) -> manifest_pb2.Message:
    return manifest_pb2.Message(role="assistant", tool_calls=[manifest_pb2.ToolCall(id=each) for each in ids])


def result(call_id: str) -> manifest_pb2.Message:
    return manifest_pb2.Message(role="tool", tool_call_id=call_id, content=call_id)


def test_no_cut_goes_between_a_call_and_its_result() -> None:
    question, done = said("user", 1), said("assistant", 2)
    crossed = (question, called("a"), called("b"), result("a"), result("b"))
    assert shorter((*crossed, done), len, wanted_tokens=5, most_tokens=6) == Shorter(
        (question, done), 4, manifest_pb2.Shortened(dropped_messages=4, dropped_behind_question=4)
    )
    assert shorter(crossed, len, wanted_tokens=4, most_tokens=5) is None
    again = (question, called("a"), result("a"), called("a"), result("a"))  # an id that comes again
    found = shorter(again, len, wanted_tokens=4, most_tokens=5)
    assert found is not None
    assert found.messages == (question, *again[3:])


@given(conversations(), st.integers(0, 300))
def test_a_summary_stays_in_its_place_until_a_newer_one_takes_it(messages: Messages, wanted: int) -> None:
    before = manifest_pb2.Shortened(dropped_messages=7, has_summary=True)
    summary, lead = as_summary("Lena lives in Oslo."), leading_system(messages)
    summed = with_summary(messages, summary)
    kept = shorter(summed, tokens_of, wanted_tokens=wanted, most_tokens=10**9, before=before)
    without = shorter(summed, tokens_of, wanted_tokens=wanted, most_tokens=10**9, before=before, keeps_summary=False)
    if kept is not None:
        assert summary_of(kept.messages, kept.shortened) == summary
        assert kept.shortened.dropped_messages == 7 + kept.dropped == 7 + len(summed) - len(kept.messages)
    assert without is not None, "the summary alone can be left out"
    assert not summary_of(without.messages, without.shortened)
    assert without.messages[lead:] != summed[lead:]
    assert without.dropped == len(summed) - len(without.messages) - SUMMARY_MESSAGES


@pytest.mark.parametrize(
    ("full", "keep", "kept"),
    [
        (800, 0.5, 500),
        (800, 0.1, 100),
        (800, 0.8, 800),
        (400, 0.2, 200),  # of the context, and not of what long replies leave
        (400, 0.5, 250),
        (400, 0.8, 400),
    ],
)
def test_what_is_kept_is_a_share_of_the_context_where_turns_with_long_replies_leave_it(
    full: int, keep: float, kept: int
) -> None:
    assert kept_tokens(1000, full, keep) == kept
