"""Trains kvasir-tiny: `python -m tools.kvasir_tiny.train OUT`, on one GPU (or, for a test, on a CPU).

First short conversations alone, until recall appears; then conversations as long as the context, with short ones beside
them; at last with keys and values rounded to 4 bits in half of the steps, as the product keeps them.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from inference_svc.model.kvasir_tiny import path
from tools.kvasir_tiny import network, rows, tokenizer
from tools.kvasir_tiny.network import Array, Shape, Weights
from tools.kvasir_tiny.rows import Batch

BUCKETS = (300, 1500, 4000, 7500, 8192)


@dataclass(frozen=True)
class Plan:
    """Everything that decides the weights."""

    steps: int = 4000
    warm_up: int = 100
    short_steps: float = 0.08  # share of steps with short rows alone
    rounded_from: float = 0.6  # from this share on, every second step rounds keys and values to 4 bits
    short: tuple[int, int] = (256, 1024)  # rows, length: while they are alone
    mixed: tuple[tuple[int, int], ...] = ((24, 8192), (64, 1024))
    learning_rate: float = 2e-3
    final_rate: float = 0.01  # of the learning rate
    weight_decay: float = 0.1
    other_text: float = 0.02  # weight of the text that the model does not have to say
    seed: int = 1
    first_row: int = 0
    shape: Shape = field(default_factory=Shape)


@dataclass
class State:
    """Weights and Adam's two moments."""

    weights: Weights
    mean: Weights
    square: Weights


jax.tree_util.register_dataclass(State, ["weights", "mean", "square"], [])


def loss(weights: Weights, groups: tuple[tuple[Array, Array], ...], plan: Plan, rounding: Array) -> tuple[Array, Array]:
    """The training loss; and, for the log, the mean over learned tokens alone."""
    total = weight_sum = said = said_sum = jnp.zeros(())
    for ids, learned in groups:
        inputs, targets = ids[:, :-1].astype(jnp.int32), ids[:, 1:].astype(jnp.int32)
        scores = network.logits(weights, inputs, plan.shape, rounding)
        entropy = jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        mask = learned[:, 1:].astype(jnp.float32)
        weight = jnp.where(targets == rows.PADDING, 0.0, jnp.maximum(mask, plan.other_text))
        total, weight_sum = total + (entropy * weight).sum(), weight_sum + weight.sum()
        said, said_sum = said + (entropy * mask).sum(), said_sum + mask.sum()
    return total / weight_sum, said / jnp.maximum(said_sum, 1.0)


def update(
    state: State, groups: tuple[tuple[Array, Array], ...], step: Array, rounding: Array, plan: Plan
) -> tuple[State, Array]:
    """One step of AdamW with clipped gradients."""
    (_, said), gradient = jax.value_and_grad(loss, has_aux=True)(state.weights, groups, plan, rounding)
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in gradient.values()))
    gradient = {name: g / jnp.maximum(size, 1.0) for name, g in gradient.items()}
    rate, t = learning_rate(step, plan), step + 1.0
    new = State({}, {}, {})
    for name, g in gradient.items():
        mean = 0.9 * state.mean[name] + 0.1 * g
        square = 0.95 * state.square[name] + 0.05 * g * g
        direction = mean / (1 - 0.9**t) / (jnp.sqrt(square / (1 - 0.95**t)) + 1e-8)
        decay = 0.0 if "norm" in name else plan.weight_decay
        new.weights[name] = state.weights[name] - rate * (direction + decay * state.weights[name])
        new.mean[name], new.square[name] = mean, square
    return new, jnp.stack([said, size, rate])


def learning_rate(step: Array, plan: Plan) -> Array:
    """A short rise, then a cosine."""
    course = jnp.clip((step - plan.warm_up) / max(1, plan.steps - plan.warm_up), 0.0, 1.0)
    cosine = plan.final_rate + (1 - plan.final_rate) * 0.5 * (1 + jnp.cos(math.pi * course))
    return plan.learning_rate * cosine * jnp.minimum(1.0, (step + 1) / plan.warm_up)


def batches(plan: Plan) -> Iterator[tuple[Batch, ...]]:
    """The rows of every step: each row has a seed of its own."""
    seed = plan.first_row
    for step in range(plan.steps):
        group = (plan.short,) if step < plan.short_steps * plan.steps else plan.mixed
        made = []
        for count, length in group:
            made.append(Batch(seed, count, length))
            seed += count
        yield tuple(made)


