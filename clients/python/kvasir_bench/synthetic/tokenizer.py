"""The tokenizer of a synthetic model: kvasir-tiny's, with a spelling for every token id of a larger vocabulary."""

import json
import shutil
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument

from inference_svc.model import kvasir_tiny

_TEMPLATE = "chat_template.jinja"
_SPACE = "\u0120"  # how a byte-level tokenizer writes a space


def write_tokenizer(directory: Path, vocabulary_size: int, context_tokens: int) -> None:
    """Write its files; text never becomes an added token. Raises InvalidArgument for a smaller vocabulary."""
    content = json.loads((kvasir_tiny.path() / "tokenizer.json").read_text(encoding="utf-8"))
    _pad(content, vocabulary_size)
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((kvasir_tiny.path() / "tokenizer_config.json").read_text())
    settings["model_max_length"] = context_tokens
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    shutil.copy(kvasir_tiny.path() / _TEMPLATE, directory / _TEMPLATE)


def _pad(content: dict[str, Any], vocabulary_size: int) -> None:
    vocabulary = content["model"]["vocab"]
    # An added token that the vocabulary does not name would get the next free id, behind all that follow here.
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    known = set(vocabulary.values())
    if vocabulary_size <= max(known):
        raise InvalidArgument(f"vocabulary: expected at least {max(known) + 1} tokens, found {vocabulary_size}")
    vocabulary |= {f"{_SPACE}w{token_id}": token_id for token_id in range(vocabulary_size) if token_id not in known}
