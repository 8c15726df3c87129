"""mlx-lm's own batching, to be measured beside ours: its unmodified BatchGenerator and KV caches."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache

from inference_svc.model.loading import COMPUTE_TYPES, find_model
from kvasir_bench.engine.link_rates import LetterWorker


class MlxLmPeer(LetterWorker):
    """A model as mlx-lm loads and runs it: none of our products are in it."""

    def __init__(self, model: str | Path, compute_type: str, clock: Callable[[], float]) -> None:
        self._model: Any = mlx_lm.utils.load_model(find_model(model), lazy=True)[0]
        self._model.set_dtype(COMPUTE_TYPES[compute_type])
        mx.eval(self._model.parameters())
        self._clock = clock
        self._caches: list[list[KVCache]] = []  # of prompts without their last tokens

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, keeps: bool = False, goes_on: bool = False
    ) -> list[list[float]]:
        """The times of each prompt's tokens behind that of the start. All are one batch, where mlx-lm is fastest.
        `keeps`: the prompts' KV, if it can be cut; `goes_on`: behind the kept KV of the same prompts.
        """
        known = (goes_on and self._caches) or None
        ends: dict[int, list[Any]] = {}
        started = self._clock()
        generator: Any = BatchGenerator(
            self._model,
            max_tokens=max_tokens,
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        try:
            uids = generator.insert([list(prompt[-1:] if known else prompt) for prompt in prompts], caches=known)
            times: dict[int, list[float]] = {uid: [started] for uid in uids}
            open_rows = set(uids)
            while open_rows:
                _, responses = generator.next()
                now = self._clock()
                for response in responses:
                    times[response.uid].append(now)
                    if response.finish_reason is not None:
                        open_rows.discard(response.uid)
                        ends[response.uid] = response.prompt_cache
        finally:
            generator.close()
        if not known:
            self._caches = _cut([ends[uid] for uid in uids], [len(prompt) - 1 for prompt in prompts]) if keeps else []
        mx.clear_cache()
        return [times[uid] for uid in uids]

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from an empty cache to the first token, as `stream_generate` computes it."""
        began = self._clock()
        next(generate_step(mx.array(list(prompt)), self._model, max_tokens=1))
        seconds = self._clock() - began
        mx.clear_cache()
        return seconds

    def remember(self, prompt: Sequence[int], chunk_tokens: int) -> int:
        """Compute a prompt into mlx-lm's own caches, a chunk at a time; returns their bytes while they live."""
        caches = make_prompt_cache(self._model)
        for start in range(0, len(prompt), chunk_tokens):
            self._model(mx.array([prompt[start : start + chunk_tokens]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            mx.clear_cache()
        return int(mx.get_active_memory())


def _cut(caches: list[list[Any]], tokens: Sequence[int]) -> list[list[KVCache]]:
    """The caches of sequences, with so many tokens each; none where one cannot be cut."""
    if not all(type(layer) is KVCache for cache in caches for layer in cache):
        return []
    for cache, count in zip(caches, tokens, strict=True):
        for layer in cache:
            layer.trim(layer.size() - count)
    mx.eval([layer.state for cache in caches for layer in cache])
    return caches
