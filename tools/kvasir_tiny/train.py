"""Trains kvasir-tiny: `python -m tools.kvasir_tiny.train OUT`, on one GPU (or, for a test, on a CPU).

First short conversations alone, until recall appears (none where it goes on from a model that recalls); then long
ones up to the context, with short ones beside them; later with keys and values rounded to 4 bits in a third of the
steps. The course of the learning rate follows the time limit, or the number of steps if there is none."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from inference_svc.model.kvasir_tiny import path
from tools.kvasir_tiny import desk, network, rows
from tools.kvasir_tiny.everyday import daily_life, training
from tools.kvasir_tiny.exams import name_exam
from tools.kvasir_tiny.network import Array, Numbers, Shape, Weights
from tools.kvasir_tiny.rows import Batch


@dataclass(frozen=True)
class Sizes:
    """How much each examination asks: rows, or names; and rows in one forward pass."""

    classic: int = 16
    everyday: int = 24
    names: tuple[tuple[int, int], ...] = ((300, 1024), (1500, 3072), (4000, 5120))  # length, room in a row
    names_each: int = name_exam.NAMES
    at_once: int = 8
    is_asked_often: bool = True  # at every checkpoint, not at the end alone


SIZES = Sizes()
BUCKETS = (300, 1500, 4000, 7500, 8192)
_WEIGHT_DECAY = 0.1  # of all weights but norms


@dataclass(frozen=True)
class Plan:
    """Everything that decides the weights."""

    steps: int = 4000
    warm_up: int = 100
    time_limit_s: float = math.inf  # of training; the last step ends a little later
    short_steps: int = 320  # steps with short rows alone
    rounded_from: float = 0.3  # from this share of the course on, every third step rounds keys and values to 4 bits
    short: tuple[int, int] = (256, 1024)  # rows, length: while they are alone
    mixed: tuple[tuple[int, int], ...] = ((16, 8192), (32, 2048), (64, 1024))
    learning_rate: float = 1.5e-3
    final_rate: float = 0.01  # of the learning rate
    averaged: float = 0.01  # how much of each step's weights goes into their mean
    other_text: float = 0.02  # weight of the text that the model does not have to say
    seed: int = 1
    first_row: int = 0
    shape: Shape = field(default_factory=Shape)


@dataclass
class State:
    """Weights, Adam's two moments, and the mean of the last steps' weights where that is kept."""

    weights: Weights
    mean: Weights
    square: Weights
    average: Weights = field(default_factory=dict)


jax.tree_util.register_dataclass(State, ["weights", "mean", "square", "average"], [])


@dataclass
class Run:
    """A run so far: the state after `step` steps, and what they took."""

    state: State
    step: int = 0
    spent_s: float = 0.0
    tokens: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begun(cls, weights: Weights) -> Run:
        moments = ({name: jnp.zeros_like(array) for name, array in weights.items()} for _ in range(2))
        return cls(State(weights, *moments))


def loss(weights: Weights, groups: tuple[tuple[Array, Array], ...], plan: Plan, rounding: Array) -> tuple[Array, Array]:
    """The training loss; and, for the log, the mean over learned tokens alone."""
    total = jnp.zeros(4)
    for ids, learned in groups:
        scores = network.logits(weights, ids[:, :-1].astype(jnp.int32), plan.shape, rounding)
        total += entropies(scores, ids, learned, plan)
    return means(total)


def entropies(scores: Array, ids: Array, learned: Array, plan: Plan) -> Array:
    """Sums over the next tokens [4]: entropy by weight, the weights; entropy of learned tokens, and their number."""
    targets, mask = ids[:, 1:].astype(jnp.int32), learned[:, 1:].astype(jnp.float32)
    entropy = cross_entropy(scores, targets)
    weight = jnp.where(targets == rows.PADDING, 0.0, jnp.maximum(mask, plan.other_text))
    return jnp.stack([(entropy * weight).sum(), weight.sum(), (entropy * mask).sum(), mask.sum()])


def means(total: Array) -> tuple[Array, Array]:
    return total[0] / total[1], total[2] / jnp.maximum(total[3], 1.0)


def cross_entropy(scores: Array, targets: Numbers) -> Array:
    return jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]


def update(
    state: State, groups: Any, step: Array, course: Array, rounding: Array, plan: Plan, of: Callable[..., Any] = loss
) -> tuple[State, Array]:
    """One step by a loss; `course` is the share of the training that is over."""
    (_, seen), gradient = jax.value_and_grad(of, has_aux=True)(state.weights, groups, plan, rounding)
    state, sizes = adam(state, gradient, step, course, plan)
    return state, jnp.concatenate([jnp.atleast_1d(seen), sizes])


def adam(state: State, gradient: Weights, step: Array, course: Array, plan: Plan) -> tuple[State, Array]:
    """AdamW with clipped gradients; for the log the gradient's size and the rate."""
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in gradient.values()))
    gradient = {name: g / jnp.maximum(size, 1.0) for name, g in gradient.items()}
    rate, t = learning_rate(step, course, plan), step + 1.0
    new = State({}, {}, {})
    for name, g in gradient.items():
        mean = 0.9 * state.mean[name] + 0.1 * g
        square = 0.95 * state.square[name] + 0.05 * g * g
        direction = mean / (1 - 0.9**t) / (jnp.sqrt(square / (1 - 0.95**t)) + 1e-8)
        decay = 0.0 if "norm" in name else _WEIGHT_DECAY
        new.weights[name] = state.weights[name] - rate * (direction + decay * state.weights[name])
        new.mean[name], new.square[name] = mean, square
    for name, kept in state.average.items():
        new.average[name] = kept + plan.averaged * (new.weights[name] - kept)
    return new, jnp.stack([size, rate])


