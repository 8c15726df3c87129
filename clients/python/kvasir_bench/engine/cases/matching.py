"""How much of a memory a chat's next prompt may reuse: by comparing texts, and by comparing tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.engine.api import Cold, Hot
from inference_svc.model.prompting import Prompting
from inference_svc.text.prefix_matching import NO_TEXT, RememberedText, common_prefix_length, match_prefix
from kvasir_bench.engine.lab import Case, Lab
from kvasir_bench.engine.prompts import user_turns

_REPLY_TOKENS = 48


@dataclass(frozen=True, slots=True)
class MatchingRow:
    """A turn; keys as in `kvasir_bench.engine.keys`."""

    chat: str
    turn: str
    prompt_tokens: int
    by_characters: int
    by_tokens: int
    ratio: float | None


class _Transcript:
    """A chat as agent frameworks often write it: lines of plain text, with no token at a message's border."""

    def __init__(self) -> None:
        self._text = ""

    def asked(self, user_messages: Sequence[str]) -> str:
        self._text += "".join(f"User: {text}\n" for text in user_messages) + "Agent:"
        return self._text

    def replied(self, text: str) -> None:
        self._text += f"{text}\n"


class _Messages:
    """A chat through the model's own template."""

    def __init__(self, prompting: Prompting) -> None:
        self._prompting = prompting
        self._messages: list[dict[str, Any]] = []

    def asked(self, user_messages: Sequence[str]) -> str:
        self._messages += [{"role": "user", "content": text} for text in user_messages]
        return self._prompting.template(self._messages, None, True)

    def replied(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


class _Agent:
    """The engine's memory of one chat, and its text."""

    def __init__(self, lab: Lab, prompting: Prompting) -> None:
        self._lab = lab
        self._prompting = prompting
        self._key = lab.new_key()
        self._memory = NO_TEXT

    def turn(self, text: str) -> tuple[str, int, int, int]:
        """Reply and remember. Returns the reply, the prompt's tokens, and how many of them each matching reuses."""
        anew = self._prompting.tokenize(text)
        memory = self._memory
        match = match_prefix(memory, text, ends_whole=self._prompting.ends_whole)
        suffix = self._prompting.tokenize(text[match.kept_chars :])
        tokens = (*memory.token_ids[: match.kept_tokens], *suffix.ids)
        reuse = Hot(match.kept_tokens) if match.kept_tokens else Cold()
        ends = self._lab.engine.end_token_ids
        ended = self._lab.start(tokens, _REPLY_TOKENS, reuse, self._key, stop_token_ids=ends).end()
        _, reply_chars = self._lab.engine.token_text.spell(ended.state.token_ids[len(tokens) :])
        chars = (*memory.token_chars[: match.kept_tokens], *suffix.chars, *reply_chars)
        self._memory = RememberedText(text + ended.generated_text, ended.state.token_ids, chars)
        return ended.text, len(anew.ids), match.kept_tokens, common_prefix_length(memory.token_ids, anew.ids)

    def forget(self) -> None:
        self._lab.engine.drop_hot(self._key).result()


def run(lab: Lab) -> Case:
    """The world's user messages and the model's own replies, ten turns: as messages, and as a transcript."""
    said = user_turns(3 if lab.is_quick else 10)
    prompting = Prompting(lab.engine.tokenizer, lab.engine.token_text)
    rows: list[MatchingRow] = []
    for name, chat in (("messages", _Messages(prompting)), ("transcript", _Transcript())):
        lab.say(f"{len(said)} turns of a chat, as {name}")
        rows += _rows(lab, prompting, name, chat, said)
    prompting.close()
    return Case("Tokens reused over a chat, by characters and by tokens", rows)


def _rows(
    lab: Lab, prompting: Prompting, name: str, chat: _Messages | _Transcript, said: Sequence[Sequence[str]]
) -> list[MatchingRow]:
    agent = _Agent(lab, prompting)
    rows: list[MatchingRow] = []
    for number, texts in enumerate(said, 1):
        reply, *counts = agent.turn(chat.asked(texts))
        chat.replied(reply)
        rows.append(_row(name, str(number), *counts))
    agent.forget()
    sums = [sum(getattr(row, key) for row in rows) for key in ("prompt_tokens", "by_characters", "by_tokens")]
    return [*rows, _row(name, "all", *sums)]


def _row(chat: str, turn: str, prompt_tokens: int, by_characters: int, by_tokens: int) -> MatchingRow:
    ratio = by_characters / by_tokens if by_tokens else None
    return MatchingRow(chat, turn, prompt_tokens, by_characters, by_tokens, ratio)
