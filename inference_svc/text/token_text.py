"""What tokens spell: bytes and code points per token, and text that grows a token at a time. Built once per model."""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    def push(self, token_id: int) -> str: ...

    @property
    def is_whole(self) -> bool:
        """True unless the last tokens end inside a character."""
        ...


class TokenText:
    def __init__(
        self,
        open_stream: Callable[[], TextStream],
        strips_leading_space: bool = False,
        *,
        bytes_of: Callable[[int], bytes],
    ) -> None:
        self.longest_bytes = 0  # of a token as the vocabulary has it; 0: nobody has looked
        self._open_stream = open_stream
        self.bytes_of = bytes_of  # the bytes of one token by itself; they may be a part of a character
        self.strips_leading_space = strips_leading_space
        """Whether the tokenizer puts a space before a text, which is none of the text's."""

    @classmethod
    def of_tokenizer(cls, tokenizer_json: str, decode: Callable[[Sequence[int]], str]) -> "TokenText":
        """From the text of a tokenizer.json."""
        return cls.of_content(json.loads(tokenizer_json), decode)

    @classmethod
    def of_content(cls, content: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> "TokenText":
        """Of a tokenizer.json, byte-level or sentencepiece; another kind is spelled by `decode`, in windows."""
        decoder = _decoder_parts(content.get("decoder"))
        kinds = [part["type"] for part in decoder]
        if kinds == ["ByteLevel"]:
            return cls.of_bytes(_spelled(content, _byte_level_piece))
        if kinds in (["Metaspace"], ["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            spelled = _spelled(content, _sentencepiece_piece)
            return cls.of_bytes(spelled, strips_leading_space=_strips_leading_space(decoder[-1]))
        return cls(lambda: _WindowStream(decode), bytes_of=lambda token_id: decode([token_id]).encode())

    @classmethod
    def of_bytes(cls, bytes_of: Callable[[int], bytes], strips_leading_space: bool = False) -> "TokenText":
        """From a function of token ids. An id that is no token's spells nothing (vocabularies are padded)."""
        return cls(lambda: _PieceStream(bytes_of), strips_leading_space, bytes_of=bytes_of)

    def spell(self, token_ids: Sequence[int], *, is_behind: bool = False) -> tuple[str, list[int]]:
        """Text of the tokens, special ones spelled, and the code points that each completes (manifest.proto
        `token_chars`). `is_behind`: the tokens stand behind others. The counts add up to the text's length. Bytes of a
        character that never completes are left out of the text.
        """
        stream = self._open_stream()
        parts = [stream.push(token_id) for token_id in token_ids]
        if self.strips_leading_space and not is_behind and parts and parts[0].startswith(" "):
            parts[0] = parts[0][1:]  # the tokenizer put it there
        return "".join(parts), [len(part) for part in parts]

    def stream(self) -> TextStream:
        return self._open_stream()


class _PieceStream:
    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._held = b""  # of a character that is not whole

    def push(self, token_id: int) -> str:
        """As the standard library's incremental decoder, whose calls for each token take three times as long."""
        given = self._held + self._bytes_of(token_id)
        text, used = codecs.utf_8_decode(given, "replace", False)
        self._held = given[used:]
        return text

    @property
    def is_whole(self) -> bool:
        return not self._held


class _WindowStream:
    """For decoders that look at neighbours: decodes a short window, and returns its growth by whole characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._returned: list[int] = []  # the last tokens whose text was returned, context for the next
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text, before = self._decode([*self._returned, *self._held]), self._decode(self._returned)
        if text.endswith("\ufffd"):
            return ""
        self._returned, self._held = self._held, []
        return text[len(before) :]

    @property
    def is_whole(self) -> bool:
        return not self._held


def _decoder_parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _strips_leading_space(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space", True))
    return bool(decoder["type"] == "Strip" and decoder.get("start", 0) > 0)


def _spelled(content: Mapping[str, Any], spell: Callable[[str], bytes]) -> Callable[[int], bytes]:
    """Bytes by token id; spelled at their first use, as a whole vocabulary takes a quarter of a second."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    added = {token["id"]: token["content"].encode() for token in content.get("added_tokens", ())}

    @cache
    def bytes_of(token_id: int) -> bytes:
        return added[token_id] if token_id in added else spell(tokens.get(token_id, ""))

    return bytes_of


def _sentencepiece_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _byte_level_piece(token: str) -> bytes:
    """GPT-2's alphabet: every byte has a printable character; others stand for themselves."""
    spelled = bytearray()
    for char in token:
        spelled += bytes([_BYTES[char]]) if char in _BYTES else char.encode()
    return bytes(spelled)


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
