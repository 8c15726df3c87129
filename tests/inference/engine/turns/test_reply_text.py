"""A reply's text as it grows: what its client sees, what ends it, and which tokens are remembered."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.api import FinishReason, SamplingParams
from inference_svc.engine.reply_text import ReplyText
from inference_svc.text.token_text import TokenText
from tests.made_models.sampling import sampled

FOX, QUOTE = "🦊".encode(), "“".encode()
PIECES = [b"<end>", b"a", b"b", b"ab", FOX[:2], FOX[2:], FOX, b" " + QUOTE[:2], QUOTE[2:], QUOTE[2:] + FOX[:2], b""]
END = 0
TEXT = TokenText.of_bytes(PIECES.__getitem__)


def is_whole(token_ids: list[int]) -> bool:
    stream = TEXT.stream()
    for token_id in token_ids:
        stream.push(token_id)
    return stream.is_whole


def test_half_a_character_before_a_stop_string_is_not_remembered() -> None:
    reply = ReplyText(TEXT, SamplingParams(max_tokens=9, stop=("“",)), (END,))
    assert [reply.push(token_id) for token_id in (1, 7, 8)] == ["a", " ", ""]
    assert (reply.finish_reason, reply.visible) == (FinishReason.STOP_SEQUENCE, "a ")
    assert reply.remembered == ["a"]


@settings(max_examples=sampled(200, of=1000), deadline=None)
@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    stops=st.lists(st.text(alphabet="ab “🦊", min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 12),
)
def test_what_is_remembered_is_the_most_that_was_said_in_whole_characters(
    token_ids: list[int], stops: list[str], max_tokens: int
) -> None:
    reply = ReplyText(TEXT, SamplingParams(max_tokens=max_tokens, stop=tuple(stops)), (END,))
    said: list[int] = []
    told = ""
    while token_ids and reply.finish_reason is None:
        said.append(token_ids.pop(0))
        told += reply.push(said[-1])
    if reply.finish_reason is None:
        told += reply.cut()
    assert told == reply.visible
    spelled, chars = TEXT.spell(said)
    is_stopped = reply.finish_reason is FinishReason.STOP_SEQUENCE
    if is_stopped:
        assert spelled.startswith(told + reply.matched_stop)
        assert not any(stop in told for stop in stops)
    elif reply.finish_reason is FinishReason.STOP:
        assert spelled == told + TEXT.spell([*said[:-1]])[0][len(told) :] + spelled[sum(chars[:-1]) :]
    else:
        assert spelled == told
    most_chars = len(told) if is_stopped else len(spelled)
    fitting = [n for n in range(len(said) + 1) if is_whole(said[:n]) and sum(chars[:n]) <= most_chars]
    assert len(reply.remembered) == max(fitting)
    assert list(map(len, reply.remembered)) == chars[: max(fitting)]
