"""An embedding model and its tokenizer, from a directory in mlx-lm's or sentence-transformers' layout."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from kvasir.errors import Cancelled, InvalidArgument, ResourceExhausted
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

from inference_svc.model.embedding.encoder import ENCODERS, Encoder, not_loadable
from inference_svc.model.embedding.hidden_rows import HiddenRows
from inference_svc.model.embedding.pooling import Embedded, Pooling
from inference_svc.model.loading import find_model, load

_POOLINGS = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_cls_token": Pooling.FIRST,
}


@dataclass(frozen=True, slots=True)
class SentenceLayout:
    """`most_tokens` None: as many as the model has positions."""

    pooling: Pooling
    most_tokens: int | None = None


def read_layout(directory: Path, default: Pooling) -> SentenceLayout:
    """`default`: of a directory that names no pooling. Raises FailedPrecondition (MODEL_NOT_LOADABLE)."""
    pooling = default
    for module in _json(directory / "modules.json") or ():
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_json(directory / str(module.get("path", "")) / "config.json") or {})
        elif kind not in ("Transformer", "Normalize"):
            raise not_loadable(f"modules.json: {kind!r} is not offered")
    said = _json(directory / "sentence_bert_config.json") or {}
    return SentenceLayout(pooling, said.get("max_seq_length"))


def _pooling(said: dict[str, Any]) -> Pooling:
    asked = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
    if len(asked) != 1 or asked[0] not in _POOLINGS:
        raise not_loadable(f"pooling: expected one of {', '.join(_POOLINGS)}, got {asked}")
    return _POOLINGS[asked[0]]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise not_loadable(f"{path.name}: {error}") from error


_CELL_TOKENS = 256


class Trunk:
    def __init__(self, directory: Path) -> None:
        loaded = load(directory, None, decodes=False)
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


class HiddenModel(Protocol):
    width: int
    most_tokens: int

    def rows(self, token_ids: Sequence[int]) -> Iterator[mx.array]:
        """The last hidden rows [tokens, width], part by part."""


class TextEmbedder:
    """On the MLX thread that made it."""

    def __init__(self, model: str, default: Pooling) -> None:
        """`model`: a directory or a repository. Raises NotFound, FailedPrecondition (MODEL_NOT_LOADABLE)."""
        directory = find_model(model)
        layout = read_layout(directory, default)
        self._model = _model(directory)
        self._tokenizer = _tokenizer(directory)
        self._pooling = layout.pooling
        self.width = self._model.width
        self.most_tokens = min(layout.most_tokens or self._model.most_tokens, self._model.most_tokens)
        self.vocabulary_size = self._tokenizer.get_vocab_size()

    def embed(
        self, given: str | Sequence[int], field: str, *, truncate: bool, is_cancelled: Callable[[], bool]
    ) -> Embedded:
        """Evaluates. Raises InvalidArgument, ResourceExhausted (CONTEXT_EXCEEDED), and Cancelled between two parts."""
        ids = self._ids(given, field, truncate=truncate)
        hidden = HiddenRows(self._pooling)
        for rows in self._model.rows(ids):
            if is_cancelled():
                raise Cancelled("the caller is gone")
            hidden.add(rows)
        return Embedded(hidden.vector, len(ids))

    def _ids(self, given: str | Sequence[int], field: str, *, truncate: bool) -> Sequence[int]:
        """What spells a special token in a text is one, as the model's own library has it."""
        if isinstance(given, str):
            encoded = self._tokenizer.encode(given)
            ids, ends_special = encoded.ids, encoded.special_tokens_mask[-1:] == [1]
        else:
            ids, ends_special = list(given), False
        if not ids or max(ids) >= self.vocabulary_size:
            raise InvalidArgument.of(field, f"expected tokens below {self.vocabulary_size}, one or more")
        if len(ids) <= self.most_tokens:
            return ids
        if not truncate:
            raise ResourceExhausted.of(
                field,
                f"{len(ids)} tokens are more than the {self.most_tokens} that the embedding model takes",
                reason="CONTEXT_EXCEEDED",
                prompt_tokens=len(ids),
                context_tokens=self.most_tokens,
            )
        # The special token behind a text stays behind what is left of it.
        return [*ids[: self.most_tokens - 1], ids[-1]] if ends_special else ids[: self.most_tokens]


def _model(directory: Path) -> HiddenModel:
    try:
        config: Mapping[str, Any] = json.loads((directory / "config.json").read_text())
        if config.get("model_type") not in ENCODERS:
            return Trunk(directory)
        weights: dict[str, mx.array] = {}
        for path in sorted(directory.glob("*.safetensors")):
            weights |= mx.load(str(path))  # type: ignore[arg-type]  # a file of tensors is a dictionary
        return Encoder(config, weights)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise not_loadable(f"its files cannot be read: {error}") from error


def _tokenizer(directory: Path) -> Tokenizer:
    """The tokens that the model wants around a text come with its own rules."""
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # of this type alone
        raise not_loadable(f"tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
