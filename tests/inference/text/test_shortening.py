"""Which messages stay when a conversation outgrew its context."""

from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.text.shortening import (
    Messages,
    as_remembered,
    leading_system,
    shorter,
    with_summary,
)


def said(role: str, number: int) -> manifest_pb2.Message:
    return manifest_pb2.Message(role=role, content=f"{role} {number} " + "x" * (number % 7))


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    """System messages, then questions with replies, with tool calls and results between."""
    roles = ["system"] * draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 12))):
        roles += ["user", *draw(st.sampled_from([["assistant"], ["assistant", "tool", "assistant"], []]))]
    return tuple(said(role, number) for number, role in enumerate(roles))


def tokens_of(messages: Messages) -> int:
    return sum(len(message.content) for message in messages)


@given(conversations(), st.integers(0, 300), st.integers(0, 300))
def test_the_system_and_the_newest_stay_and_no_border_but_a_questions_is_cut_at(
    messages: Messages, wanted: int, more: int
) -> None:
    lead = leading_system(messages)
    found = shorter(messages, tokens_of, wanted_tokens=wanted, most_tokens=wanted + more)
    borders = [index for index in range(lead + 1, len(messages)) if messages[index].role == "user"]
    candidates = [(*messages[:lead], *messages[border:]) for border in borders]
    if found is None:
        assert all(tokens_of(candidate) > wanted + more for candidate in candidates)
        return
    assert found.messages in candidates
    assert found.dropped == len(messages) - len(found.messages) > 0
    fitting = [candidate for candidate in candidates if tokens_of(candidate) <= wanted]
    assert found.messages == (max(fitting, key=len) if fitting else candidates[-1])
    assert tokens_of(found.messages) <= wanted + more


@given(conversations(), conversations(), st.integers(0, 200), st.booleans())
def test_a_whole_conversation_goes_on_as_its_agent_has_it(
    before: Messages, after: Messages, wanted: int, has_summary: bool
) -> None:
    """Shortened twice, with a summary or without; the client sends everything each time."""
    news = after[leading_system(after) :]
    whole, remembered, left_out = before, before, manifest_pb2.Shortened()
    for _ in range(2):
        found = shorter(
            remembered, tokens_of, wanted_tokens=wanted, most_tokens=10**9, has_summary=left_out.has_summary
        )
        if found is None:
            return
        remembered = with_summary(found.messages, "That.") if has_summary else found.messages
        left_out = manifest_pb2.Shortened(
            dropped_messages=left_out.dropped_messages + found.dropped, has_summary=has_summary
        )
        assert as_remembered(whole, remembered, left_out) == remembered
        assert as_remembered((*whole, *news), remembered, left_out) == (*remembered, *news)
        whole, remembered = (*whole, *news), (*remembered, *news)
