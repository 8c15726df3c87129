"""How much of a memory a chat's next prompt may reuse: by comparing texts, and by comparing tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from inference_svc.engine.api import Cold, Hot
from inference_svc.model.prompting import Prompting
from inference_svc.text.prefix_matching import NO_TEXT, RememberedText, common_prefix_length, match_prefix
from inference_svc.text.token_ids import TokenChars
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Row
from kvasir_bench.engine.prompts import user_turns

_REPLY_TOKENS = 48


class _Chat:
    """A chat, as a text for each turn, and the engine's memory of it."""

    def __init__(
        self, lab: Lab, prompting: Prompting, render: Callable[[Sequence[dict[str, Any]]], str], chat: str, length: int
    ) -> None:
        self._lab, self._prompting, self._render = lab, prompting, render
        self._names = {"chat": chat, "text_tokens": length}
        self._messages: list[dict[str, Any]] = []
        self._key = lab.agents.new_key()
        self._memory = NO_TEXT
        self._state: Any = None  # of the engine's memory

    def turn(self, turn: int, user_messages: Sequence[str]) -> dict[str, Any]:
        """Reply and remember. Returns the prompt's tokens, those that each matching reuses, and the first's time."""
        self._messages += [{"role": "user", "content": content} for content in user_messages]
        text, memory = self._render(self._messages), self._memory
        whole = self._prompting.tokenize(text)
        match = match_prefix(memory, text, ends_whole=self._prompting.ends_whole)
        suffix = self._prompting.tokenize(text[match.kept_chars :])
        tokens = (*memory.token_ids[: match.kept_tokens], *suffix.ids)
        common = common_prefix_length(memory.token_ids, whole.ids)
        by_tokens_s = self._first_token_s(whole.ids, common)
        by_characters_s = self._first_token_s(tokens, match.kept_tokens)
        reuse = Hot(match.kept_tokens) if match.kept_tokens else Cold()
        ends = self._lab.engine.end_token_ids
        ended = self._lab.start(tokens, _REPLY_TOKENS, reuse, self._key, stop_token_ids=ends).end()
        _, reply_chars = self._lab.engine.token_text.spell(ended.state.token_ids[len(tokens) :])
        chars = memory.token_chars[: match.kept_tokens] + suffix.chars + TokenChars(reply_chars)
        self._state = ended.state
        self._memory = RememberedText(text + ended.generated_text, ended.state.token_ids, chars)
        self._messages.append({"role": "assistant", "content": ended.text})
        counts = {"prompt_tokens": len(whole.ids), "by_characters": match.kept_tokens, "by_tokens": common}
        return {
            **self._names,
            "turn": str(turn),
            **counts,
            "by_characters_s": by_characters_s,
            "by_tokens_s": by_tokens_s,
        }

    def _first_token_s(self, tokens: Sequence[int], keep: int) -> float:
        """Of a turn that keeps so many tokens of the memory, which stays as it is."""
        if not keep or self._lab.engine.model.state_bytes:  # a state cannot be cut
            return self._lab.start(tokens, 1).ended().first_token_s
        fork = self._lab.agents.fork(LabMemory(self._key, self._state))
        run = self._lab.start(tokens, 1, Hot(keep), fork.key).ended()
        self._lab.agents.forget([fork])
        return run.first_token_s

    def forget(self) -> None:
        self._lab.engine.memories.drop(self._key).result()


def _transcript(messages: Sequence[dict[str, Any]]) -> str:
    """As agent frameworks often write it: lines of plain text, with no token at a message's border."""
    names = {"user": "User: ", "assistant": "Agent:"}
    return "".join(f"{names[message['role']]}{message['content']}\n" for message in messages) + "Agent:"


def run(lab: Lab) -> Case:
    """The world's user messages and the model's replies: as messages and as a transcript, of ten turns or of three."""
    turns = user_turns(3 if lab.scope.is_quick or lab.scope.lengths else 10)
    prompting = Prompting(lab.engine.tokenizer, lab.engine.token_text)
    renders = {"messages": lambda messages: prompting.template([*messages], None, True), "transcript": _transcript}
    rows: list[Row] = []
    for length in lab.lengths(0, 0):
        begun = [[lab.engine.tokenizer.decode(list(lab.prompts.tokens(length, 0))), *turns[0]], *turns[1:]]
        for name, render in renders.items():
            lab.pace.say(f"{len(turns)} turns of a chat, as {name}, behind {length} tokens")
            chat = _Chat(lab, prompting, render, name, length)
            found = [chat.turn(number, texts) for number, texts in enumerate(begun if length else turns, 1)]
            chat.forget()
            rows += map(_with_ratio, [*found, _all_of(found)])
    prompting.close()
    return Case("Tokens reused over a chat, by characters and by tokens", rows)


def _all_of(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("prompt_tokens", "by_characters", "by_tokens", "by_characters_s", "by_tokens_s")
    return turns[0] | {"turn": "all"} | {name: sum(turn[name] for turn in turns) for name in names}


def _with_ratio(row: dict[str, Any]) -> Row:
    return {**row, "ratio": row["by_characters"] / row["by_tokens"] if row["by_tokens"] else None}
