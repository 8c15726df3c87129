"""A tiny WeDLM model of random weights, whose masks see what stands before them and are sure of some of it.

A mask's own embedding is small, so that a row is what it attends to; logits are large, so that entropies lie on both
sides of the threshold.
"""

import json
from pathlib import Path
from typing import Any

import mlx_lm.utils
from safetensors.numpy import load_file, save_file

from inference_svc.kv.model_hooks.row_exact import make_row_exact
from inference_svc.model.wedlm import layers_config
from tests.inference.engine.tiny_models import QWEN3, VOCABULARY, write_model

MASK = VOCABULARY - 1
WEDLM: dict[str, Any] = {
    **QWEN3,
    "model_type": "wedlm",
    "qk_norm": True,
    "mask_token_id": MASK,
    "wedlm_window_size": 8,
    "wedlm_entropy_threshold": 0.8,
    "eos_token_id": 0,
}
_FAINT, _LOUD = 0.05, 8.0


def write_wedlm(directory: Path, seed: int = 1, **config: Any) -> Path:
    """A directory as published checkpoints are: `config` replaces fields of config.json."""
    write_model(directory, QWEN3, seed)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][MASK] *= _FAINT
    weights["model.norm.weight"] *= _LOUD
    if not config.get("tie_word_embeddings", True):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**WEDLM, **config}))
    return directory


def plain_model(directory: Path) -> Any:
    """The model as mlx-lm has it, with sums that do not depend on the number of rows: for the reference."""
    model, _ = mlx_lm.utils.load_model(
        directory, get_model_classes=lambda config: mlx_lm.utils._get_classes(layers_config(config))
    )
    make_row_exact(model)
    return model