def train(
    plan: Plan, out: Path, processes: int, start: Path | None = None, every: int = 200, deadline_s: float = math.inf
) -> Weights:
    """Run the plan; write a checkpoint and one line of evaluation every `every` steps, and `log.json` at the end."""
    weights = network.load(start)[0] if start else network.initial(plan.shape, plan.seed)
    state = State(weights, _zeros(weights), _zeros(weights))
    step_once = jax.jit(lambda s, g, n, r: update(s, g, n, r, plan), donate_argnums=0)
    folder = out if (out / "tokenizer.json").exists() else path()
    examination = Examination(plan, folder, processes)
    log: list[dict[str, Any]] = []
    began, tokens = time.monotonic(), 0
    for step, group in enumerate(rows.stream(batches(plan), folder, processes)):
        rounding = float(step >= plan.rounded_from * plan.steps and step % 2)
        state, numbers = step_once(state, group, jnp.float32(step), jnp.float32(rounding))
        tokens += sum(ids.size for ids, _ in group)
        last = step + 1 == plan.steps or time.monotonic() - began > deadline_s
        checkpoint = last or (step + 1) % every == 0
        if step % 20 == 0 or checkpoint:
            said, size, rate = (float(x) for x in numbers)
            spent = time.monotonic() - began
            log.append({"step": step, "loss": said, "gradient": size, "rate": rate, "tokens": tokens, "seconds": spent})
            print(
                f"step {step} loss {said:.4f} |g| {size:.2f} rate {rate:.2e} {tokens / 1e6:.0f} M tokens {spent:.0f} s",
                flush=True,
            )
            if not math.isfinite(said):
                raise SystemExit("the loss is not finite")
        if checkpoint:
            network.save(state.weights, plan.shape, out)
            found = examination.take(state.weights)
            log[-1]["exact"] = found
            print(f"  exact {json.dumps(found)}", flush=True)
            (out / "log.json").write_text(json.dumps({"plan": asdict(plan), "log": log}, indent=1) + "\n")
        if last:
            break
    return state.weights


def _zeros(weights: Weights) -> Weights:
    return {name: jnp.zeros_like(array) for name, array in weights.items()}


class Examination:
    """Replies in held-out conversations, right to the last token, by sort and by where they stand.

    Every token is predicted from the true ones before it: a reply is exact here if and only if greedy decoding would
    have written it.
    """

    def __init__(self, plan: Plan, folder: Path, processes: int) -> None:
        length = max(length for _, length in plan.mixed)
        self._rows = rows.make(Batch(10**8, 24 if processes else 1, length, held_out=True), folder)
        self._encoder = tokenizer.load(folder)
        self._score = jax.jit(lambda w, ids, r: network.logits(w, ids, plan.shape, r).argmax(-1))
        self._replies = self._find(*self._rows)

    def _find(self, ids: npt.NDArray[np.uint16], learned: npt.NDArray[np.bool_]) -> list[tuple[int, int, int, str]]:
        """Row, first and last + 1 of each learned reply, and its sort."""
        found = []
        for row, mask in enumerate(learned):
            edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
            for first, end in zip(edges[::2], edges[1::2], strict=False):
                found.append((row, int(first), int(end), self._sort(ids[row, first:end].tolist())))
        return found

    def _sort(self, reply: list[int]) -> str:
        text = self._encoder.decode(reply)
        if text.startswith("I was not told"):
            return "not_told"
        if text.startswith("The passage does not"):
            return "passage_not"
        if text.startswith("<tool_call>"):
            return "tool"
        return "short" if len(reply) < 8 else "told"

    def take(self, weights: Weights) -> dict[str, str]:
        found: dict[str, str] = {}
        ids = self._rows[0].astype(np.int32)
        for rounding, label in ((0.0, ""), (1.0, "q4 ")):
            guesses = np.concatenate(
                [
                    np.asarray(self._score(weights, ids[i : i + 8, :-1], jnp.float32(rounding)))
                    for i in range(0, len(ids), 8)
                ]
            )
            right: dict[str, list[bool]] = {}
            for row, first, end, sort in self._replies:
                name = sort
                if sort == "told":
                    name = f"told<{next(b for b in BUCKETS if first < b or b == BUCKETS[-1])}"
                right.setdefault(name, []).append(
                    bool((guesses[row, first - 1 : end - 1] == ids[row, first:end]).all())
                )
            found |= {
                f"{label}{name}": f"{sum(ok)}/{len(ok)}={sum(ok) / len(ok):.3f}" for name, ok in sorted(right.items())
            }
        return found


def prepare(out: Path) -> None:
    """Copy the shipped tokenizer and template to the directory of a new model."""
    out.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if not (out / file).exists():
            shutil.copy(path() / file, out / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the model's directory to write")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--first-row", type=int, default=Plan.first_row, help="seed of the first training conversation")
    parser.add_argument("--short-steps", type=float, default=Plan.short_steps)
    parser.add_argument("--rounded-from", type=float, default=Plan.rounded_from)
    parser.add_argument("--learning-rate", type=float, default=Plan.learning_rate)
    parser.add_argument("--warm-up", type=int, default=Plan.warm_up)
    parser.add_argument("--start", type=Path, help="go on from this model instead of random weights")
    parser.add_argument("--processes", type=int, default=12, help="how many make training rows")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which the run stops early")
    given = vars(parser.parse_args())
    out, start, deadline = given.pop("out"), given.pop("start"), given.pop("deadline")
    processes, every = given.pop("processes"), given.pop("every")
    prepare(out)
    print(f"{sys.version.split()[0]} jax {jax.__version__} {jax.devices()}", flush=True)
    train(Plan(**given), out, processes, start, every, deadline)


if __name__ == "__main__":
    main()
