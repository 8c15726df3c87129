"""Whether a stored cache is one that the server's own models make. The server's thread ends of any other: one whose
numbers of heads differ, or that `--kv-bits` quantized where this server batches."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as _cache

mlx_lm_cache: Any = _cache
WITH_ROWS = (mlx_lm_cache.KVCache, mlx_lm_cache.QuantizedKVCache)
_ROWS_AXIS, _AXES = 2, 4  # of keys and values

# The class of a cache, and of each array the type and the sizes that do not depend on its number of tokens.
_Layout = tuple[str, tuple[tuple[Any, tuple[int, ...]], ...]]


class Fitting:
    """Of the models that mlx-lm's `provider` has loaded. Used on the thread that generates, as the models are."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._key: Any = None
        self._layouts: Sequence[set[_Layout]] = ()

    def __call__(self, key: Any, cache: Sequence[Any], tokens: int) -> bool:
        """Whether the models of this key may go on with a cache of so many tokens."""
        if key != self._provider.model_key:
            return False
        if key != self._key:
            self._layouts, self._key = self._of_models(), key
        if len(cache) != len(self._layouts) or not all(_has_rows(each, tokens) for each in cache):
            return False
        return all(_layout(each) in known for each, known in zip(cache, self._layouts, strict=True))

    def _of_models(self) -> list[set[_Layout]]:
        """For each cache those that are taken, found by one token."""
        found = []
        bits, group_size = (getattr(self._provider.cli_args, name, None) for name in ("kv_bits", "kv_group_size"))
        for model in (self._provider.model, self._provider.draft_model):
            made = mlx_lm_cache.make_prompt_cache(model) if model is not None else []
            if made:
                mx.eval(model(mx.array([[0]]), cache=made))
            for each in made:
                found.append({_layout(each)})
                if bits and isinstance(each, mlx_lm_cache.KVCache):
                    found[-1].add(_layout(each.to_quantized(group_size=group_size, bits=bits)))
        return found


def _layout(cache: Any) -> _Layout:
    arrays = _arrays(cache.state)
    is_whole = isinstance(cache, mlx_lm_cache.ArraysCache)
    return type(cache).__name__, tuple((each.dtype, _sizes(each.shape, is_whole=is_whole)) for each in arrays)


def _sizes(shape: Sequence[int], *, is_whole: bool) -> tuple[int, ...]:
    if is_whole or len(shape) != _AXES:
        return tuple(shape)
    return (*shape[:_ROWS_AXIS], *shape[_ROWS_AXIS + 1 :])


def _has_rows(cache: Any, tokens: int) -> bool:
    if not isinstance(cache, WITH_ROWS):
        return True
    arrays = _arrays((cache.keys, cache.values))
    return bool(cache.offset == tokens and all(each.shape[_ROWS_AXIS] >= tokens for each in arrays))


def _arrays(state: Any) -> list[mx.array]:
    leaves: Any = tree_flatten(state)
    return [each for _, each in leaves if isinstance(each, mx.array)]