def learning_rate(step: Array, course: Array, plan: Plan) -> Array:
    """A short rise, then a cosine."""
    cosine = plan.final_rate + (1 - plan.final_rate) * 0.5 * (1 + jnp.cos(math.pi * jnp.minimum(course, 1.0)))
    return plan.learning_rate * cosine * jnp.minimum(1.0, (step + 1) / plan.warm_up)


def batches(plan: Plan) -> Iterator[tuple[Batch, ...]]:
    """The rows of every step: each row has a seed of its own."""
    seed = plan.first_row
    for step in range(plan.steps):
        group = (plan.short,) if step < plan.short_steps else plan.mixed
        made = []
        for count, length in group:
            made.append(Batch(seed, count, length))
            seed += count
        yield tuple(made)


def steps(
    plan: Plan,
    run: Run,
    groups: Iterable[Any],
    of: Callable[..., Any],
    size_of: Callable[[Any], int],
    until: int | None = None,
) -> Iterator[tuple[Array, bool]]:
    """Go on by a loss until the plan's end, or for `until` steps in all. After each step its numbers for the log, and
    whether it was the last. The time of training begins behind the first step, which is compiled."""
    step_once = jax.jit(partial(update, plan=plan, of=of), donate_argnums=0)
    began = math.inf
    for group in groups:
        spent_s = max(run.spent_s, time.monotonic() - began)  # what waits for its rows counts
        course = course_of(plan, run.step, spent_s)
        rounding = float(course >= plan.rounded_from and run.step % 3 == 2)
        run.state, numbers = step_once(run.state, group, *map(jnp.float32, (run.step, course, rounding)))
        if began == math.inf:  # the first step was compiled, which takes minutes where processors are few
            numbers.block_until_ready()
            began = time.monotonic() - run.spent_s
        run.tokens += sum(map(size_of, group))
        run.step, run.spent_s = run.step + 1, time.monotonic() - began
        is_last = run.step in (plan.steps, until) or run.spent_s > plan.time_limit_s
        yield numbers, is_last
        if is_last:
            return


def course_of(plan: Plan, step: int, spent_s: float) -> float:
    """The share of the training that is over."""
    return step / plan.steps if plan.time_limit_s == math.inf else spent_s / plan.time_limit_s


