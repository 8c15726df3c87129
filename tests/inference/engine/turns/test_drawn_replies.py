"""Replies as they were asked for, through a real model: what is drawn, what is told of it, what it costs to begin."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvasir.errors import Internal

from inference_svc.engine import prefilling
from inference_svc.engine.api import TokenLogprobs, Tokens
from inference_svc.engine.engine import Engine
from inference_svc.engine.sampling import Draws
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.kv.policy import PolicyRequest, Rung
from inference_svc.model.loading import load
from inference_svc.text.token_text import TokenText
from tests.inference.engine.driving import THOUGHTS, Driver, Listener, tokens_of

TAGS = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}')
WORDS = Constraint(ConstraintKind.REGEX, "([a-z]{1,5} ){3}end")
LIMIT = replace(THOUGHTS, most_tokens=3)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "constraint": TAGS},
    {"constraint": WORDS, "logprobs": 3},
    {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.4, "logprobs": 0},
    {"temperature": 0.8, "logit_bias": ((50, 4.0), (60, -100.0)), "frequency_penalty": 0.7},
    {},
    {"reasoning_limit": LIMIT},
    {"reasoning_limit": LIMIT, "temperature": 1.0, "logprobs": 2},
)


def logprobs(listener: Listener) -> list[TokenLogprobs]:
    return [each for event in listener.events if isinstance(event, Tokens) for each in event.logprobs]


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
def test_every_kind_of_reply_is_the_same_alone_and_beside_all_others(driver: Driver) -> None:
    """LESSONS 2, 15: no row takes another's constraint, penalty, key or numbers."""
    prompts = [tokens_of(40 + 30 * number, seed=number) for number in range(len(KINDS))]

    def ask(number: int) -> Listener:
        return driver.submit(prompts[number], seed=number, **KINDS[number])

    alone = []
    for number in range(len(KINDS)):
        listener = ask(number)
        alone.append((driver.reply(listener.end()), logprobs(listener)))
    together = [ask(number) for number in range(len(KINDS))]
    assert [(driver.reply(listener.end()), logprobs(listener)) for listener in together] == alone
    json.loads(together[0].end().text)
    assert together[1].end().text.endswith(" end")
    assert len(logprobs(together[1])) == together[1].end().completion_tokens
    for limited in together[-2:]:
        assert driver.reply(limited.end())[3:6] == LIMIT.spaced_closing


def test_log_probabilities_are_those_of_the_models_logits(model_dir: Path, tmp_path: Path) -> None:
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20, policy=PolicyRequest(Rung.FP))
    try:
        driver, prompt = Driver(engine), tokens_of(50, seed=3)
        listener = driver.submit(prompt, temperature=1.0, seed=9, max_tokens=12, logprobs=20)
        reply = driver.reply(listener.end())
    finally:
        engine.close()
    told = logprobs(listener)
    logits = load(model_dir, None).model(mx.array([[*prompt, *reply]]))[0, len(prompt) - 1 :]
    expected = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    mx.synchronize()
    for token, each, row in zip(reply, told, expected, strict=False):
        # KV is stored in 16 bits, and these weights are sharpened.
        assert each.logprob == pytest.approx(row[token], abs=0.05)
        assert dict(each.top) == pytest.approx({top: row[top] for top, _ in each.top}, abs=0.05)
        assert each.top[0][1] >= sorted(row)[-1] - 0.05
    assert len(told) == 12


def test_logits_that_are_no_numbers_end_their_turn_as_internal_and_no_other(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an endless loop of one token, and not the neighbours' end."""
    well = driver.turn(tokens_of(30, seed=1), max_tokens=20)

    def spoiled(samplers: Any, logits: mx.array) -> Any:
        bad = [math.nan if sampler is not None and sampler._params.seed == 666 else 0.0 for sampler in samplers]
        count = len(samplers)
        return Draws(samplers, logits[:count] + mx.array(bad)[:, None])

    monkeypatch.setattr(prefilling, "Draws", spoiled)
    broken = driver.submit(tokens_of(40, seed=2), seed=666, max_tokens=500)
    beside = driver.submit(tokens_of(30, seed=1), max_tokens=20)
    with pytest.raises(Internal) as failed:
        broken.end()
    assert failed.value.reason == "LOGITS_NOT_FINITE"
    assert driver.reply(beside.end()) == driver.reply(well)


def test_a_request_builds_no_detokenizer_and_no_tokenizer(
    engine: Engine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost tens of milliseconds, and are built once per model (LESSONS 26)."""
    driver.turn(tokens_of(10), constraint=WORDS)
    built: list[str] = []

    def counted(name: str) -> Any:
        return lambda *_args, **_how: built.append(name)

    monkeypatch.setattr(TokenText, "of_tokenizer", counted("detokenizer"))
    monkeypatch.setattr("inference_svc.formats.grammars.from_tokenizer", counted("tokenizer"))
    monkeypatch.setattr("inference_svc.formats.grammars.LLMatcher", counted("grammar"))
    text = engine.token_text
    for number in range(20):
        assert driver.turn(tokens_of(10, seed=number), constraint=WORDS, max_tokens=2).text
    assert built == []
    assert engine.token_text is text
