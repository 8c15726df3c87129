"""What tokens spell, a token at a time, and where stop strings end it."""

import codecs
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inference_svc.engine.reply_text import StopScanner
from inference_svc.model import kvasir_tiny
from inference_svc.text.token_text import TokenText

TOKENIZER = Tokenizer.from_file(str(kvasir_tiny.path() / "tokenizer.json"))


def tiny() -> TokenText:
    return TokenText.of_tokenizer((kvasir_tiny.path() / "tokenizer.json").read_text(), decode)


def decode(token_ids: Any) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=False))


def with_decoder(vocabulary: dict[str, int], decoder: object, added: tuple[dict[str, Any], ...] = ()) -> str:
    return json.dumps({"model": {"vocab": vocabulary}, "decoder": decoder, "added_tokens": added})


@given(st.text())
def test_tokens_of_a_text_spell_the_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    spelled, chars = tiny().spell(token_ids)
    assert spelled == text
    assert sum(chars) == len(text)
    assert len(chars) == len(token_ids)


@pytest.mark.long(2)
@given(st.lists(st.integers(0, 1023), max_size=40))
def test_any_tokens_are_spelled_as_the_tokenizer_decodes_them(token_ids: list[int]) -> None:
    spelled, chars = tiny().spell(token_ids)
    assert sum(chars) == len(spelled)
    assert decode(token_ids).startswith(spelled)
    assert set(decode(token_ids)[len(spelled) :]) <= {"\ufffd"}, "only an unfinished character is left out"


def test_the_token_that_ends_a_character_completes_it() -> None:
    pieces = [b"a", "ö".encode()[:1], "ö".encode()[1:], "🦊".encode()[:3], "🦊".encode()[3:] + b"b"]
    text = TokenText.of_bytes(pieces.__getitem__)
    assert text.spell([0, 1, 2, 3, 4]) == ("aö🦊b", [1, 0, 1, 0, 2])
    assert text.spell([0, 1]) == ("a", [1, 0])
    stream = text.stream()
    assert [(stream.push(token), stream.is_whole) for token in (0, 1, 2)] == [("a", True), ("", False), ("ö", True)]


@given(st.lists(st.binary(max_size=5) | st.text(max_size=2).map(str.encode)))
def test_any_bytes_are_spelled_as_the_standard_librarys_decoder_does(pieces: list[bytes]) -> None:
    stream, standard = TokenText.of_bytes(pieces.__getitem__).stream(), codecs.getincrementaldecoder("utf-8")("replace")
    for place, piece in enumerate(pieces):
        assert stream.push(place) == standard.decode(piece)
        assert stream.is_whole == (not standard.getstate()[0])


def test_bytes_that_are_no_text_are_replaced_and_counted() -> None:
    text = TokenText.of_bytes([b"a", b"\xc3", b"\xff"].__getitem__)
    assert text.spell([1, 0, 2, 0]) == ("\ufffda\ufffda", [0, 2, 1, 1])


def test_special_tokens_are_spelled_and_padding_is_not() -> None:
    assert tiny().spell([1, 5000, 2])[0] == "<|im_start|><|im_end|>"


def test_sentencepiece_spaces_bytes_and_the_first_space() -> None:
    vocabulary = {"▁Hello": 0, "▁world": 1, "<0xC3>": 2, "<0xB6>": 3, "s": 4}
    parts = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    added = ({"id": 5, "content": "<s>"},)
    stripping = TokenText.of_tokenizer(
        with_decoder(vocabulary, {"type": "Sequence", "decoders": [*parts, strip]}, added), decode
    )
    assert stripping.spell([0, 1, 4, 2, 3, 5]) == ("Hello worldsö<s>", [5, 6, 1, 0, 1, 3])
    assert stripping.stream().push(1) == " world", "in the middle of a text a space is a space"
    plain = TokenText.of_tokenizer(with_decoder(vocabulary, {"type": "Sequence", "decoders": parts}), decode)
    assert plain.spell([0, 1])[0] == " Hello world"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    assert TokenText.of_tokenizer(with_decoder(vocabulary, metaspace), decode).spell([0, 1])[0] == "Hello world"


def test_another_decoder_is_asked_token_by_token() -> None:
    words = ["play", "##ing", "chess"]

    def wordpiece(token_ids: Any) -> str:
        return " ".join(words[token_id] for token_id in token_ids).replace(" ##", "")

    text = TokenText.of_tokenizer(with_decoder({"play": 0}, {"type": "WordPiece"}), wordpiece)
    assert text.spell([0, 1, 2, 0, 1]) == ("playing chess playing", [4, 3, 6, 5, 3])


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_is_found_wherever_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    scanner, told, rest = StopScanner(stops), "", text
    while rest and scanner.matched is None:
        cut = data.draw(st.integers(1, len(rest)))
        told += scanner.push(rest[:cut])
        rest = rest[cut:]
    if scanner.matched is None:
        told += scanner.rest()
        assert told == text
        assert not any(stop in text for stop in stops)
    else:
        place = min(text.index(stop) for stop in stops if stop in text)
        assert scanner.matched in stops
        assert text.startswith(told + scanner.matched)
        assert len(told) >= place, "nothing before the first stop is lost"
        assert not any(stop in told for stop in stops)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_is_held_back_only_while_it_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    told = "".join(scanner.push(char) for char in text) if not any(stop in text for stop in stops) else None
    if told is not None:
        held = text[len(told) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
