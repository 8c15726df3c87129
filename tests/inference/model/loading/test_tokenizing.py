"""A tokenizer is read with less work than by mlx-lm alone, and is the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import mlx_lm.tokenizer_utils
import mlx_lm.utils
import pytest
import transformers.tokenization_utils_base
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting
from inference_svc.model.tokenizing import _vocabulary_once, read_tokenizer
from inference_svc.text.token_text import TokenText


def facts(tokenizer: Any) -> dict[str, Any]:
    """Of mlx-lm's wrapper, whose objects of its own are told apart by their classes."""
    kept = (str, int, tuple, set, dict)
    return {
        name: value if isinstance(value, kept) else type(value)
        for name, value in vars(tokenizer).items()
        if name != "_detokenizer"
    }


@pytest.mark.parametrize("directory", kvasir_tiny.shipped().values(), ids=str)
def test_it_is_mlx_lms(directory: Path) -> None:
    plain: Any = mlx_lm.utils.load_tokenizer
    theirs = plain(directory, eos_token_ids=[3])
    ours, spelled = read_tokenizer(directory, {"eos_token_id": [3]})
    assert facts(ours) == facts(theirs)
    ids = ours.encode("My dog is called Rex.")
    assert ids == theirs.encode("My dog is called Rex.")
    assert spelled.spell(ids)[0].endswith("Rex.")


def test_a_prompt_beyond_the_context_leaves_no_warning_of_errors_that_never_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = list[str]()
    monkeypatch.setattr(transformers.tokenization_utils_base.logger, "warning", lines.append)
    tokenizer, _ = read_tokenizer(kvasir_tiny.path(), {})
    assert len(tokenizer.encode("dog " * tokenizer.model_max_length)) > tokenizer.model_max_length
    assert lines == []


def test_nobody_maps_tokens_or_copies_the_vocabulary_and_the_file_is_parsed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, copied = list[object](), PreTrainedTokenizerFast.get_vocab
    texts, parsed = list[str](), json.loads

    def counted(tokenizer: Any) -> Any:
        copies.append(tokenizer)
        return copied(tokenizer)

    for name in ("BPEStreamingDetokenizer", "SPMStreamingDetokenizer"):
        monkeypatch.setattr(mlx_lm.tokenizer_utils, name, lambda *_, **__: pytest.fail("a map of all tokens"))
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", counted)
    monkeypatch.setattr(json, "loads", lambda text, **options: (texts.append(text), parsed(text, **options))[1])
    tokenizer, _ = read_tokenizer(kvasir_tiny.path(), {})
    assert copies == []
    assert texts.count((kvasir_tiny.path() / "tokenizer.json").read_text(encoding="utf-8")) == 1
    tokenizer.get_vocab()
    assert len(copies) == 1, "mlx-lm and transformers are as before"
    assert mlx_lm.tokenizer_utils.json is transformers.tokenization_utils_base.json is json


def seen_vocabulary(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Mapping[str, int], Any]:
    """That which mlx-lm sees while a tokenizer is read, and the tokenizer."""
    seen, infer = list[Mapping[str, int]](), mlx_lm.tokenizer_utils._infer_thinking

    def inferred(tokenizer: Any) -> Any:
        seen.append(tokenizer.get_vocab())
        return infer(tokenizer)

    monkeypatch.setattr(mlx_lm.tokenizer_utils, "_infer_thinking", inferred)
    tokenizer, _ = read_tokenizer(directory, {})
    return seen[0], tokenizer


@pytest.mark.parametrize("directory", kvasir_tiny.shipped().values(), ids=str)
def test_the_vocabulary_of_the_file_is_the_tokenizers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, tokenizer = seen_vocabulary(directory, monkeypatch)
    assert seen == tokenizer.get_vocab()


def test_tokens_that_the_file_lacks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path(copytree(kvasir_tiny.path(), tmp_path / "model"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] = ["<think>", "</think>"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    seen, tokenizer = seen_vocabulary(directory, monkeypatch)
    assert seen == tokenizer.get_vocab()
    assert "<think>" in seen
    assert tokenizer.has_thinking


def test_turns_of_a_model_that_was_loaded_wait_for_no_copy_of_its_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, token_text = read_tokenizer(kvasir_tiny.path(), {})
    plain = Prompting(tokenizer, TokenText.of_bytes(token_text.bytes_of))
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", lambda _: pytest.fail("a copy"))
    prompting = Prompting(tokenizer, token_text)
    text = "My dog is called Rex. " * 9
    assert prompting.fewest_tokens(text) == plain.fewest_tokens(text) > 1
    for each in (plain, prompting):
        each.close()


def test_a_tokenizer_has_no_vocabulary_of_one_that_is_gone() -> None:
    """Another model's, at the same place in memory: they are read, and used, while this one is read."""

    def read(word: str) -> Any:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({word: 0})))

    with _vocabulary_once(Path("another"), dict):
        assert [read(word).get_vocab() for word in "abcdefgh"] == [{word: 0} for word in "abcdefgh"]


def test_a_tokenizer_of_another_directory_has_its_own_vocabulary() -> None:
    """Of as many tokens as the one that is read has."""
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"b": 0})))
    with _vocabulary_once(Path("one"), lambda: {"model": {"vocab": {"a": 0}}}):
        assert other.get_vocab() == {"b": 0}
