"""How much of a memory a chat's next prompt may reuse: by comparing texts, and by comparing tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from inference_svc.engine.api import Cold, Hot
from inference_svc.model.prompting import Prompting
from inference_svc.text.prefix_matching import NO_TEXT, RememberedText, common_prefix_length, match_prefix
from kvasir_bench.engine.lab import Case, Lab, Row
from kvasir_bench.engine.prompts import user_turns

_REPLY_TOKENS = 48


class _Chat:
    """A chat, as a text for each turn, and the engine's memory of it."""

    def __init__(self, lab: Lab, prompting: Prompting, render: Callable[[Sequence[dict[str, Any]]], str]) -> None:
        self._lab = lab
        self._prompting = prompting
        self._render = render
        self._messages: list[dict[str, Any]] = []
        self._key = lab.new_key()
        self._memory = NO_TEXT

    def turn(self, user_messages: Sequence[str]) -> tuple[int, int, int]:
        """Reply and remember. Returns the prompt's tokens, and how many of them each matching reuses."""
        self._messages += [{"role": "user", "content": content} for content in user_messages]
        text, memory = self._render(self._messages), self._memory
        whole = self._prompting.tokenize(text)
        match = match_prefix(memory, text, ends_whole=self._prompting.ends_whole)
        suffix = self._prompting.tokenize(text[match.kept_chars :])
        tokens = (*memory.token_ids[: match.kept_tokens], *suffix.ids)
        reuse = Hot(match.kept_tokens) if match.kept_tokens else Cold()
        ends = self._lab.engine.end_token_ids
        ended = self._lab.start(tokens, _REPLY_TOKENS, reuse, self._key, stop_token_ids=ends).end()
        _, reply_chars = self._lab.engine.token_text.spell(ended.state.token_ids[len(tokens) :])
        chars = (*memory.token_chars[: match.kept_tokens], *suffix.chars, *reply_chars)
        self._memory = RememberedText(text + ended.generated_text, ended.state.token_ids, chars)
        self._messages.append({"role": "assistant", "content": ended.text})
        return len(whole.ids), match.kept_tokens, common_prefix_length(memory.token_ids, whole.ids)

    def forget(self) -> None:
        self._lab.engine.drop_hot(self._key).result()


def _transcript(messages: Sequence[dict[str, Any]]) -> str:
    """As agent frameworks often write it: lines of plain text, with no token at a message's border."""
    names = {"user": "User: ", "assistant": "Agent:"}
    return "".join(f"{names[message['role']]}{message['content']}\n" for message in messages) + "Agent:"


def run(lab: Lab) -> Case:
    """The world's user messages and the model's own replies, ten turns: as messages, and as a transcript."""
    turns = user_turns(3 if lab.is_quick else 10)
    prompting = Prompting(lab.engine.tokenizer, lab.engine.token_text)
    renders = {"messages": lambda messages: prompting.template([*messages], None, True), "transcript": _transcript}
    rows: list[Row] = []
    for name, render in renders.items():
        lab.say(f"{len(turns)} turns of a chat, as {name}")
        chat = _Chat(lab, prompting, render)
        found = [chat.turn(texts) for texts in turns]
        chat.forget()
        rows += [_row(name, str(number), *counts) for number, counts in enumerate(found, 1)]
        rows.append(_row(name, "all", *map(sum, zip(*found, strict=True))))
    prompting.close()
    return Case("Tokens reused over a chat, by characters and by tokens", rows)


def _row(chat: str, turn: str, prompt_tokens: int, by_characters: int, by_tokens: int) -> Row:
    ratio = by_characters / by_tokens if by_tokens else None
    counts = {"prompt_tokens": prompt_tokens, "by_characters": by_characters, "by_tokens": by_tokens}
    return {"chat": chat, "turn": turn, **counts, "ratio": ratio}
