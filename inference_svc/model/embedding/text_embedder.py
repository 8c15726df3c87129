"""An embedding model and its tokenizer, from a directory in mlx-lm's or sentence-transformers' layout."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from kvasir.errors import Cancelled, InvalidArgument, ResourceExhausted
from tokenizers import Tokenizer

from inference_svc.model.embedding.encoder import ENCODERS, Encoder, not_loadable
from inference_svc.model.embedding.hidden_rows import HiddenRows
from inference_svc.model.embedding.layout import read_layout
from inference_svc.model.embedding.pooling import Embedded, Pooling
from inference_svc.model.embedding.trunk import Trunk
from inference_svc.model.loading import find_model


class HiddenModel(Protocol):
    """A model whose hidden rows can be had."""

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
            raise InvalidArgument(f"{field}: expected tokens below {self.vocabulary_size}, one or more", field=field)
        if len(ids) <= self.most_tokens:
            return ids
        if not truncate:
            raise ResourceExhausted(
                f"{field}: {len(ids)} tokens are more than the {self.most_tokens} that the embedding model takes",
                reason="CONTEXT_EXCEEDED",
                field=field,
                metadata={"prompt_tokens": str(len(ids)), "context_tokens": str(self.most_tokens)},
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
