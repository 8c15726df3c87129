"""A tokenizer is read with less work than by mlx-lm alone, and is the same."""

from pathlib import Path
from typing import Any

import mlx_lm.tokenizer_utils
import mlx_lm.utils
import pytest
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


def test_tokens_are_mapped_by_nobody_and_the_vocabulary_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copied = list[object](), PreTrainedTokenizerFast.get_vocab

    def counted(tokenizer: Any) -> Any:
        copies.append(tokenizer)
        return copied(tokenizer)

    for name in ("BPEStreamingDetokenizer", "SPMStreamingDetokenizer"):
        monkeypatch.setattr(mlx_lm.tokenizer_utils, name, lambda *_, **__: pytest.fail("a map of all tokens"))
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", counted)
    tokenizer, _ = read_tokenizer(kvasir_tiny.path(), {})
    assert len(copies) == 1
    tokenizer.get_vocab()
    assert len(copies) == 2, "mlx-lm and transformers are as before"


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

    with _vocabulary_once():
        assert [read(word).get_vocab() for word in "abcdefgh"] == [{word: 0} for word in "abcdefgh"]
