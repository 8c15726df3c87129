"""An encoder of BERT's kind, one text a pass without padding: a text's rows do not depend on its neighbours."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
from kvasir.errors import FailedPrecondition
from mlx.nn.layers import activations

_ACTIVATIONS: Mapping[str, Any] = {
    "gelu": activations.gelu,
    "gelu_new": activations.gelu_approx,
    "gelu_pytorch_tanh": activations.gelu_approx,
    "relu": activations.relu,
}
# By the model's type: the prefix of its weights' names, and whether positions begin behind the padding's.
ENCODERS = {"bert": ("bert.", False), "roberta": ("roberta.", True), "xlm-roberta": ("roberta.", True)}


class Encoder:
    """On the MLX thread. Computes in 32 bits."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
        """`config`, `weights`: those of Hugging Face's file formats. Raises FailedPrecondition (MODEL_NOT_LOADABLE)."""
        kind, activation = config.get("model_type"), config.get("hidden_act", "gelu")
        if kind not in ENCODERS or activation not in _ACTIVATIONS:
            raise not_loadable(f"expected an encoder of {', '.join(ENCODERS)}, got {kind!r} with {activation!r}")
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise not_loadable("expected absolute positions")
        prefix, is_behind_padding = ENCODERS[kind]
        self._weights = {name.removeprefix(prefix): value.astype(mx.float32) for name, value in weights.items()}
        self._act = _ACTIVATIONS[activation]
        self._eps = float(config.get("layer_norm_eps", 1e-12))
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._first_position = int(config.get("pad_token_id", 1)) + 1 if is_behind_padding else 0
        self.width = int(config["hidden_size"])
        self.most_tokens = int(config["max_position_embeddings"]) - self._first_position
        self._check()
        mx.eval(list(self._weights.values()))

    def rows(self, token_ids: Sequence[int]) -> Iterator[mx.array]:
        """The last hidden rows [tokens, width] of a whole text at once, not evaluated."""
        yield self._rows(token_ids)

    def _rows(self, token_ids: Sequence[int]) -> mx.array:
        words = self._weights["embeddings.word_embeddings.weight"][mx.array(list(token_ids), dtype=mx.uint32)]
        begin = self._first_position
        places = self._weights["embeddings.position_embeddings.weight"][begin : begin + len(token_ids)]
        rows = words + places + self._weights["embeddings.token_type_embeddings.weight"][0]
        rows = self._normed(rows, "embeddings.LayerNorm")
        for number in range(self._layers):
            at = f"encoder.layer.{number}"
            attended = self._linear(self._attended(rows, f"{at}.attention.self"), f"{at}.attention.output.dense")
            rows = self._normed(rows + attended, f"{at}.attention.output.LayerNorm")
            inner = self._act(self._linear(rows, f"{at}.intermediate.dense"))
            rows = self._normed(rows + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        return rows

    def _attended(self, rows: mx.array, at: str) -> mx.array:
        queries, keys, values = (
            self._by_head(self._linear(rows, f"{at}.{name}")) for name in ("query", "key", "value")
        )
        scale = (self.width // self._heads) ** -0.5
        found: mx.array = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)
        return found.transpose(0, 2, 1, 3).reshape(rows.shape)

    def _by_head(self, rows: mx.array) -> mx.array:
        return rows.reshape(1, rows.shape[0], self._heads, -1).transpose(0, 2, 1, 3)

    def _linear(self, rows: mx.array, at: str) -> mx.array:
        return rows @ self._weights[f"{at}.weight"].T + self._weights[f"{at}.bias"]

    def _normed(self, rows: mx.array, at: str) -> mx.array:
        normed: mx.array = mx.fast.layer_norm(
            rows, self._weights[f"{at}.weight"], self._weights[f"{at}.bias"], self._eps
        )
        return normed

    def _check(self) -> None:
        """Try it with one token: names and shapes of weights are a file's."""
        try:
            mx.eval(self._rows([0]))
        except (KeyError, ValueError, IndexError) as error:
            raise not_loadable(f"its weights are not those of its configuration: {error}") from error


def not_loadable(why: str) -> FailedPrecondition:
    return FailedPrecondition(f"embedding model: {why}", reason="MODEL_NOT_LOADABLE")
