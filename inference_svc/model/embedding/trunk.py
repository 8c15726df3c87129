"""A model of mlx-lm that only makes embeddings: its trunk, over mlx-lm's own caches, in cells."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from inference_svc.model.embedding.encoder import not_loadable
from inference_svc.model.loading import load

_CELL_TOKENS = 256


class Trunk:
    def __init__(self, directory: Path) -> None:
        loaded = load(directory, None)
        self._model: Any = loaded.model
        if not isinstance(getattr(self._model, "model", None), Module):
            raise not_loadable("its hidden rows cannot be had: it is no trunk with a head")
        self.most_tokens = loaded.context_tokens
        self.width = int(next(self.rows([0])).shape[-1])

    def rows(self, token_ids: Sequence[int]) -> Iterator[mx.array]:
        """The last hidden rows [tokens, width], cell by cell."""
        caches = make_prompt_cache(self._model)
        for begin in range(0, len(token_ids), _CELL_TOKENS):
            cell = mx.array([token_ids[begin : begin + _CELL_TOKENS]], dtype=mx.uint32)
            rows = self._model.model(cell, cache=caches)[0]
            mx.eval(rows)
            yield rows
