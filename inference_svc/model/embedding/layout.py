"""What the files of a sentence-transformers model say beside its weights: pooling, and how many tokens it takes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.model.embedding.encoder import not_loadable
from inference_svc.model.embedding.pooling import Pooling

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
