"""A directory in sentence-transformers' layout: a random encoder of two layers, and what numpy says of its texts."""

import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WIDTH, HEADS, LAYERS, INNER, MOST_TOKENS = 32, 4, 2, 48, 24
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "dog", "cat", "sleeps", "runs", "Rex")
_CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "vocab_size": len(_WORDS),
}
_erf = np.vectorize(math.erf)
Rows = NDArray[np.float64]


def write_encoder(directory: Path, pooling: str = "mean_tokens") -> Path:
    """`pooling`: as 1_Pooling/config.json names it."""
    (directory / "1_Pooling").mkdir(parents=True)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize")))
    ]
    said = {f"pooling_mode_{name}": name == pooling for name in ("mean_tokens", "cls_token", "max_tokens")}
    for name, value in (
        ("config.json", _CONFIG),
        ("modules.json", modules),
        ("1_Pooling/config.json", said),
        ("sentence_bert_config.json", {"max_seq_length": MOST_TOKENS}),
    ):
        (directory / name).write_text(json.dumps(value))
    save_file(_weights(np.random.default_rng(7)), directory / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.enable_truncation(4)  # as published ones have it; nobody wants a cut text unasked
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def reference_rows(directory: Path, token_ids: list[int]) -> Rows:
    """The last hidden rows, by numpy, in 64 bits."""
    weights = {name: value.astype(np.float64) for name, value in load_file(directory / "model.safetensors").items()}

    def linear(rows: Rows, at: str) -> Rows:
        return rows @ weights[f"{at}.weight"].T + weights[f"{at}.bias"]

    def normed(rows: Rows, at: str) -> Rows:
        centred = rows - rows.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * weights[f"{at}.weight"] + weights[f"{at}.bias"]

    def attended(rows: Rows, at: str) -> Rows:
        heads = [linear(rows, f"{at}.{name}").reshape(-1, HEADS, WIDTH // HEADS) for name in ("query", "key", "value")]
        queries, keys, values = (each.transpose(1, 0, 2) for each in heads)
        scores = np.exp(queries @ keys.transpose(0, 2, 1) / math.sqrt(WIDTH // HEADS))
        return ((scores / scores.sum(-1, keepdims=True)) @ values).transpose(1, 0, 2).reshape(rows.shape)

    words, places, kinds = (
        weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    rows = normed(words[token_ids] + places[: len(token_ids)] + kinds[0], "embeddings.LayerNorm")
    for number in range(LAYERS):
        at = f"encoder.layer.{number}"
        seen = linear(attended(rows, f"{at}.attention.self"), f"{at}.attention.output.dense")
        rows = normed(rows + seen, f"{at}.attention.output.LayerNorm")
        inner = linear(rows, f"{at}.intermediate.dense")
        inner = inner * (1 + _erf(inner / math.sqrt(2))) / 2
        rows = normed(rows + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return rows


def _weights(rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    shapes = {
        "embeddings.word_embeddings.weight": (len(_WORDS), WIDTH),
        "embeddings.position_embeddings.weight": (64, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(LAYERS):
        at = f"encoder.layer.{number}"
        linears = {f"attention.self.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")}
        linears |= {"attention.output.dense": (WIDTH, WIDTH), "intermediate.dense": (INNER, WIDTH)}
        linears |= {"output.dense": (WIDTH, INNER)}
        for name, shape in linears.items():
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}  # type: ignore[dict-item]
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.{part}": (WIDTH,) for part in ("weight", "bias")}  # type: ignore[dict-item]
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
