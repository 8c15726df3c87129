"""Examines kvasir-tiny and editions of kvasir-tiny-wedlm, to choose one:
`python -m tools.kvasir_tiny.wedlm.exam MODEL...`.

One JSON object, by model. "exact": greedy replies token by token, right to the last token, with the trainer's
examination, long summaries and first exchanges in it; "q4" is with keys and values in 4 bits. "windows": the same
summaries and first exchanges (without JSON and forced calls) decoded by windows of masks, with tokens a pass and passes
a reply. Both are computed by JAX: a minute on a GPU. "first" and "recall" are decoded by mlx-lm within grammars, up to
7,500 tokens: on a CPU a quarter of an hour. A file of weights is examined as the shipped kvasir-tiny-wedlm with these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inference_svc.model import kvasir_tiny
from inference_svc.model.wedlm import LARGEST_WINDOW, MaskWindow
from tools.kvasir_tiny import network, rows, tokenizer, train
from tools.kvasir_tiny.desk import Conversation
from tools.kvasir_tiny.exams import first_exam
from tools.kvasir_tiny.exams.first_exam import Exchange
from tools.kvasir_tiny.network import Array, Weights
from tools.kvasir_tiny.wedlm import network as wedlm
from tools.kvasir_tiny.wedlm.network import MASK, WedlmShape, Windows

SUMMARIES = 35
LENGTHS_OF_SUMMARIES = range(64, 131)  # tokens
LONGEST_REPLY = 200
PARTS = ("exact", "windows", "first", "recall")
_ROOM, _ROOM_STEP = 768, 256  # tokens of an exchange with its reply
_WEIGHTS = "model.safetensors"


def summaries(n: int = SUMMARIES) -> Iterator[Exchange]:
    """The first `n` long summaries of the exam of first exchanges, in the order of their numbers."""
    count = rows.encoder_of(kvasir_tiny.path()).count
    asked = (first_exam.exchange("summaries", number, count) for number in itertools.count())
    return itertools.islice((each for each in asked if count(each.answer) in LENGTHS_OF_SUMMARIES), n)


def exchanges(share: float) -> dict[str, list[Exchange]]:
    """What needs no grammar, by group."""
    found = {"summaries of 64 to 130 tokens": list(summaries(max(1, round(SUMMARIES * share))))}
    for each in first_exam.exchanges(rows.encoder_of(kvasir_tiny.path()).count, share):
        if not each.schema and not each.tools:
            found.setdefault(f"first, {each.group}", []).append(each)
    return found


def talk_of(asked: Exchange) -> Conversation:
    """An exchange whose reply alone is learned."""
    said = [*asked.messages, _message("user", asked.question), _message("assistant", asked.answer)]
    return Conversation(0, "", said, [], [], [False] * (len(said) - 1) + [True])


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def folder_of(weights: Path, into: Path) -> Path:
    """A model's directory: `weights` itself, or the shipped one with this file of weights."""
    if weights.is_dir():
        return weights
    shipped = kvasir_tiny.shipped()[kvasir_tiny.WEDLM_NAME]
    shutil.copytree(shipped, into, ignore=shutil.ignore_patterns(_WEIGHTS))
    shutil.copy(weights, into / _WEIGHTS)
    return into


# -- by windows


@dataclass
class Reply:
    """A prompt with the tokens that were committed behind it."""

    ids: list[int]
    prompt: int
    passes: int = 0
    last: int | None = None  # tokens that the last pass committed


