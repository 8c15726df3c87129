"""The next token from logits, where float32 ends."""

import mlx.core as mx
import pytest

from inference_svc.plan import SamplingParams
from inference_svc.sampling import Sampler


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-40, 1e-30, 1e-5, 1e-4])
def test_next_to_no_heat_is_greedy(temperature: float) -> None:
    logits = mx.array([[[-3.0, 1.0, 4.0, 3.5]]])
    sampler = Sampler(SamplingParams(5, temperature=temperature, seed=1))
    assert [sampler.next_token(logits) for _ in range(5)] == [2] * 5


def test_heat_draws_other_tokens_too() -> None:
    sampler = Sampler(SamplingParams(5, temperature=1.0, seed=1))
    assert {sampler.next_token(mx.array([[[0.0, 0.0, 0.0]]])) for _ in range(50)} == {0, 1, 2}
