"""A text's embedding is its hidden rows' alone: whoever runs beside it, whatever is remembered."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import Cancelled, FailedPrecondition, Internal
from safetensors.numpy import load_file

from inference_svc.engine.api import Prefilled, SamplingParams, Started, Tokens, TurnPlan
from inference_svc.engine.engine import Engine
from inference_svc.model.embedding.pooling import Pooling, shortened
from inference_svc.model.model_runner import ModelRunner
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.engine.driving import Driver, Listener, tokens_of

LENGTHS = (1, 3, 255, 256, 257, 600)


def begin(
    engine: Engine, tokens: Sequence[int], pooling: Pooling = Pooling.MEAN, listener: Listener | None = None
) -> Listener:
    listener = listener or Listener()
    plan = TurnPlan(
        TokenIds(tokens),
        TokenChars((1,) * len(tokens)),
        SamplingParams(max_tokens=0),
        namespace="tests",
        pooling=pooling,
    )
    listener.handle.set_result(engine.submit(plan, listener))
    return listener


def embedded(engine: Engine, tokens: Sequence[int], pooling: Pooling = Pooling.MEAN) -> tuple[float, ...]:
    return begin(engine, tokens, pooling).end().embedding


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.LAST])
def test_an_embedding_beside_others_and_beside_streams_is_the_one_alone(
    driver: Driver, engine: Engine, pooling: Pooling
) -> None:
    texts = [tokens_of(length, 900 + length) for length in LENGTHS]
    alone = [embedded(engine, text, pooling) for text in texts]
    speaking = [driver.submit(tokens_of(40, seed), key=driver.key(), max_tokens=60) for seed in range(3)]
    for listener in speaking:
        listener.wait_for(Tokens)
    beside = [begin(engine, text, pooling) for text in texts]
    assert [listener.end().embedding for listener in beside] == alone
    for listener in speaking:
        listener.end()
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in alone)
    assert len(set(alone)) == len(alone)


def test_rows_that_are_no_numbers_end_their_text_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    well, whole = embedded(engine, tokens_of(30, 5)), ModelRunner._forward_trunk

    def spoiled(runner: ModelRunner, tokens: mx.array, caches: Sequence[object]) -> mx.array:
        rows = whole(runner, tokens, caches)
        return rows * math.nan if tokens.shape[1] == 31 else rows

    monkeypatch.setattr(ModelRunner, "_forward_trunk", spoiled)
    with pytest.raises(Internal) as failed:
        embedded(engine, tokens_of(31, 5))
    assert failed.value.reason == "LOGITS_NOT_FINITE"
    assert embedded(engine, tokens_of(30, 5)) == well


def test_the_last_row_is_the_one_that_the_head_gets(driver: Driver, engine: Engine) -> None:
    """Log probabilities of the next token are the row's products with the head's, but for a factor and a constant."""
    tokens = tokens_of(300, 7)
    ended = Listener()
    driver.submit(tokens, listener=ended, max_tokens=1, logprobs=20)
    ended.end()
    [top] = [event.logprobs[0].top for event in ended.events if isinstance(event, Tokens) and event.logprobs]
    head = load_file(engine.directory / "model.safetensors")["model.embed_tokens.weight"]
    products = head[[token for token, _ in top]] @ np.array(embedded(engine, tokens, Pooling.LAST))
    wanted = np.array([logprob for _, logprob in top])
    factor, constant = np.polyfit(products, wanted, 1)
    assert factor > 0
    assert np.allclose(factor * products + constant, wanted, atol=1e-3)


def test_the_mean_counts_every_row_alike(engine: Engine) -> None:
    """Every row has one length here: the norm before the head has weights of one."""
    tokens = tokens_of(5, 8)
    rows = [embedded(engine, tokens[:count], Pooling.LAST) for count in range(1, 6)]
    mean = np.mean(rows, axis=0)
    assert np.allclose(embedded(engine, tokens), mean / np.linalg.norm(mean), atol=1e-4)


@pytest.mark.cells_of_a_block
def test_a_mean_goes_on_over_the_edge_of_a_cell(engine: Engine) -> None:
    """One row more adds this row, and keeps the sum of those before it."""
    tokens = tokens_of(257, 12)
    before, last, mean = (
        embedded(engine, tokens[:256]),
        embedded(engine, tokens, Pooling.LAST),
        embedded(engine, tokens),
    )
    parts, residual, *_ = np.linalg.lstsq(np.array([before, last]).T, np.array(mean), rcond=None)
    assert residual < 1e-6
    assert parts[0] > parts[1] > 0


def test_an_embedding_shares_no_kv_with_turns(driver: Driver, engine: Engine) -> None:
    """All rows are needed, and what an embedding computed is nobody's memory."""
    tokens = tokens_of(700, 9)
    before = embedded(engine, tokens)
    listener = Listener()
    driver.submit(tokens, key=driver.key(), namespace="tests", listener=listener, max_tokens=4)
    listener.end()
    assert [event.cached_tokens for event in listener.events if isinstance(event, Started)] == [0]
    again = begin(engine, tokens)
    assert again.end().embedding == before
    assert [event.cached_tokens for event in again.events if isinstance(event, Started)] == [0]


@pytest.mark.cells_of_a_block
def test_a_cancelled_embedding_ends_between_two_cells(engine: Engine) -> None:
    leaving = begin(engine, tokens_of(3000, 10), listener=Listener().cancel_at(Prefilled, 2))
    with pytest.raises(Cancelled):
        leaving.end()
    assert leaving.count(Prefilled) < 6


@pytest.mark.long(4)
@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_models_with_windows_and_states_have_embeddings(family: Callable[[str], Driver], name: str) -> None:
    engine = family(name).engine
    text = tokens_of(600, 11)
    assert embedded(engine, text) == embedded(engine, text)


def test_a_model_whose_rows_cannot_be_had_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "model", replace(engine.model, embedding_width=0))
    with pytest.raises(FailedPrecondition) as refused:
        begin(engine, tokens_of(3, 1))
    assert refused.value.reason == "NO_EMBEDDINGS"


def test_fewer_dimensions_are_the_first_ones_of_length_one() -> None:
    assert shortened((0.6, 0.0, 0.8), 3) == (0.6, 0.0, 0.8)
    assert shortened((0.6, 0.0, 0.8), 2) == (1.0, 0.0)
    assert shortened((0.0, 1.0), 1) == (0.0,)