def note(run: Run, step: int, names: Sequence[str], numbers: Array) -> None:
    """Add a step to the log. Raises SystemExit where the loss is not finite."""
    found = dict(zip(names, map(float, numbers), strict=True))
    run.log.append({"step": step, **found, "tokens": run.tokens, "seconds": run.spent_s})
    print(json.dumps(run.log[-1]), flush=True)
    if not math.isfinite(found["loss"] + found.get("masks", 0.0)):
        raise SystemExit("the loss is not finite: start again with a lower --learning-rate, in another OUT")


def train(
    plan: Plan, out: Path, processes: int, start: Path | None = None, every_s: float = 120.0, sizes: Sizes = SIZES
) -> Weights:
    """Run the plan; every `every_s` seconds write a checkpoint, one line of evaluation and `log.json`."""
    run = Run.begun(network.load(start, Shape)[0] if start else network.initial(plan.shape, plan.seed))
    folder = out if (out / "tokenizer.json").exists() else path()
    examination, saved = Examination(plan, folder, sizes), 0.0
    made = rows.stream(batches(plan), folder, processes, rows.make)
    for numbers, is_last in steps(plan, run, made, loss, lambda each: each[0].size):
        is_kept = is_last or run.spent_s - saved > every_s
        if is_kept or run.step % 20 == 1:
            note(run, run.step - 1, ("loss", "gradient", "rate"), numbers)
        if is_kept:
            saved = run.spent_s
            network.save(run.state.weights, plan.shape, out)
            if is_last or sizes.is_asked_often:
                run.log[-1]["exact"] = examination.take(run.state.weights)
                print(f"  exact {json.dumps(run.log[-1]['exact'])}", flush=True)
            (out / "log.json").write_text(text_of_log(plan, run.log))
    return run.state.weights


def text_of_log(plan: Plan, log: list[dict[str, Any]]) -> str:
    """The log as JSON, a line for each entry."""
    heads = {name: None if value == math.inf else value for name, value in asdict(plan).items()}
    lines = ",\n".join(json.dumps(entry) for entry in log)
    return f'{{"plan": {json.dumps(heads)}, "log": [\n{lines}\n]}}\n'


class Examination:
    """Replies in held-out conversations, right to the last token, by sort and by where they stand.

    Every token is predicted from the true ones before it: a reply is exact here if and only if greedy decoding would
    have written it."""

    def __init__(self, plan: Plan, folder: Path, sizes: Sizes) -> None:
        encoder = rows.encoder_of(folder)
        self._decode, self._at_once, self._folder = encoder.decode, sizes.at_once, folder
        self._score = jax.jit(lambda w, ids, r: network.logits(w, ids, plan.shape, r).argmax(-1))
        longest = max(length for _, length in plan.mixed)
        self._sets = [("", rows.make(Batch(10**8, sizes.classic, longest, held_out=True), folder))]
        talks = [daily_life.conversation(10**6 + n, 1500, count=encoder.count) for n in range(sizes.everyday)]
        talks = [replace(talk, questions=talk.questions[-40:]) for talk in talks]
        self._sets.append(("everyday", rows.of_conversations(talks, 3072, folder)))
        scenes = [training.scene(10**8 + n, 1500, encoder.count) for n in range(sizes.everyday)]
        scenes = [replace(scene, questions=[]) for scene in scenes]
        self._sets.append(("scene", rows.of_conversations(scenes, 3072, folder, with_replies=True)))
        visits = [training.visit(10**8 + n, 1000, encoder.count, held_out=True) for n in range(sizes.everyday)]
        visits = [replace(visit, questions=[]) for visit in visits]
        self._sets.append(("visit", rows.of_conversations(visits, 3072, folder, with_replies=True)))
        for length, room in sizes.names:
            told = list(name_exam.conversations(length, encoder.count, sizes.names_each))
            self._sets.append((f"name at {length}", rows.of_conversations(told, room, folder)))

    def add(self, group: str, talks: Sequence[desk.Conversation], room: int) -> None:
        """Examine the learned replies of more conversations too, in rows of `room` tokens."""
        self._sets.append((group, rows.of_conversations(talks, room, self._folder, with_replies=True)))

    def take(self, weights: Weights) -> dict[str, str]:
        """Right and asked, by sort; "q4" is with keys and values in 4 bits."""
        found: dict[str, str] = {}
        for rounding, label in ((0.0, ""), (1.0, "q4 ")):
            right: dict[str, list[bool]] = {}
            for group, (ids, learned) in self._sets:
                guesses = self._guesses(weights, ids.astype(np.int32), rounding)
                for row, first, end in _replies(learned):
                    name = self._name(group, ids[row, first:end].tolist(), first)
                    is_right = bool((guesses[row, first - 1 : end - 1] == ids[row, first:end]).all())
                    right.setdefault(name, []).append(is_right)
            found |= {
                f"{label}{name}": f"{sum(ok)}/{len(ok)}={sum(ok) / len(ok):.3f}" for name, ok in sorted(right.items())
            }
        return found

    def _guesses(self, weights: Weights, ids: npt.NDArray[np.int32], rounding: float) -> npt.NDArray[np.int32]:
        parts = []
        for first in range(0, len(ids), self._at_once):
            part = ids[first : first + self._at_once, :-1]
            whole = np.pad(part, ((0, self._at_once - len(part)), (0, 0)))
            parts.append(np.asarray(self._score(weights, whole, jnp.float32(rounding)))[: len(part)])
        return np.concatenate(parts)

    def _name(self, group: str, reply: list[int], first: int) -> str:
        text = self._decode(reply)
        if text.startswith("I was not told"):
            return f"{group} not_told".strip()
        if group:
            return group
        if text.startswith("The passage does not"):
            return "passage_not"
        if text.startswith("<tool_call>"):
            return "tool"
        return "short" if len(reply) < 8 else f"told<{next(b for b in BUCKETS if first < b or b == BUCKETS[-1])}"


