"""The reference of WeDLM's decoding is right: it computes what mlx-lm's own model computes of tokens in their order."""

import dataclasses
import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import FailedPrecondition

from inference_svc.engine.wedlm.mask_draws import _entropies
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.model.wedlm import MaskWindow
from tests.inference.engine.driving import tokens_of
from tests.inference.engine.wedlm.reference import Reference
from tests.inference.engine.wedlm.tiny_wedlm import MASK, WEDLM, plain_model, write_wedlm

FP = policy_of(Rung.FP, "float16")
_NEAR = 0.02  # of logits up to 40: committed rows are stored in 16 bits


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = write_wedlm(tmp_path_factory.mktemp("wedlm"))
    window = MaskWindow.of_config(json.loads((directory / "config.json").read_text()))
    assert window == MaskWindow(MASK, 8, 0.8, 0.01)
    return Reference(plain_model(directory), window, FP)


@pytest.fixture
def fresh(reference: Reference) -> Reference:
    return dataclasses.replace(reference, keys=[], values=[], passes=0, processed=0)


class Seen:
    """All rows of one pass, in their logical order, each of which sees those that `mask` says."""

    offset = 0

    def __init__(self, mask: mx.array) -> None:
        self._mask = mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> mx.array:
        return self._mask


def expected(reference: Reference, tokens: list[int], order: list[int]) -> mx.array:
    """Logits by place of mlx-lm's model, if a place sees those that come before it in `order`, and itself."""
    rank = mx.array([order.index(place) for place in range(len(order))])
    mask = rank[None] <= rank[:, None]
    logits: mx.array = reference.model(mx.array([tokens]), cache=[Seen(mask) for _ in reference.model.layers])
    return logits[0]


def test_a_window_of_masks_sees_the_committed_tokens_and_the_masks_before_it(fresh: Reference) -> None:
    prompt, window = tokens_of(30, 1), [MASK] * 8
    fresh.extend(prompt)
    tokens = [*prompt, *window]
    whole = expected(fresh, tokens, list(range(len(tokens))))
    assert mx.abs(fresh.decode_window(window) - whole[30:]).max().item() < _NEAR


def test_a_mask_sees_all_observed_tokens_of_its_window_at_their_own_positions(fresh: Reference) -> None:
    prompt = tokens_of(30, 2)
    window, order = [MASK, 77, MASK, MASK, 99, MASK], [1, 4, 0, 2, 3, 5]
    fresh.extend(prompt)
    found = fresh.decode_window_reordered([window[place] for place in order], [30 + place for place in order])
    whole = expected(fresh, [*prompt, *window], [*range(30), *(30 + place for place in order)])
    for row, place in enumerate(order):
        assert mx.abs(found[row] - whole[30 + place]).max().item() < _NEAR
    in_order = fresh.decode_window(window)
    assert mx.abs(in_order[0] - found[2]).max().item() > 1, "a mask that does not see what is observed behind it"


def test_a_reply_has_all_its_tokens_and_a_window_of_one_fills_one_in_each_pass(fresh: Reference) -> None:
    alone = dataclasses.replace(fresh, keys=[], values=[])
    reply, single = fresh.generate(tokens_of(20, 1), 24), alone.generate(tokens_of(20, 1), 24, size=1)
    assert len(reply) == len(single) == 24 == alone.passes
    assert fresh.passes < 24
    assert MASK not in {*reply, *single}
    assert reply != single


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mask_token_id", None),
        ("mask_token_id", True),
        ("mask_token_id", 1024),
        ("mask_token_id", -1),
        ("qk_norm", False),
        ("wedlm_window_size", 3),
        ("wedlm_window_size", 33),
        ("wedlm_window_size", 8.5),
        ("wedlm_entropy_threshold", float("nan")),
        ("wedlm_entropy_threshold", -0.1),
        ("wedlm_pos_penalty_factor", "0.01"),
        ("wedlm_pos_penalty_factor", float("inf")),
        ("wedlm_next_token", 1),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(FailedPrecondition, match=field):
        MaskWindow.of_config({**WEDLM, field: value})


def test_only_a_wedlm_model_has_a_window_of_masks_with_the_usual_defaults() -> None:
    assert MaskWindow.of_config({**WEDLM, "model_type": "qwen3"}) is None
    names = ("model_type", "mask_token_id", "qk_norm", "vocab_size")
    assert MaskWindow.of_config({name: WEDLM[name] for name in names}) == MaskWindow(MASK, 16, 0.3, 0.01)


def test_how_sure_the_model_is_of_a_mask_is_the_entropy_in_nats() -> None:
    """Also of logits that are large, equal, or leave one token alone."""
    logits = np.random.default_rng(1).normal(0, 4, (6, 300))
    logits[1] += 1000
    logits[2], logits[3] = 5, np.where(np.arange(300) == 7, -200, -np.inf)
    logits[4, ::2] = -np.inf
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    expected = -(chances * np.log(np.where(chances > 0, chances, 1))).sum(axis=1)
    np.testing.assert_allclose(np.array(_entropies(mx.array(logits, dtype=mx.float32))), expected, rtol=1e-4, atol=1e-6)
    assert expected[2] == pytest.approx(np.log(300))
