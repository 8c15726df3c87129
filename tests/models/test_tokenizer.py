"""kvasir-tiny's tokenizer and template: what training read is what a service will feed, and borders really merge."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from inference_svc.model.kvasir_tiny import path
from tests.made_models.sampling import sampled
from tools.kvasir_tiny import tokenizer, world


@pytest.fixture(scope="module")
def shipped() -> Any:
    return AutoTokenizer.from_pretrained(path())


@pytest.fixture(scope="module")
def encoder() -> tokenizer.Encoder:
    return tokenizer.load(path())


def assert_is_shipped(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / file).read_bytes() == (path() / file).read_bytes(), file


def test_the_shipped_tokenizer_is_saved_as_it_lies_there(tmp_path: Path) -> None:
    tokenizer.save(Tokenizer.from_file(str(path() / "tokenizer.json")), tmp_path)
    assert_is_shipped(tmp_path)


@pytest.mark.campaign
def test_training_again_gives_the_shipped_tokenizer(tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train(), tmp_path)
    assert_is_shipped(tmp_path)


def test_the_template_gives_the_tokens_that_training_read(shipped: Any, encoder: tokenizer.Encoder) -> None:
    for seed in range(12):
        talk = world.training_conversation(seed, 1500, encoder.count)
        rendered = shipped.apply_chat_template(talk.messages, tools=talk.tools or None, return_dict=False)
        assert encoder.conversation(talk)[0] == rendered


def test_only_the_assistants_words_are_learned(encoder: tokenizer.Encoder) -> None:
    talk = world.training_conversation(3, 1500, encoder.count)
    ids, learned = encoder.conversation(talk)
    said = encoder.decode([token for token, is_learned in zip(ids, learned, strict=True) if is_learned])
    texts = [tokenizer.message_text(m) for m, taught in zip(talk.messages, talk.taught, strict=True) if taught]
    assert said == "".join(texts)
    assert all(m["role"] == "assistant" for m, taught in zip(talk.messages, talk.taught, strict=True) if taught)


def test_tokens_merge_across_the_border_of_two_speakers(shipped: Any) -> None:
    marco = {"role": "user", "name": "Marco", "content": "I live in Porto."}
    lena = {"role": "user", "name": "Lena", "content": "So do I."}
    whole = shipped.apply_chat_template([marco, lena], tokenize=False)
    cut = whole.index("\nLena")
    pieces = shipped.encode(whole[:cut]) + shipped.encode(whole[cut:])
    assert shipped.decode(pieces) == whole
    assert pieces != shipped.encode(whole)  # ".\n" is one token in the whole and two in the pieces
    assert ".\n" in [shipped.decode([token]) for token in shipped.encode(whole)]


def test_conversations_of_several_speakers_differ_in_pieces(encoder: tokenizer.Encoder) -> None:
    differing = 0
    for seed in range(30):
        talk = world.training_conversation(seed, 1500, encoder.count)
        whole, _ = encoder.conversation(talk)
        pieces, _ = encoder.conversation(talk, in_pieces=True)
        assert encoder.decode(whole) == encoder.decode(pieces)
        differing += whole != pieces
    assert differing >= 8


def test_a_reply_never_merges_with_what_stands_before_it(shipped: Any, encoder: tokenizer.Encoder) -> None:
    """Otherwise a model would be asked for tokens that it never saw there in training."""
    for seed in range(5):
        talk = world.training_conversation(seed, 800, encoder.count)
        for index, message in enumerate(talk.messages):
            if message["role"] == "assistant":
                before = shipped.apply_chat_template(
                    talk.messages[:index], tools=talk.tools or None, add_generation_prompt=True, return_dict=False
                )
                with_reply = shipped.apply_chat_template(
                    talk.messages[: index + 1], tools=talk.tools or None, return_dict=False
                )
                assert with_reply[: len(before)] == before


@settings(max_examples=sampled(70, of=200), deadline=None)
@given(st.text(max_size=200))
def test_any_text_comes_back(text: str) -> None:
    plain = Tokenizer.from_file(str(path() / "tokenizer.json"))
    ids = plain.encode(text, add_special_tokens=False).ids
    assert plain.decode(ids, skip_special_tokens=False) == text


def test_an_unknown_role_is_refused(shipped: Any) -> None:
    with pytest.raises(Exception, match="unknown role: wizard"):
        shipped.apply_chat_template([{"role": "wizard", "content": "x"}])


def test_tool_arguments_may_come_as_text_or_as_an_object(shipped: Any) -> None:
    def rendered(arguments: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return str(shipped.apply_chat_template([{"role": "assistant", "tool_calls": [call]}], tokenize=False))

    arguments = {"place": "Žilina"}
    assert rendered(arguments) == rendered(json.dumps(arguments, ensure_ascii=False))
    assert '<tool_call>{"name": "weather", "arguments": {"place": "Žilina"}}</tool_call>' in rendered(arguments)