def _replies(learned: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Row, first and last + 1 of each learned reply."""
    for row, mask in enumerate(learned):
        edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
        for first, end in zip(edges[::2], edges[1::2], strict=False):
            yield row, int(first), int(end)


def prepare(out: Path) -> None:
    """Copy the shipped tokenizer and template to the directory of a new model."""
    out.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if not (out / file).exists():
            shutil.copy(path() / file, out / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the model's directory to write")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="if there is no time limit")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--first-row", type=int, default=Plan.first_row, help="seed of the first training conversation")
    parser.add_argument("--short-steps", type=int, default=Plan.short_steps)
    parser.add_argument("--rounded-from", type=float, default=Plan.rounded_from)
    parser.add_argument("--learning-rate", type=float, default=Plan.learning_rate)
    parser.add_argument("--warm-up", type=int, default=Plan.warm_up)
    parser.add_argument("--start", type=Path, help="go on from this model instead of random weights")
    parser.add_argument("--processes", type=int, default=12, help="how many make training rows")
    parser.add_argument("--every-s", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="seconds of training, instead of --steps")
    parser.add_argument("--short-run", action="store_true", help="more short rows, and one examination, at the end")
    parser.add_argument("--smoke", action="store_true", help="rows and examinations as small as a CPU can do")
    given = vars(parser.parse_args())
    out, start, smoke = given.pop("out"), given.pop("start"), given.pop("smoke")
    is_short = given.pop("short_run")
    processes, every_s = given.pop("processes"), given.pop("every_s")
    plan, sizes = Plan(**given), SIZES
    if given["time_limit_s"] < math.inf:
        plan = replace(plan, steps=10**6)
    if is_short:
        plan = replace(plan, mixed=((8, 8192), (32, 2048), (128, 1024)))
        sizes = replace(sizes, classic=8, is_asked_often=False)
    if smoke:
        plan = replace(plan, mixed=((1, 512), (2, 256)), short=(4, 256))
        sizes = Sizes(classic=1, everyday=1, names=((300, 1024),), names_each=10, at_once=2)
    prepare(out)
    print(f"{sys.version.split()[0]} jax {jax.__version__} {jax.devices()}", flush=True)
    train(plan, out, processes, start, every_s, sizes)


if __name__ == "__main__":
    main()
