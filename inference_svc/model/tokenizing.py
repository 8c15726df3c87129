"""Reads a model's tokenizer through mlx-lm, without the work that mlx-lm does for a program that prints tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import mlx_lm.tokenizer_utils
import mlx_lm.utils
from transformers import PreTrainedTokenizerFast

from inference_svc.model.wedlm import MaskWindow, keep_transformers_quiet
from inference_svc.text.token_text import TokenText

_ALONE = Lock()  # two would put each other's functions back
_DETOKENIZERS = ("BPEStreamingDetokenizer", "SPMStreamingDetokenizer")


def read_tokenizer(directory: Path, config: Mapping[str, Any]) -> tuple[Any, TokenText]:
    """mlx-lm's wrapper, and the spellings of its tokens. It holds the interpreter for most of the time, for which a
    start's other threads wait. Its `detokenizer` is mlx-lm's slow one: our text is made by `TokenText`.
    """
    if MaskWindow.of_config(config) is not None:
        keep_transformers_quiet()
    load_tokenizer: Any = mlx_lm.utils.load_tokenizer
    with _ALONE, _without_token_maps(), _vocabulary_once():
        tokenizer = load_tokenizer(directory, eos_token_ids=config.get("eos_token_id"))
        longest = longest_bytes(tokenizer)

    def decode(token_ids: Any) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    path = directory / "tokenizer.json"
    text = path.read_text(encoding="utf-8") if path.is_file() else "{}"
    token_text = TokenText.of_tokenizer(text, decode)
    token_text.longest_bytes = longest
    return tokenizer, token_text


def longest_bytes(tokenizer: Any) -> int:
    """Of a token as its vocabulary has it."""
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)


@contextmanager
def _without_token_maps() -> Iterator[None]:
    """Of 128,256 tokens each map takes 0.14 s."""
    theirs: Any = mlx_lm.tokenizer_utils
    whole = {name: getattr(theirs, name) for name in _DETOKENIZERS}
    for name in _DETOKENIZERS:
        setattr(theirs, name, lambda tokenizer, **_: theirs.NaiveStreamingDetokenizer(tokenizer))
    try:
        yield
    finally:
        for name, each in whole.items():
            setattr(theirs, name, each)


@contextmanager
def _vocabulary_once() -> Iterator[None]:
    """mlx-lm looks two or three times for marks of thoughts and calls; each copy takes 0.1 s."""
    kind: Any = PreTrainedTokenizerFast
    copied, kept = kind.get_vocab, dict[Any, dict[str, int]]()  # holds tokenizers: the next has no dead one's place

    def get_vocab(tokenizer: Any) -> dict[str, int]:
        if tokenizer not in kept:
            kept[tokenizer] = copied(tokenizer)
        return kept[tokenizer]

    kind.get_vocab = get_vocab
    try:
        yield
    finally:
        kind.get_vocab = copied
