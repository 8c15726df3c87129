"""Trains kvasir-tiny-wedlm from kvasir-tiny or an earlier edition of itself, on one GPU:
`python -m tools.kvasir_tiny.wedlm.train OUT`.

The objective is WeDLM's: the tokens under a window's masks, beside the next tokens of the clean stream. Windows are cut
out of learned replies (`windows.py`), so the second stream costs a quarter of the first. A run that ended goes on with
the same command: `OUT/state.safetensors` holds weights, moments and the step. Without a time limit a run that was
interrupted ends with the bits of one that was not.

The model card beside kvasir-tiny's weights has the commands that made the shipped one on one H100, and its results. Its
steps read 262,144 tokens and no recitals; one with a window of 16 for each 128 tokens took 0.27 s, for each 64 0.38 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import numpy as tensor_files

from inference_svc.model import kvasir_tiny
from inference_svc.model.wedlm import MaskWindow
from tools.kvasir_tiny import network, rows, train
from tools.kvasir_tiny.network import Array, Shape, Weights
from tools.kvasir_tiny.rows import Batch
from tools.kvasir_tiny.train import SIZES, Examination, Run, Sizes, State
from tools.kvasir_tiny.wedlm import network as wedlm
from tools.kvasir_tiny.wedlm import windows
from tools.kvasir_tiny.wedlm.network import WedlmShape
from tools.kvasir_tiny.wedlm.windows import WindowRows

STATE = "state.safetensors"
_PARTS = ("weights", "mean", "square")
_MEASURED = Batch(10**7, 8, 1024)  # rows that set the scales of the norms; no training reads them


@dataclass(frozen=True)
class Plan(train.Plan):
    """Everything that decides the weights, beside those that the run starts from."""

    warm_up: int = 60
    short_steps: int = 0
    rounded_from: float = 0.15
    mixed: tuple[tuple[int, int], ...] = ((6, 8192), (24, 2048), (64, 1024))
    recitals: tuple[int, int] = (160, 512)  # rows, length: beside the mixed ones, which have few long replies
    learning_rate: float = 1.0e-3
    first_row: int = 6_000_000  # behind those of kvasir-tiny's three editions, and of two of its own
    first_recital: int = 600_000_000
    windows: windows.Plan = field(default_factory=windows.Plan)
    masked_weight: float = 1.0  # of the masked tokens' loss beside the next tokens'
    shape: Shape = field(default_factory=WedlmShape)


def loss(weights: Weights, groups: tuple[WindowRows, ...], plan: Plan, rounding: Array) -> tuple[Array, Array]:
    """The training loss; and, for the log, the means over learned tokens and over masks."""
    total, under, under_sum = jnp.zeros(4), jnp.zeros(()), jnp.zeros(())
    for ids, learned, (asked, targets, mask_weights) in groups:
        clean, masked = wedlm.logits(weights, ids[:, :-1].astype(jnp.int32), asked, plan.shape, rounding)
        total += train.entropies(clean, ids, learned, plan)
        recovered = train.cross_entropy(masked, targets)
        under, under_sum = under + (recovered * mask_weights).sum(), under_sum + mask_weights.sum()
    (of_next, said), masks = train.means(total), under / jnp.maximum(under_sum, 1e-6)
    return of_next + plan.masked_weight * masks, jnp.stack([said, masks])


def start(plan: Plan, out: Path, from_model: Path) -> Run:
    """The run that OUT holds, or a new one from a model's weights: kvasir-tiny's, or those of a WeDLM network."""
    if (out / STATE).exists():
        return _read(out)
    if MaskWindow.of_config(json.loads((from_model / "config.json").read_text())):
        return Run.begun(network.load(from_model, WedlmShape)[0])
    weights, shape = network.load(from_model, Shape)
    ids, _ = rows.make(_MEASURED, from_model)
    weights, _ = wedlm.started_from(weights, shape, jnp.asarray(ids[:, :-1], jnp.int32), plan.seed)
    return Run.begun(weights)


def batches(plan: Plan) -> Iterator[tuple[Batch, ...]]:
    """The rows of every step: mixed ones, and recitals."""
    count, length = plan.recitals
    for step, group in enumerate(train.batches(plan)):
        yield (*group, Batch(plan.first_recital + step * count, count, length, recites=True))


def run(
    plan: Plan,
    out: Path,
    processes: int,
    from_model: Path,
    every_s: float = 60.0,
    sizes: Sizes | None = SIZES,
    until: int | None = None,
) -> Run:
    """Go on until the plan's end, or for `until` steps in all; keep the state every `every_s` seconds. At the plan's
    end the examination of kvasir-tiny, token by token; none without `sizes`."""
    train.prepare(out)
    found = start(plan, out, from_model)
    made = itertools.islice(batches(plan), found.step, until)
    groups, saved = rows.stream(made, out, processes, windows.Maker(plan.windows)), found.spent_s
    for numbers, is_last in train.steps(plan, found, groups, loss, _size_of, until):
        if is_last or found.step % 20 == 1:
            train.note(found, found.step, ("loss", "masks", "gradient", "rate"), numbers)
        if is_last or found.spent_s - saved > every_s:
            saved = found.spent_s
            _keep(found, plan, out)
    if sizes and (found.step == plan.steps or found.spent_s > plan.time_limit_s):
        found.log[-1]["exact"] = Examination(plan, out, sizes).take(found.state.weights)
        _keep(found, plan, out)
    return found


def _size_of(made: WindowRows) -> int:
    return made.ids.size + made.reordered.targets.size


def _keep(found: Run, plan: Plan, out: Path) -> None:
    """The model's files, the log, and last the state, each whole: a run that is killed here goes on."""
    network.save(found.state.weights, plan.shape, out)
    (out / "log.json").write_text(train.text_of_log(plan, found.log))
    tensors = {f"{part}.{name}": np.asarray(array) for part in _PARTS for name, array in _part(found, part).items()}
    counts = {"step": found.step, "spent_s": found.spent_s, "tokens": found.tokens, "log": found.log}
    tensor_files.save_file(tensors, out / f"{STATE}.part", metadata={"run": json.dumps(counts)})
    (out / f"{STATE}.part").replace(out / STATE)


