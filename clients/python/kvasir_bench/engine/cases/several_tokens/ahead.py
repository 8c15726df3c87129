"""What drafts bring: replies of agents' kinds, played token by token through the model, with drafts and without.

The model computes every row, and costs what it costs; its own tokens are dropped, and the given reply's are taken. So a
model of any weights replays what agents say, and a draft is right where the agent's reply has it. Arguments whose
format forces most tokens are not played: the model draws them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from kvasir.errors import KvasirError

from inference_svc.engine import decoding, prefilling
from inference_svc.engine.api import Hot
from inference_svc.engine.sampling import Drawn, Draws, Sampler
from inference_svc.formats.constraint import Constraint, ConstraintKind
from kvasir_bench.arithmetic import Target, medians
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Row

_BATCHES = (1, 8)
_REPLY_TOKENS, _PROMPT_TOKENS = 96, 512
_FORMAT, _TASK = "format", "one task"
TEXTS = ("code", "calls", "talk", "new words", _FORMAT, _TASK)
# What drafts must bring to so many rows, by text.
_TARGETS = {("code", 1): 2.0, ("code", 8): 1.5, ("new words", 1): 0.98, ("new words", 8): 0.98}


@dataclass(frozen=True)
class _Talk:
    """A turn's prompt and its reply; none, where the model draws what its format allows."""

    prompt: Sequence[int]
    reply: Sequence[int] = ()
    constraint: Constraint | None = None
    beside: Sequence[int] = ()  # an agent of the same namespace has it in memory


class _Played(Draws):
    """Draws of which nothing is taken but their time: the seed of a sampler is the number of the given reply."""

    replies: Mapping[int, Sequence[int]] = {}
    said: dict[int, int] = {}  # noqa: RUF012 - how much of each; set with the replies

    def read_drafted(self) -> list[list[Drawn | KvasirError]]:
        drawn = super().read_drafted()
        return [
            self._next(sampler, tried) if sampler.seed in self.said else tokens
            for sampler, tried, tokens in zip(self._samplers, self._drafts, drawn, strict=True)
        ]

    def _next(self, sampler: Sampler, drafts: Sequence[int]) -> list[Drawn | KvasirError]:
        reply, first = self.replies[sampler.seed], self.said[sampler.seed]
        right = next((n for n, token in enumerate(drafts) if token != reply[first + n]), len(drafts))
        self.said[sampler.seed] = first + right + 1
        return [Drawn(token) for token in reply[first : first + right + 1]]


@contextmanager
def _playing(talks: Sequence[_Talk]) -> Iterator[None]:
    """Meanwhile, turns with the seeds 1, 2, … generate the replies of these talks."""
    _Played.replies = {number: talk.reply for number, talk in enumerate(talks, 1) if talk.reply}
    _Played.said = dict.fromkeys(_Played.replies, 0)
    modules: tuple[Any, ...] = (decoding, prefilling)
    for module in modules:
        module.Draws = _Played
    try:
        yield
    finally:
        for module in modules:
            module.Draws = Draws


def run(lab: Lab) -> Case:
    batches = lab.batches((1, 2), _BATCHES)
    rows = lab.pace.rows(lab.scope.texts or TEXTS, lambda text: _rows(lab, text, batches))
    found = {(row["text"], row["batch"]): row["ratio"] for row in rows}
    targets = [
        Target(f"{text}, {batch} rows, with drafts / without", found[text, batch], least)
        for (text, batch), least in _TARGETS.items()
        if (text, batch) in found
    ]
    return Case("Tokens ahead", rows, targets)


def _rows(lab: Lab, text: str, batches: Sequence[int]) -> Iterator[Row]:
    talks = [_talk(lab, text, number) for number in range(max(batches))]
    prompts = [lab.agents.remember(talk.prompt) for talk in talks]
    try:
        yield from (_row(lab, text, talks[:batch], prompts[:batch]) for batch in batches)
    finally:
        lab.agents.forget(prompts)


def _row(lab: Lab, text: str, talks: Sequence[_Talk], prompts: Sequence[LabMemory]) -> Row:
    batch = len(talks)
    rounds = lab.pace.counted(
        f"{text}, {batch} rows", lambda: [_measured(lab, talks, prompts, most_drafts) for most_drafts in (0, 16, 0)]
    )
    rates = (
        {"plain_tokens_per_s": plain, "drafted_tokens_per_s": drafted, "ratio": drafted / plain}
        for plain, drafted in (((before + behind) / 2, drafted) for (before, *_), (drafted, *_), (behind, *_) in rounds)
    )
    _, tried, right = rounds[-1][1]
    return {
        "text": text,
        "batch": batch,
        **medians(rates, "ratio"),
        "drafts_tried": tried,
        "accepted": right / tried if tried else 0.0,
        "steps_saved": right / (batch * _reply_tokens(lab)),
    }


