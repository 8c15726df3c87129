"""The draws at the masks of one pass, and how sure the model is of each. One wait for all of them."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from kvasir.errors import KvasirError

from inference_svc.engine.sampling import Drawn, Draws, Sampler


class MaskDraws:
    """`rows`: by sampler, its masks' rows of logits [rows, vocabulary]. The mask's own token is never drawn."""

    def __init__(
        self, samplers: Sequence[Sampler], logits: mx.array, rows: Sequence[Sequence[int]], mask_token_id: int
    ) -> None:
        self._ends = list(accumulate(map(len, rows), initial=0))
        logits = logits[mx.array([row for each in rows for row in each], dtype=mx.int32)].astype(mx.float32)
        logits = without_mask(logits, mask_token_id)
        biased = [
            sampler.biased(logits[begin:end])
            for sampler, (begin, end) in zip(samplers, pairwise(self._ends), strict=True)
        ]
        self._entropies = _entropies(mx.concatenate(biased))
        each_mask = [sampler for sampler, masks in zip(samplers, rows, strict=True) for _ in masks]
        self._draws = Draws(each_mask, logits)
        mx.async_eval(self._entropies)  # type: ignore[no-untyped-call]

    def read(self) -> list[list[tuple[Drawn | KvasirError, float]]]:
        """By sampler, for each of its masks the token, or the row's error, and the entropy in nats. Waits."""
        entropies: Any = self._entropies.tolist()
        found = list(zip(self._draws.read(), entropies, strict=True))
        return [found[begin:end] for begin, end in pairwise(self._ends)]


def without_mask(logits: mx.array, mask_token_id: int) -> mx.array:
    """Logits [rows, vocabulary] by which the mask's own token is never drawn."""
    return mx.where(mx.arange(logits.shape[1]) == mask_token_id, -mx.inf, logits)


def _entropies(logits: mx.array) -> mx.array:
    """Of the distributions [rows] that logits [rows, vocabulary] mean, in nats. By powers of 2: on a CPU, MLX takes
    three times as long for those of e.
    """
    bits = (logits - logits.max(axis=-1, keepdims=True)) * math.log2(math.e)
    weights = mx.power(2.0, bits)
    total = weights.sum(axis=-1)
    return (mx.log2(total) - mx.where(weights > 0, weights * bits, 0).sum(axis=-1) / total) * math.log(2)