def decode(weights: Weights, shape: WedlmShape, window: MaskWindow, prompts: Iterable[list[int]]) -> list[Reply]:
    """Replies from left to right, as engines decode them; the clean stream is computed again in each pass."""
    guess = jax.jit(partial(_guesses, shape=shape, window=window))
    replies = [Reply(list(ids), len(ids)) for ids in prompts]
    end = rows.encoder_of(kvasir_tiny.path()).encode(tokenizer.END)[0]
    at_once = 48 if jax.default_backend() == "gpu" else 8
    left = sorted(replies, key=lambda reply: reply.prompt)
    while left:
        for first in range(0, len(left), at_once):
            part = left[first : first + at_once]
            room = -(-max(len(reply.ids) for reply in part) // _ROOM_STEP) * _ROOM_STEP
            ids, lengths = np.zeros((at_once, room), np.int32), np.ones(at_once, np.int32)
            for row, reply in enumerate(part):
                ids[row, : len(reply.ids)], lengths[row] = reply.ids, len(reply.ids)
            for reply, tokens, sure in zip(part, *map(np.asarray, guess(weights, ids, lengths)), strict=False):
                _commit(reply, tokens.tolist(), sure.tolist(), window, end)
        left = [each for each in left if each.ids[-1] != end and len(each.ids) < each.prompt + LONGEST_REPLY]
    return replies


def _guesses(
    weights: Weights, ids: Array, lengths: Array, *, shape: WedlmShape, window: MaskWindow
) -> tuple[Array, Array]:
    """Tokens by place [rows, size], and whether each is sure: of the last committed row, and of masks behind it."""
    places = jnp.arange(1, window.size)
    form = (len(ids), 1, window.size - 1)
    positions = jnp.broadcast_to(lengths[:, None, None] + places, form)
    clean, masked = wedlm.logits(
        weights, ids, Windows(jnp.full(form, MASK), positions, lengths[:, None]), shape, jnp.float32(0)
    )
    last = jnp.take_along_axis(clean, lengths[:, None, None] - 1, axis=1)
    scores = jnp.concatenate([last, masked[:, 0]], axis=1).at[..., MASK].set(-jnp.inf)
    chances = jax.nn.softmax(scores, axis=-1)
    entropies = -(chances * jnp.log(jnp.maximum(chances, 1e-30))).sum(-1)
    sure = entropies + window.position_penalty * jnp.arange(window.size) < window.entropy_threshold
    return scores.argmax(-1), sure.at[:, 0].set(True)


def _commit(reply: Reply, tokens: list[int], sure: list[bool], window: MaskWindow, end: int) -> None:
    """Those before the first unsure one, and up to an end token. A prompt's own pass gives the first token alone."""
    size = 1 if reply.last is None else min(window.size, window.size_behind(reply.last))
    run = [token for token, _ in itertools.takewhile(lambda each: each[1], zip(tokens[:size], sure, strict=False))]
    reply.ids += run[: run.index(end) + 1] if end in run else run
    reply.passes += reply.last is not None
    reply.last = LARGEST_WINDOW if reply.last is None else len(run)


# -- the command


class Examiner:
    """Puts the parts of the exam to one model after another; `share` of all questions."""

    def __init__(self, parts: list[str], share: float) -> None:
        self._parts, self._share, self._asked = parts, share, exchanges(share)
        self._examinations: dict[network.Shape, train.Examination] = {}

    def examine(self, folder: Path) -> dict[str, Any]:
        own = MaskWindow.of_config(json.loads((folder / "config.json").read_text()))
        found: dict[str, Any] = {}
        for part in self._parts:
            if part == "windows" and own is None:
                continue
            began = time.monotonic()
            found[part] = getattr(self, f"_{part}")(folder, own)
            print(f"{folder.name}: {part} {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return found

    def _of(self, n: int) -> int:
        return max(1, round(n * self._share))

    def _exact(self, folder: Path, own: MaskWindow | None) -> dict[str, str]:
        weights, shape = network.load(folder, WedlmShape if own else network.Shape)
        if shape not in self._examinations:
            few = {name: self._of(n) for name, n in (("classic", 8), ("everyday", 24), ("names_each", 300))}
            few["at_once"] = 8 if jax.default_backend() == "gpu" else 1  # a CPU holds all scores of long rows
            made = train.Examination(train.Plan(shape=shape), folder, replace(train.SIZES, **few))
            for group, asked in self._asked.items():
                made.add(group, [talk_of(each) for each in asked], _ROOM)
            self._examinations[shape] = made
        return self._examinations[shape].take(weights)

    def _windows(self, folder: Path, own: MaskWindow) -> dict[str, Any]:
        weights, shape = network.load(folder, WedlmShape)
        encoder = rows.encoder_of(kvasir_tiny.path())
        wanted = {group: [_prompt_and_reply(encoder, each) for each in asked] for group, asked in self._asked.items()}
        decoded = iter(decode(weights, shape, own, [prompt for each in wanted.values() for prompt, _ in each]))
        found: dict[str, Any] = {}
        for group, exchanges_of_group in wanted.items():
            replies = list(itertools.islice(decoded, len(exchanges_of_group)))
            both = zip(replies, exchanges_of_group, strict=True)
            right = sum(reply.ids == [*prompt, *ids] for reply, (prompt, ids) in both)
            passes, tokens = sum(each.passes for each in replies), sum(len(each.ids) - each.prompt for each in replies)
            found[group] = {
                "right": f"{right}/{len(replies)}",
                "tokens_per_pass": round(tokens / passes, 2),
                "passes_per_reply": round(passes / len(replies), 2),
            }
        return found

    def _first(self, folder: Path, own: MaskWindow | None) -> dict[str, Any]:
        from tools.kvasir_tiny import evaluate

        return self._by_mlx(folder, own, lambda reader, report: evaluate.examine_first(reader, self._share, report))

    def _recall(self, folder: Path, own: MaskWindow | None) -> dict[str, Any]:
        from tools.kvasir_tiny import evaluate

        def put(reader: Any, report: Any) -> None:
            for length in evaluate.LENGTHS:
                evaluate.examine(reader, length, self._of(20), report)
            for length in evaluate.NAME_LENGTHS:
                evaluate.examine_names(reader, length, self._of(40), report)
                evaluate.examine_everyday(reader, length, self._of(48), report)

        return self._by_mlx(folder, own, put)

    def _by_mlx(self, folder: Path, own: MaskWindow | None, put: Callable[[Any, Any], None]) -> dict[str, Any]:
        from tools.kvasir_tiny.evaluate import Reader, Report
        from tools.kvasir_tiny.wedlm.evaluate import WindowReader

        reader, report = WindowReader(folder, window=own) if own else Reader(folder), Report()
        reader.longest_reply = LONGEST_REPLY
        put(reader, report)
        found: dict[str, Any] = {name: f"{share.right}/{share.n}" for name, share in report.shares.items()}
        return found | (reader.passes.as_json() if isinstance(reader, WindowReader) else {}) | {"errors": report.errors}


def _prompt_and_reply(encoder: tokenizer.Encoder, asked: Exchange) -> tuple[list[int], list[int]]:
    ids, learned = encoder.conversation(talk_of(asked))
    first, end = learned.index(True), len(learned) - learned[::-1].index(True)
    return ids[:first], ids[first:end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="a directory, or a file of weights")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["exact", "windows"])
    parser.add_argument("--share", type=float, default=1.0, help="of the questions of each part")
    parser.add_argument("--out", type=Path, help="where the JSON goes, after each model; stdout otherwise")
    given = parser.parse_args()
    examiner, found = Examiner(given.parts, given.share), {}
    for model in given.models:
        with tempfile.TemporaryDirectory() as scratch:
            found[str(model)] = examiner.examine(folder_of(model, Path(scratch) / model.stem))
        if given.out:
            given.out.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    if not given.out:
        print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
