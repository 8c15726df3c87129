"""What one agent does next: a seeded choice of input, sampling and interruption. It knows of no engine."""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.campaigns.hammer import canaries
from tests.campaigns.hammer.canaries import Canaries
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.words import Dice

_BORDERS = (256, 512)
_MOST_TOLD = canaries.FACTS_PER_AGENT - 1  # one question stays without an answer
_VOCABULARY = 1000
_MESSAGES = 3  # of a conversation that may be cut: one exchange stays

Message = dict[str, str]


@dataclass(frozen=True)
class Cut:
    """When and how a turn is interrupted: at its start, at a cell of its prompt, after some tokens, or after a time."""

    at: str  # "started", "prefill", "tokens", "deadline"
    how: str = "close"  # "close" the stream, or "disconnect" the whole channel
    tokens: int = 0
    after_s: float = 0.0
    keep_partial: bool = False


@dataclass(frozen=True)
class Ask:
    """A turn to ask. `messages` or `prompt` is the whole of it; `append` is what is sent instead, if it is sent."""

    kind: str
    sampling: dict[str, Any]
    messages: list[Message] | None = None
    append: list[Message] | None = None
    prompt: str | None = None
    is_background: bool = False
    cut: Cut | None = None


@dataclass
class Script:
    """One agent's mind: its facts, its conversation as it was answered, and its dice."""

    name: str
    dice: Dice
    told: Canaries
    is_raw: bool
    system: str = ""
    facts: dict[int, Fact] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    text: str = ""  # of a raw agent: prompt and reply
    before: "tuple[list[Message], str] | None" = None  # what it was before its last turn

    def next(self) -> Ask:
        """What to ask now."""
        if not self.messages and not self.text:
            kind, body = "new", self._first()
        elif self.is_raw:
            kind, body = self._next_prompt()
        else:
            kind, body = self._next_messages()
        dice = self.dice
        sampling = self._sampling()
        cut = self._cut(sampling) if dice.chance(0.14) else None
        return Ask(kind, sampling, is_background=dice.chance(0.3), cut=cut, **body)

    def nobodys(self) -> Ask:
        """A turn of nobody, who remembers nothing: with the system's words, and a question that others can answer."""
        dice, asked = self.dice, canaries.question(self.dice.below(canaries.FACTS_PER_AGENT))
        head = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*head, {"role": "user", "content": asked}]
        sampling = self._sampling()
        cut = replace(self._cut(sampling), keep_partial=False) if dice.chance(0.14) else None
        body: dict[str, Any] = {"prompt": canaries.rendered(messages)} if self.is_raw else {"messages": messages}
        return Ask("nobody's", sampling, is_background=dice.chance(0.3), cut=cut, **body)

    def answered(self, ask: Ask, reply: str, end: str) -> None:
        """The turn is remembered. `end`: the text of the stop token, if there was one."""
        self.before = (self.messages, self.text)
        if ask.prompt is not None:
            self.text = ask.prompt + reply + end
        else:
            assert ask.messages is not None
            self.messages = [*ask.messages, {"role": "assistant", "content": reply}]

    def undone(self) -> None:
        """The last turn was rolled back."""
        assert self.before is not None
        (self.messages, self.text), self.before = self.before, None

    def fork(self, name: str, dice: Dice) -> "Script":
        """Another agent with the same past, who goes its own way."""
        self.told.share(self.name, name)
        return Script(name, dice, self.told, self.is_raw, self.system, dict(self.facts), list(self.messages), self.text)

    # --- messages ---

    def _first(self) -> dict[str, Any]:
        said = f"{self._tell()} {self._tell()}"
        head = [{"role": "system", "content": self.system}] if self.system else []
        before = canaries.rendered([*head, {"role": "user", "content": said}])
        if self.is_raw and self.dice.chance(0.3):
            # One token each: a prompt of exactly so many.
            count = self.dice.pick(_BORDERS) + self.dice.between(-2, 2)
            return {"prompt": before + "<|im_start|>" * max(count - canaries.token_count(before), 1)}
        if self.dice.chance(0.3):
            target = self.dice.pick(_BORDERS) + self.dice.between(-12, 6)
            said = f"{canaries.filler_up_to(self.dice, before, target)} {said}"
        messages = [*head, {"role": "user", "content": said}]
        return {"prompt": canaries.rendered(messages)} if self.is_raw else {"messages": messages}

    def _next_messages(self) -> tuple[str, dict[str, Any]]:
        dice, said = self.dice, {"role": "user", "content": self._say()}
        draw = dice.random()
        if draw < 0.5:
            return "append", {"messages": [*self.messages, said], "append": [said]}
        if draw < 0.75:
            return "whole", {"messages": [*self.messages, said]}
        if len(self.messages) < _MESSAGES:
            return "whole", {"messages": [*self.messages, said]}
        if draw < 0.88:
            return "edited", {"messages": [*self.messages[:-2], {"role": "user", "content": self._say()}]}
        changed = [*self.messages[:-1], {"role": "assistant", "content": canaries.ACKNOWLEDGED}, said]
        return "reply changed", {"messages": changed}

    def _next_prompt(self) -> tuple[str, dict[str, Any]]:
        dice = self.dice
        more = f"\n<|im_start|>user\n{self._say()}<|im_end|>\n<|im_start|>assistant\n"
        draw = dice.random()
        if draw < 0.55:
            return "extended", {"prompt": self.text + more}
        if draw < 0.7:
            return "exact", {"prompt": self.text}
        cut = dice.between(int(len(self.text) * 0.6), len(self.text) - 1)
        return ("trimmed", {"prompt": self.text[:cut]}) if draw < 0.85 else ("cut", {"prompt": self.text[:cut] + more})

    # --- words ---

    def _say(self) -> str:
        dice = self.dice
        draw = dice.random()
        if draw < 0.2:
            return self._tell()
        if draw < 0.5:
            return canaries.question(dice.pick(list(self.facts)))
        if draw < 0.75:  # perhaps one that only others were told
            return canaries.question(dice.below(canaries.FACTS_PER_AGENT))
        return f"{canaries.filler(dice, dice.between(1, 6))} {canaries.question(dice.pick(list(self.facts)))}"

    def _tell(self) -> str:
        """A fact that is new, or one that was told when there are no more."""
        new = [number for number in range(_MOST_TOLD) if number not in self.facts]
        if not new:
            return self.facts[self.dice.pick(list(self.facts))].told
        number = self.dice.pick(new)
        self.facts[number] = self.told.new_fact(self.name, number)
        return self.facts[number].told

    # --- sampling and interruption ---

    def _sampling(self) -> dict[str, Any]:
        dice = self.dice
        sampling: dict[str, Any] = {"max_tokens": dice.pick([1, 4, 6, 8, 10, 12, 16, 24])}
        if dice.chance(0.25):  # numbers that 32 bits hold exactly
            sampling |= {"temperature": dice.pick([0.5, 0.75, 1.0, 1.25]), "seed": dice.below(1 << 31)}
            sampling |= dice.pick([{}, {"top_p": 0.875}, {"top_k": 20}, {"min_p": 0.0625}])
        if dice.chance(0.1):
            sampling |= {"repetition_penalty": 1.25, "repetition_tokens": dice.pick([8, 64])}
        if dice.chance(0.1):
            sampling |= dice.pick([{"frequency_penalty": 0.5}, {"presence_penalty": 1.5}])
        if dice.chance(0.05):
            sampling["logit_bias"] = {dice.below(_VOCABULARY): -100.0, dice.below(_VOCABULARY): 2.5}
        if dice.chance(0.1):
            sampling["stop"] = [dice.pick([".", " is", "told", "er"])]
        return sampling

    def _cut(self, sampling: dict[str, Any]) -> Cut:
        dice = self.dice
        at = dice.pick(["started", "prefill", "tokens", "tokens", "deadline"])
        return Cut(
            at,
            how="disconnect" if dice.chance(0.25) else "close",
            tokens=dice.between(1, max(sampling["max_tokens"] // 2, 1)),
            after_s=0.02 + 0.5 * dice.random() ** 2,
            keep_partial=dice.chance(0.4),
        )