def _measured(
    lab: Lab, talks: Sequence[_Talk], prompts: Sequence[LabMemory], most_drafts: int
) -> tuple[float, int, int]:
    """Tokens per second, and how many drafts were tried and right. `prompts`: memories of them, because rows that
    decode while others' prompts are computed would be another load."""
    memories = [lab.agents.fork(memory) for memory in prompts]
    others = [lab.agents.remember(talk.beside) for talk in talks if talk.beside]
    try:
        with _playing(talks):
            runs = [
                lab.start(
                    (*memory.tokens[: len(talk.prompt) - 1], talk.prompt[-1]),
                    _reply_tokens(lab),
                    Hot(len(talk.prompt) - 1),
                    memory.key,
                    namespace=memory.key.namespace if talk.beside else None,
                    seed=number,
                    most_drafts=most_drafts,
                    constraint=talk.constraint,
                )
                for number, (memory, talk) in enumerate(zip(memories, talks, strict=True), 1)
            ]
            ends = [each.end() for each in runs]
    finally:
        lab.agents.forget([*memories, *others])
    tried, right = (
        sum(counts) for counts in zip(*((e.drafted_tokens, e.accepted_draft_tokens) for e in ends), strict=True)
    )
    times = [time_s for each in runs for time_s in each.token_times]
    # Not while all decode together: with drafts a row may end before the last one begins.
    return (len(times) - 1) / (max(times) - min(times)), tried, right


def _reply_tokens(lab: Lab) -> int:
    return 48 if lab.scope.is_quick else _REPLY_TOKENS


def _talk(lab: Lab, text: str, number: int) -> _Talk:
    """A prompt and a reply of a kind; of each number others."""
    reply_tokens = _reply_tokens(lab)
    prompt_tokens = lab.shortened(256 if lab.scope.is_quick else _PROMPT_TOKENS, reply_tokens + 64)
    if text == "new words":
        drawn = np.random.default_rng(number).integers(3, lab.engine.vocabulary_size - 2, prompt_tokens + reply_tokens)
        return _Talk(drawn[:prompt_tokens].tolist(), drawn[prompt_tokens:].tolist())
    encode, beside = lab.engine.tokenizer.encode, []
    if text == _FORMAT:
        return _Talk(list(lab.prompts.tokens(prompt_tokens, number)), constraint=_call_format(number))
    if text == "talk":
        read = list(lab.prompts.tokens(prompt_tokens, number))
        lines = lab.engine.tokenizer.decode(read).splitlines()[number % 3 :: 3]
        said = " ".join(f"You told me: {line} Is that still so?" for line in lines)
    else:
        code = _code_of(number)
        read = encode(code)[:prompt_tokens]
        said = _edited(lab.engine.tokenizer.decode(read), number)
        if text == _TASK:
            beside = encode(_edited(lab.engine.tokenizer.decode(read), number + 1))
            read = list(lab.prompts.tokens(prompt_tokens, number))
        if text == "calls":
            lines = said.splitlines()[:: 2 + number % 2]
            said = "\n".join(json.dumps({"name": "edit", "path": f"src/{number}.py", "old": line}) for line in lines)
    reply = list(islice(cycle(encode(said, add_special_tokens=False)), reply_tokens))
    return _Talk(read, reply, beside=beside)


def _call_format(number: int) -> Constraint:
    """Of a tool's arguments, each with a name of its own."""
    names = [f"{word}_{place}" for place in range(40) for word in ("path_of_the_file", "kind", "first_line", "reason")]
    names = names[number % 4 :]
    either = {"enum": ["yes", "no"]}
    schema = {"type": "object", "properties": dict.fromkeys(names, either), "required": names}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({**schema, "additionalProperties": False}))


def _code_of(number: int) -> str:
    """A source file of this package, with its lines from another one on for each number."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    lines = files[number % len(files)].read_text("utf-8").splitlines(keepends=True) * 20
    return "".join(lines[number:])


def _edited(code: str, number: int) -> str:
    """The code as an agent gives it back: every eighth line is another, and two names are."""
    lines = code.replace("self", "this").replace("number", "index").splitlines()
    return "\n".join(f"{line}  # {number + place}" if place % 8 == 7 else line for place, line in enumerate(lines))
