"""Whether a stored cache is one that the server's own models make. The server's thread ends of many others: of other
numbers of heads, of a window without its rows, or quantized by `--kv-bits` where this server batches."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as _cache

mlx_lm_cache: Any = _cache
WITH_ROWS = (mlx_lm_cache.KVCache, mlx_lm_cache.QuantizedKVCache)
_ROWS_AXIS, _AXES = 2, 4  # of keys and values
# The numbers in a cache's state that depend on its tokens; a model's caches have all others alike.
_OF_TOKENS = {
    "KVCache": {"2"},  # offset
    "QuantizedKVCache": {"2"},
    "RotatingKVCache": {"2", "5"},  # offset, the next row
    "ChunkedKVCache": {"2", "4"},  # offset, the first row's token
}

# The class of a cache, and of each part of its state the place, the type, and sizes that do not depend on its tokens.
_Layout = tuple[str, tuple[Any, ...]]


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
        if len(cache) != len(self._layouts):
            return False
        if not all(_layout(each) in known for each, known in zip(cache, self._layouts, strict=True)):
            return False
        return all(_has_rows(part, tokens) for each in cache for part in _parts(each))

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


def offsets(cache: Sequence[Any]) -> set[int]:
    """The numbers of tokens in its parts; some parts have none."""
    parts = [part for each in cache for part in _parts(each)]
    return {part.offset for part in parts if hasattr(part, "offset")}


def _parts(cache: Any) -> list[Any]:
    if isinstance(cache, mlx_lm_cache.CacheList):
        return [part for each in cache.caches for part in _parts(each)]
    return [cache]


def _layout(cache: Any) -> _Layout:
    name = type(cache).__name__
    if isinstance(cache, mlx_lm_cache.CacheList):
        return name, tuple(map(_layout, cache.caches))
    is_whole = isinstance(cache, mlx_lm_cache.ArraysCache)
    leaves: Any = tree_flatten(cache.state)
    parts: list[Any] = []
    for place, leaf in leaves:
        if isinstance(leaf, mx.array):
            parts.append((place, leaf.dtype, _sizes(leaf.shape, is_whole=is_whole)))
        else:
            parts.append((place, type(leaf), None if place in _OF_TOKENS.get(name, ()) else leaf))
    return name, tuple(parts)


def _sizes(shape: Sequence[int], *, is_whole: bool) -> tuple[int, ...]:
    if is_whole or len(shape) != _AXES:
        return tuple(shape)
    return (*shape[:_ROWS_AXIS], *shape[_ROWS_AXIS + 1 :])


def _has_rows(cache: Any, tokens: int) -> bool:
    """Whether a cache of a known layout has the rows that so many tokens leave there."""
    if not hasattr(cache, "offset"):
        return True
    held = {each.shape[_ROWS_AXIS] for each in _arrays((cache.keys, cache.values))}
    if cache.offset != tokens or len(held) != 1:
        return False
    (rows,) = held
    if isinstance(cache, mlx_lm_cache.RotatingKVCache):
        return _has_window(rows, tokens, cache._idx, cache.max_size, cache.keep)
    if isinstance(cache, mlx_lm_cache.ChunkedKVCache):
        own = tokens - cache.start_position
        return bool(min(tokens, cache.chunk_size) <= own <= min(tokens, rows))
    return bool(rows >= tokens)


def _has_window(rows: int, tokens: int, next_row: int, size: int, keep: int) -> bool:
    """Rows lie in the order of the tokens up to the next row, or, once the window is full, around it."""
    if next_row == rows:
        return min(tokens, size) <= rows <= tokens
    if tokens < size:
        return next_row == tokens < rows
    return keep < next_row < rows == size


def _arrays(state: Any) -> list[mx.array]:
    leaves: Any = tree_flatten(state)
    return [each for _, each in leaves if isinstance(each, mx.array)]
