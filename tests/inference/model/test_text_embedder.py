"""The model that only embeds: its encoder is numpy's, its files are read as sentence-transformers means them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvasir.errors import Cancelled, FailedPrecondition, Internal, InvalidArgument, ResourceExhausted
from safetensors.numpy import load_file, save_file

from inference_svc.model.embedding.pooling import Embedded, Pooling
from inference_svc.model.embedding.text_embedder import TextEmbedder
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.made_models.tiny_encoder import MOST_TOKENS, WIDTH, reference_rows, write_encoder

TOKENS = {"the dog sleeps": [2, 4, 5, 7, 3], "Rex runs": [2, 9, 8, 3], "the cat": [2, 4, 6, 3]}


def embed(embedder: TextEmbedder, text: Any, *, truncate: bool = False) -> Embedded:
    return embedder.embed(text, "inputs[0]", truncate=truncate, is_cancelled=lambda: False)


def of_length_one(row: np.ndarray) -> np.ndarray:
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_an_encoder_embeds_as_numpy_does_whoever_else_is_embedded(tmp_path: Path, pooling: str) -> None:
    directory = write_encoder(tmp_path / "encoder", pooling)
    embedder = TextEmbedder(str(directory), Pooling.LAST)
    alone = {text: embed(embedder, text) for text in TOKENS}
    for text, ids in TOKENS.items():
        rows = reference_rows(directory, ids)
        wanted = of_length_one(rows.mean(0) if pooling == "mean_tokens" else rows[0])
        assert np.allclose(alone[text].vector, wanted, atol=1e-5)
        assert alone[text] == embed(embedder, text) == embed(embedder, ids)
        assert alone[text].tokens == len(ids)
    assert embedder.width == WIDTH


def test_a_longer_text_than_the_model_takes_is_refused_or_cut_before_its_last_special_token(tmp_path: Path) -> None:
    embedder = TextEmbedder(str(write_encoder(tmp_path / "encoder")), Pooling.MEAN)
    long = "the dog " * MOST_TOKENS
    with pytest.raises(ResourceExhausted) as refused:
        embed(embedder, long)
    assert (refused.value.reason, refused.value.field) == ("CONTEXT_EXCEEDED", "inputs[0]")
    whole = "the dog " * ((MOST_TOKENS - 2) // 2)
    assert embed(embedder, long, truncate=True) == embed(embedder, whole)
    with pytest.raises(InvalidArgument, match=r"inputs\[0\]: expected tokens below"):
        embed(embedder, [2, 999, 3])


def test_a_text_whose_rows_are_no_numbers_is_refused_and_no_other(tmp_path: Path) -> None:
    file = write_encoder(tmp_path / "encoder") / "model.safetensors"
    weights = load_file(file)
    weights["embeddings.word_embeddings.weight"][TOKENS["Rex runs"][1]] = np.inf
    save_file(weights, file)
    embedder = TextEmbedder(str(file.parent), Pooling.MEAN)
    with pytest.raises(Internal) as refused:
        embed(embedder, "Rex runs")
    assert refused.value.reason == "LOGITS_NOT_FINITE"
    assert np.isfinite(embed(embedder, "the cat").vector).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense", "path": "3_Dense"}]),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}),
        ("config.json", {"model_type": "bert", "hidden_act": "swish"}),
        ("config.json", "{"),
        ("tokenizer.json", {}),
        ("model.safetensors", "none"),
    ],
)
def test_a_model_that_is_not_understood_is_refused(tmp_path: Path, name: str, change: Any) -> None:
    directory = write_encoder(tmp_path / "encoder")
    (directory / name).write_text(change if isinstance(change, str) else json.dumps(change))
    with pytest.raises(FailedPrecondition) as refused:
        TextEmbedder(str(directory), Pooling.MEAN)
    assert refused.value.reason == "MODEL_NOT_LOADABLE"


@pytest.mark.long(2)
@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.LAST])
def test_a_model_of_mlx_lm_embeds_too_in_cells_that_can_be_left(tmp_path: Path, pooling: Pooling) -> None:
    embedder = TextEmbedder(str(write_model(tmp_path / "llama", LLAMA)), pooling)
    ids = [3 + number % 900 for number in range(700)]
    assert embedder.width == LLAMA["hidden_size"]
    assert embed(embedder, ids) == embed(embedder, ids) != embed(embedder, ids[:-1])
    asked: list[bool] = []

    def is_left() -> bool:
        asked.append(True)
        return len(asked) == 2

    with pytest.raises(Cancelled):
        embedder.embed(ids, "inputs[0]", truncate=False, is_cancelled=is_left)
    assert len(asked) == 2
