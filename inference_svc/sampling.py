"""From logits to the next token: greedy, or drawn with a key of the request's own: batch mates change nothing."""

import mlx.core as mx

from inference_svc.plan import SamplingParams

# Below it the next likeliest token has no chance left, and a division by it may leave float32's range.
_LEAST_TEMPERATURE = 1e-4


class Sampler:
    """Draws the tokens of one request. Filters apply to the untempered distribution, in mlx-lm's order: p, min-p, k.

    A temperature below 1e-4 is greedy, as 0 is.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._key = mx.random.key(params.seed)

    def next_token(self, logits: mx.array) -> int:
        """The next token from logits [1, 1, vocabulary]. Evaluates."""
        row = logits[0, -1].astype(mx.float32)
        if self._params.temperature < _LEAST_TEMPERATURE:
            return _index(mx.argmax(row))
        logprobs = _filtered(row - mx.logsumexp(row), self._params)
        self._key, key = mx.random.split(self._key)
        return _index(mx.random.categorical(logprobs / self._params.temperature, key=key))


def _index(array: mx.array) -> int:
    value = array.item()
    assert isinstance(value, int)
    return value


def _filtered(logprobs: mx.array, params: SamplingParams) -> mx.array:
    if params.top_p < 1:
        logprobs = _top_p(logprobs, params.top_p)
    if params.min_p > 0:
        floor = logprobs.max() + mx.log(mx.array(params.min_p))
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    if 0 < params.top_k < logprobs.size:
        floor = mx.topk(logprobs, params.top_k).min()
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    return logprobs


def _top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens until their probabilities reach `top_p`; the one that crosses it stays."""
    ascending = mx.sort(logprobs)
    likelier = mx.cumsum(mx.exp(ascending), reverse=True, inclusive=False)
    dropped = (likelier >= top_p).sum()
    return mx.where(logprobs < ascending[dropped], -mx.inf, logprobs)
