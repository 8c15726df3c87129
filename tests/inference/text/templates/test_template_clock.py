"""What a template is told when it asks for the time."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting
from inference_svc.text.templates.template_clock import TemplateClock, wall_clock_ms
from inference_svc.text.token_text import TokenText

# As Llama 3.2's and gpt-oss's templates ask.
DATED = "{%- if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %} {{ messages[0].content }}"
TIMES = st.integers(1, 253_402_300_799_999)


def ms(text: str) -> int:
    return (datetime.fromisoformat(text) - datetime(1970, 1, 1)) // timedelta(milliseconds=1)


def prompting_of(template: str, now_ms: Callable[[], int] = lambda: 0) -> Prompting:
    path = kvasir_tiny.path() / "tokenizer.json"
    fast = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|im_end|>")
    fast.chat_template = template
    wrapper = TokenizerWrapper(fast)
    return Prompting(wrapper, TokenText.of_tokenizer(path.read_text(), wrapper.decode), now_ms)


@pytest.fixture(scope="module")
def prompting() -> Prompting:
    return prompting_of(DATED)


def rendered(prompting: Prompting, clock: TemplateClock) -> str:
    return prompting.template_at(clock)([{"role": "user", "content": "Hello."}], None, True)


def test_behind_midnight_the_date_is_the_memorys(prompting: Prompting) -> None:
    before, behind = ms("2026-11-23T23:59:58"), ms("2026-11-24T00:00:01")
    first = TemplateClock(now_ms=before)
    assert (rendered(prompting, first), first.told_ms, first.has_kept) == ("23 Nov 2026 Hello.", before, False)
    second = TemplateClock(first.told_ms, behind)
    assert (rendered(prompting, second), second.told_ms, second.has_kept) == ("23 Nov 2026 Hello.", before, True)
    new = TemplateClock(now_ms=behind)
    assert (rendered(prompting, new), new.told_ms) == ("24 Nov 2026 Hello.", behind)


def test_what_reads_alike_is_not_told_as_kept(prompting: Prompting) -> None:
    clock = TemplateClock(ms("2026-11-24T00:00:01"), ms("2026-11-24T23:59:59"))
    assert (rendered(prompting, clock), clock.has_kept) == ("24 Nov 2026 Hello.", False)


def test_a_template_that_does_not_ask_is_told_nothing() -> None:
    clock = TemplateClock(1)
    assert rendered(prompting_of("{{ messages[0].content }}"), clock) == "Hello."
    assert (clock.told_ms, clock.has_kept) == (0, False)


def test_a_turns_clock_shows_what_the_machines_wall_does() -> None:
    now = datetime(2026, 11, 24, 0, 0, 1)  # where the machine is
    prompting = prompting_of(DATED, lambda: int(now.timestamp() * 1000))
    assert prompting.clock().now_ms == wall_clock_ms(int(now.timestamp() * 1000)) == ms("2026-11-24T00:00:01")
    assert prompting.template([{"role": "user", "content": "Hello."}], None, True) == "24 Nov 2026 Hello."
    assert rendered(prompting, prompting.clock(ms("2026-11-23T23:59:58"))) == "23 Nov 2026 Hello."


def test_outside_of_turns_a_template_is_told_by_its_library(prompting: Prompting) -> None:
    assert rendered(prompting, TemplateClock(now_ms=1)) == "01 Jan 1970 Hello."
    said = prompting._tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    assert said.split()[2] == str(datetime.now().year)


@pytest.mark.long(10)
@given(TIMES, TIMES, st.text(max_size=8))
def test_what_is_remembered_alone_decides_what_is_printed(remembered: int, now: int, text: str) -> None:
    form = f"%Y-%m-%d %H:%M:%S.%f {text.replace('%', '%%').encode('ascii', 'ignore').decode()}".replace("\0", "")
    kept = TemplateClock(remembered, now).strftime(form)
    assert kept == TemplateClock(now_ms=remembered).strftime(form)
