"""kvasir-tiny-wedlm as it ships: found by its name, it gives the right replies in fewer passes than tokens."""

from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import NotFound

from inference_svc.engine.api import Tokens
from inference_svc.engine.engine import Engine
from inference_svc.first_model import named_model
from inference_svc.model import kvasir_tiny
from inference_svc.model.loading import find_model
from inference_svc.model.model_identity import tokenizer_digest
from tests.inference.engine.driving import Driver
from tools.kvasir_tiny import evaluate, rows
from tools.kvasir_tiny.exams import first_exam

TOKENS_A_PASS, P_CACHE = 2.5, 0.6


def test_a_model_that_ships_is_found_by_its_name() -> None:
    shipped = kvasir_tiny.shipped()
    assert {name: find_model(name) for name in shipped} == shipped
    assert [named_model(str(path))[0] for path in shipped.values()] == ["kvasir-tiny", "kvasir-tiny-wedlm"]
    assert len({tokenizer_digest(path) for path in shipped.values()}) == 1
    assert all((path / "model.safetensors").stat().st_size <= 13 * 2**20 for path in shipped.values())
    with pytest.raises(NotFound):
        find_model("/kvasir-tiny-wedlm")
    with pytest.raises(NotFound, match="tinny is neither a directory nor a repository OWNER/NAME, nor kvasir-tiny nor"):
        find_model("tinny")


@pytest.mark.long(2)
def test_an_engine_recalls_facts_by_windows(tmp_path: Path) -> None:
    talk = evaluate.conversation(1, 300)
    engine = Engine.open(kvasir_tiny.WEDLM_NAME, cache_dir=tmp_path, memory_budget_bytes=64 << 20, longest_gap_s=0)
    driver, tokenizer = Driver(engine), engine.tokenizer
    passes = computed = tokens = 0

    def reply_to(question: str) -> str:
        nonlocal passes, computed, tokens
        messages: Any = [*talk.messages, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, tools=talk.tools or None, add_generation_prompt=True)
        end = (listener := driver.submit(list(prompt), max_tokens=64, temperature=0.0)).end()
        passes, computed = passes + end.mask_passes.passes, computed + end.mask_passes.rows
        tokens += end.completion_tokens
        return "".join(each.text for each in listener.events if isinstance(each, Tokens)).strip()

    try:
        questions = talk.questions[:6]
        assert [reply_to(each.text) for each in questions] == [each.answer for each in questions]
        assert tokens >= TOKENS_A_PASS * passes
        assert tokens >= P_CACHE * computed
    finally:
        engine.close()


def test_a_long_reply_by_windows_is_right(tmp_path: Path) -> None:
    """A summary that windows got wrong which kept tokens behind unsure ones."""
    asked = first_exam.exchange("summaries", 7, rows.encoder_of(kvasir_tiny.path()).count)
    engine = Engine.open(kvasir_tiny.WEDLM_NAME, cache_dir=tmp_path, memory_budget_bytes=64 << 20, longest_gap_s=0)
    template: Any = engine.tokenizer.apply_chat_template
    prompt = template([*asked.messages, {"role": "user", "content": asked.question}], add_generation_prompt=True)
    try:
        ended = Driver(engine).turn(list(prompt), max_tokens=256, temperature=0.0)
    finally:
        engine.close()
    assert ended.text.strip() == asked.answer
    assert ended.completion_tokens > 80
    assert ended.completion_tokens >= TOKENS_A_PASS * ended.mask_passes.passes