def _part(found: Run, part: str) -> Weights:
    weights: Weights = getattr(found.state, part)
    return weights


def _read(out: Path) -> Run:
    from safetensors import safe_open

    parts: dict[str, Weights] = {part: {} for part in _PARTS}
    with safe_open(out / STATE, "numpy") as file:
        counts = json.loads(file.metadata()["run"])
        for key in file.keys():  # noqa: SIM118 - the file is no mapping
            part, name = key.split(".", 1)
            parts[part][name] = jnp.asarray(file.get_tensor(key))
    return Run(State(**parts), **counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the model's directory; a run that it holds goes on")
    parser.add_argument("--start", type=Path, default=kvasir_tiny.path(), help="kvasir-tiny, or an edition of this")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="if there is no time limit")
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="seconds of training, instead of --steps")
    parser.add_argument("--learning-rate", type=float, default=Plan.learning_rate)
    parser.add_argument("--processes", type=int, default=12, help="how many make training rows")
    parser.add_argument("--window", type=int, default=windows.Plan.size, help="tokens of a training window")
    parser.add_argument("--tokens-each", type=int, default=windows.Plan.tokens_each, help="of a row, by window")
    parser.add_argument("--smoke", action="store_true", help="rows and examination as small as a CPU can do")
    given = parser.parse_args()
    plan = replace(
        Plan(windows=windows.Plan(given.window, given.tokens_each)),
        steps=given.steps if given.time_limit_s == math.inf else 10**6,
        time_limit_s=given.time_limit_s,
        learning_rate=given.learning_rate,
    )
    sizes = replace(SIZES, classic=8)
    if given.smoke:
        plan = replace(plan, mixed=((2, 256),), recitals=(2, 256), windows=windows.Plan(min(given.window, 16), 64))
        sizes = Sizes(classic=1, everyday=1, names=((300, 1024),), names_each=10, at_once=2)
    run(plan, given.out, given.processes, given.start, sizes=sizes)


if __name__ == "__main__":
    main()
