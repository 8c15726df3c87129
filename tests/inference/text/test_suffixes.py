"""What follows a memory, tokenized by itself: with the tokens that are kept it spells the prompt and nothing else."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from inference_svc.memory.reuse_planning import matched
from inference_svc.model.prompting import Prompting
from inference_svc.text.literal_text import GUARD, without_guards
from inference_svc.text.prefix_matching import NO_TEXT, RememberedText
from tests.inference.text.test_special_tokens import LETTERS, tiny, wrapped
from tests.made_models.sampling import sampled


def sentencepiece(scheme: str) -> Tokenizer:
    """As Llama 2's and Mistral's: a space comes before every text ("every"), or the first of a prompt ("first")."""
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    tokens += [left + right for left, right in merges if left + right not in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "every":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in ("<s>", "</s>")])
    return tokenizer


SHAPES: dict[str, Callable[[], Prompting]] = {
    "byte level": tiny,
    "a space before every text": lambda: wrapped(sentencepiece("every")),
    "a space before the first": lambda: wrapped(sentencepiece("first")),
}
MADE = {name: make() for name, make in SHAPES.items()}
shapes = pytest.mark.parametrize("shape", SHAPES)


def memory_of(prompting: Prompting, text: str) -> RememberedText:
    tokens = prompting.tokenize(text)
    return RememberedText(text, tokens.ids, tokens.chars)


def reused(prompting: Prompting, known: str, asked: str) -> list[int]:
    """The tokens of a prompt behind a memory, all of whose characters some token completes."""
    match, tokens = matched(prompting, memory_of(prompting, known) if known else NO_TEXT, asked)
    assert len(tokens.ids) == len(tokens.chars)
    assert sum(tokens.chars) == len(asked)
    assert match.kept_tokens <= len(tokens.ids)
    return list(tokens.ids)


def read(prompting: Prompting, ids: list[int]) -> str:
    """The text as the model reads it."""
    return str(prompting._tokenizer.decode(ids, skip_special_tokens=False))


@shapes
@pytest.mark.parametrize(
    ("known", "asked"),
    [
        ("Today is 2026-11-23", "Today is 2026-11-24"),
        ("The cat sat", "The cat sat on"),
        ("The cat sat", "The cat satin"),
        ("ab", "abab"),
        ("a\n", "a\n\nb"),
    ],
)
def test_no_space_comes_between_a_memory_and_what_follows(shape: str, known: str, asked: str) -> None:
    """An edited date was read as "2026-11-2 4"."""
    prompting = MADE[shape]
    assert read(prompting, reused(prompting, known, asked)) == asked


@shapes
@settings(max_examples=sampled(100, of=400), deadline=None)
@given(
    known=st.text(alphabet="ab \né", max_size=8).map("b".__add__),
    end=st.text(alphabet="ab \né", max_size=8),
    data=st.data(),
)
def test_a_prompt_behind_any_memory_is_read_as_it_is_written(
    shape: str, known: str, end: str, data: st.DataObject
) -> None:
    prompting = MADE[shape]
    asked = known[: data.draw(st.integers(1, len(known)))] + end
    assert read(prompting, reused(prompting, known, asked)) == asked


@shapes
def test_behind_a_special_token_come_the_tokens_of_a_cold_prompt(shape: str) -> None:
    prompting = MADE[shape]
    end = "<|im_end|>" if shape == "byte level" else "</s>"
    for follows in ("ab", " ab", "\nab", f"\n{end}ab"):
        asked = f"ab{end}{follows}"
        assert reused(prompting, f"ab{end}", asked) == list(prompting.tokenize(asked).ids)


@shapes
def test_special_tokens_further_on_change_nothing_of_it(shape: str) -> None:
    """Behind them some tokenizers put a space, too: what the tokens spell is not quite the text then."""
    prompting = MADE[shape]
    end = "<|im_end|>" if shape == "byte level" else "</s>"
    for known, asked in (("on 2026-11-23", "on 2026-11-24"), ("ab", "ab\ncd"), ("x é", "x éé")):
        conversation = f"{asked}{end}\nx{end}"
        assert reused(prompting, f"{known}{end}", conversation) == list(prompting.tokenize(conversation).ids)


@shapes
def test_a_guard_is_no_space(shape: str) -> None:
    prompting = MADE[shape]
    text = f"ab<{GUARD}|im_end|>b" if shape == "byte level" else f"ab<{GUARD}/s>b"
    assert read(prompting, reused(prompting, "", text)) == without_guards(text)
    assert read(prompting, reused(prompting, "ab", text)) == without_guards(text)


@pytest.mark.parametrize(("known", "asked"), [("x\u0958", "xb"), ("x\u0958 y", "x y")])
def test_nothing_is_kept_of_a_character_that_the_prompt_does_not_have(known: str, asked: str) -> None:
    """Tokenizers like Qwen's make two letters of it (NFC). The first one's token was read in the prompt, too."""
    prompting = tiny()
    prompting._tokenizer._tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert reused(prompting, known, asked) == list(prompting.tokenize(asked).ids)


def test_no_space_comes_behind_a_character_that_the_tokenizer_does_not_know() -> None:
    """Its token is special by name, but stands for text."""
    tokenizer = sentencepiece("every")
    content = json.loads(tokenizer.to_str())
    content["model"]["byte_fallback"] = False
    prompting = wrapped(Tokenizer.from_str(json.dumps(content)))
    assert reused(prompting, "ab漢", "ab漢b") == list(prompting.tokenize("ab漢b").ids)


def test_characters_of_which_nothing_is_left_count_to_the_last_token() -> None:
    """A turn whose characters did not add up failed when it was to be remembered."""
    tokenizer = sentencepiece("every")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("\u200b", ""), tokenizer.normalizer])
    prompting = wrapped(tokenizer)
    for asked in ("ab\u200b", "ab\u200b\u200b", "ab\u200bab", f"ab<{GUARD}/s>\u200b"):
        reused(prompting, "ab", asked)
        reused(prompting, "", asked)
