"""Reads a model's tokenizer through mlx-lm, without the work that mlx-lm does for a program that prints tokens."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import mlx_lm.tokenizer_utils
import mlx_lm.utils
import transformers.tokenization_utils_base
from transformers import PreTrainedTokenizerFast

from inference_svc.model.wedlm import MaskWindow, keep_transformers_quiet
from inference_svc.text.token_text import TokenText

_FILE = "tokenizer.json"
_ALONE = Lock()  # two would put each other's functions back
_DETOKENIZERS = ("BPEStreamingDetokenizer", "SPMStreamingDetokenizer")


def read_tokenizer(directory: Path, config: Mapping[str, Any]) -> tuple[Any, TokenText]:
    """mlx-lm's wrapper, and the spellings of its tokens. It holds the interpreter for most of the time, for which a
    start's other threads wait. Its `detokenizer` is mlx-lm's slow one: our text is made by `TokenText`.
    """
    if MaskWindow.of_config(config) is not None:
        keep_transformers_quiet()
    load_tokenizer: Any = mlx_lm.utils.load_tokenizer
    with _ALONE, _without_token_maps(), _file_once(directory / _FILE) as content, _vocabulary_once(directory, content):
        tokenizer = load_tokenizer(directory, eos_token_ids=config.get("eos_token_id"))
        longest = longest_bytes(tokenizer)
    # Else the log has once that a long prompt "will result in indexing errors": it is refused, with numbers.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True

    def decode(token_ids: Any) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    token_text = TokenText.of_content(content(), decode)
    token_text.longest_bytes = longest
    return tokenizer, token_text


def longest_bytes(tokenizer: Any) -> int:
    """Of a token as its vocabulary has it."""
    return max(map(len, map(str.encode, tokenizer.get_vocab())), default=1)


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
def _file_once(path: Path) -> Iterator[Callable[[], Mapping[str, Any]]]:
    """The content of a tokenizer.json, which mlx-lm and transformers would parse, too: 0.07 s each."""

    @cache
    def content() -> Mapping[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found

    def load(file: Any, **options: Any) -> Any:
        if Path(file.name) != path:
            return json.load(file, **options)
        return {name: part if name == "model" else deepcopy(part) for name, part in content().items()}

    theirs: Any = mlx_lm.tokenizer_utils, transformers.tokenization_utils_base
    for each in theirs:
        each.json = SimpleNamespace(**{**vars(json), "load": load})
    try:
        yield content
    finally:
        for each in theirs:
            each.json = json


@contextmanager
def _vocabulary_once(directory: Path, content: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """mlx-lm looks two or three times for marks of thoughts and calls; each copy of a vocabulary takes 0.1 s. The
    directory's own is that of its file, if all of its tokens are there.
    """
    kind: Any = PreTrainedTokenizerFast
    copied, kept = kind.get_vocab, dict[Any, dict[str, int]]()  # holds tokenizers: the next has no dead one's place

    def get_vocab(tokenizer: Any) -> dict[str, int]:
        if tokenizer not in kept:
            found = _written_vocabulary(content()) if tokenizer.name_or_path == str(directory) else {}
            kept[tokenizer] = found if len(found) == len(tokenizer) else copied(tokenizer)
        return kept[tokenizer]

    kind.get_vocab = get_vocab
    try:
        yield
    finally:
        kind.get_vocab = copied


def _written_vocabulary(content: Mapping[str, Any]) -> dict[str, int]:
    """Of a file; empty where it is not written as tokens and their numbers."""
    tokens = content["model"].get("vocab") if "model" in content else None
    if not isinstance(tokens, dict):
        return {}
    return {**{token["content"]: token["id"] for token in content.get("added_tokens", ())}, **tokens}
