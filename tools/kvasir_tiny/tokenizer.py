"""kvasir-tiny's tokenizer and chat template: how its world becomes token ids, and the files that mlx-lm loads.

Borders in plain text merge, as they do in Llama 3 and Qwen: a full stop and the newline after it are one token.
Messages that follow each other in the same role share one block, joined by a newline, so a conversation cut between two
speakers has other tokens than the whole. What the model itself says starts behind a newline, which never merges with
a letter."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from inference_svc.model.kvasir_tiny import path
from tools.kvasir_tiny import desk, world

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
VOCABULARY_SIZE = 1024
CONTEXT = 8192
# A capital word carries no space, so that a name is the same tokens wherever it stands; digits stand alone.
SPLIT = r"\p{Lu}\p{L}*|'s| ?\p{Ll}\p{L}*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s"

CHAT_TEMPLATE = (path() / "chat_template.jinja").read_text(encoding="utf-8")


class Encoder:
    """The chat template in plain Python, straight to token ids: what training reads, many times faster than Jinja.

    A test holds it equal to the template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self._start, self._end = self.encode(START), self.encode(END)
        self._newline = self.encode("\n")
        self._roles = {role: self.encode(role) for role in ("system", "user", "assistant", "tool")}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def count(self, text: str) -> int:
        return len(self._remembered(text))

    def _remembered(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            if len(self._known) > 20000:
                self._known.clear()
            ids = self._known[text] = self.encode(text)
        return ids

    def _learned(self, text: str, forced: tuple[tuple[int, int], ...]) -> list[bool]:
        """For each token of a reply, whether it begins outside of what is forced."""
        starts = (first for first, _ in self._tokenizer.encode(text, add_special_tokens=False).offsets)
        return [not any(first <= start < end for first, end in forced) for start in starts]

    def conversation(
        self, talk: desk.Conversation, in_pieces: bool = False, until: int | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and for each whether it is learned.

        `in_pieces` encodes each message of a block alone, as an engine does that appends to what it remembers."""
        ids: list[int] = []
        learned: list[bool] = []
        for role, pieces, learn in blocks(talk):
            head = self._start + self._roles[role] + self._newline
            texts = pieces if in_pieces else ["".join(pieces)]
            body = [token for text in texts for token in self._remembered(text)] + self._end
            ids += head + body + self._newline
            taught = [learn] * len(body) if isinstance(learn, bool) else [*self._learned(texts[0], learn), True]
            learned += [False] * len(head) + taught + [False] * len(self._newline)
            if until is not None and len(ids) >= until:
                break
        return ids, learned


def blocks(talk: desk.Conversation) -> Iterator[tuple[str, list[str], desk.Taught]]:
    """Role, text in pieces (one for each message), and whether it is learned, for each block of the template."""
    messages, index = talk.messages, 0
    if talk.tools and (not messages or messages[0]["role"] != "system"):
        yield "system", [tool_lines(talk.tools)], False
    while index < len(messages):
        role, first = messages[index]["role"], index
        pieces = [message_text(messages[index])]
        if talk.tools and index == 0 and role == "system":
            pieces.append("\n" + tool_lines(talk.tools))
        while role == "user" and index + 1 < len(messages) and messages[index + 1]["role"] == "user":
            index += 1
            pieces.append("\n" + message_text(messages[index]))
        yield role, pieces, talk.taught[first] if talk.taught else False
        index += 1


def message_text(message: dict[str, Any]) -> str:
    text = message["content"]
    if message.get("name") and message["role"] == "user":
        text = f"{message['name']}: {text}"
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
        text += f'{TOOL_CALL}{{"name": "{name}", "arguments": {arguments}}}{TOOL_CALL_END}'
    return str(text)


def tool_lines(tools: list[dict[str, Any]]) -> str:
    lines = ["Tools:"]
    for tool in tools:
        function = tool["function"]
        lines.append(
            f"- {function['name']}({', '.join(function['parameters']['properties'])}): {function['description']}"
        )
    return "\n".join(lines)


def train(conversations: int = 1500, tokens_each: int = 3000) -> Tokenizer:
    """A byte-level BPE tokenizer trained on conversations of the training part; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 2,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations, tokens_each), trainer)
    # Added, not special: a reader must see them in the text.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (TOOL_CALL, TOOL_CALL_END)])
    return tokenizer


def _texts(conversations: int, tokens_each: int) -> Iterable[str]:
    for seed in range(conversations):
        talk = world.training_conversation(10**9 + seed, tokens_each, desk.estimate_tokens)
        for role, pieces, _ in blocks(talk):
            yield f"{role}\n{''.join(pieces)}"


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load(folder: Path) -> Encoder:
    return Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the tokenizer's files go")
    save(train(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
