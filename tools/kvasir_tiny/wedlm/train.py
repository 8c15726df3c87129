"""Trains kvasir-tiny-wedlm from kvasir-tiny or an earlier edition of itself, on one GPU:
`python -m tools.kvasir_tiny.wedlm.train OUT`.

The objective is WeDLM's: the tokens under a window's masks, beside the next tokens of the clean stream. Windows are cut
out of learned replies (`windows.py`), so the second stream costs a quarter of the first. A run that ended goes on with
the same command: `OUT/state.safetensors` holds weights, moments and the step. Without a time limit a run that was
interrupted ends with the bits of one that was not. `OUT/at-50` and `OUT/at-75` are the mean of the last hundred steps'
weights at these shares of the training in percent, `OUT/average` at its end, `OUT` the last weights themselves.

The model card beside kvasir-tiny's weights has the commands that made the shipped one on one H100, and its results. Its
steps read 262,144 tokens, and fewer kinds of rows; one with a window of 16 for each 128 tokens took 0.27 s, for each 64
0.38 s. `--make-rows 700 --rows ROWS` makes the rows of 700 steps ahead, and `--rows ROWS` reads them, again and again
with other windows: while training several processors make rows, where other work may need them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
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
from tools.kvasir_tiny.wedlm import row_files, windows
from tools.kvasir_tiny.wedlm.network import WedlmShape
from tools.kvasir_tiny.wedlm.windows import WindowRows

STATE = "state.safetensors"
_PARTS = ("weights", "mean", "square", "average")
Source = Callable[[int], Iterator[tuple[WindowRows, ...]]]  # the rows from a step on
_MEASURED = Batch(10**7, 8, 1024)  # rows that set the scales of the norms; no training reads them


@dataclass(frozen=True)
class Plan(train.Plan):
    """Everything that decides the weights, beside those that the run starts from."""

    warm_up: int = 60
    short_steps: int = 0
    rounded_from: float = 0.15
    mixed: tuple[tuple[int, int], ...] = ((3, 8192), (48, 1024))
    own: tuple[tuple[str, int, int], ...] = (("review", 16, 2048), ("short", 176, 512))  # beside them: kind and size
    learning_rate: float = 6.0e-4
    first_row: int = 7_000_000  # behind those of kvasir-tiny's three editions, and of three of its own
    first_own: int = 700_000_000
    windows: windows.Plan = field(default_factory=windows.Plan)
    # Of the masked tokens' loss beside the next tokens', whose gradient is a twentieth as long: with a weight of 1 the
    # second stream alone decides, and the first one forgets facts that kvasir-tiny recalls.
    masked_weight: float = 0.25
    kept_at: tuple[float, ...] = (0.5, 0.75)  # shares of the training
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
        return _begun(network.load(from_model, WedlmShape)[0])
    weights, shape = network.load(from_model, Shape)
    ids, _ = rows.make(_MEASURED, from_model)
    weights, _ = wedlm.started_from(weights, shape, jnp.asarray(ids[:, :-1], jnp.int32), plan.seed)
    return _begun(weights)


def _begun(weights: Weights) -> Run:
    run = Run.begun(weights)
    run.state.average = {name: jnp.array(array) for name, array in weights.items()}
    return run


def batches(plan: Plan) -> Iterator[tuple[Batch, ...]]:
    """The rows of every step: mixed ones, and those of this model's own kinds."""
    first = plan.first_own
    for group in train.batches(plan):
        own = []
        for kind, count, length in plan.own:
            own.append(Batch(first, count, length, kind=kind))
            first += count
        yield (*group, *own)


def made_now(plan: Plan, folder: Path, processes: int) -> Source:
    maker = windows.Maker(plan.windows)
    return lambda first: rows.stream(itertools.islice(batches(plan), first, None), folder, processes, maker)


def from_files(plan: Plan, folder: Path, files: Path) -> Source:
    """Rows that were made ahead, with windows of each step's own."""
    kept, maker = row_files.RowFiles(files), windows.Maker(plan.windows)

    def step(number: int) -> tuple[WindowRows, ...]:
        made = enumerate(kept.step(number))
        return tuple(maker.with_windows(each, folder, plan.seed, number, place) for place, each in made)

    return lambda first: row_files.ahead(step, first)


def run(
    plan: Plan,
    out: Path,
    source: Source,
    from_model: Path,
    every_s: float = 60.0,
    sizes: Sizes | None = SIZES,
    until: int | None = None,
) -> Run:
    """Go on until the plan's end, or for `until` steps in all; keep the state every `every_s` seconds. At the plan's
    end the examination of kvasir-tiny, token by token; none without `sizes`."""
    train.prepare(out)
    found = start(plan, out, from_model)
    saved, is_last = found.spent_s, False
    marks = [share for share in plan.kept_at if share > _course(plan, found)]
    for numbers, is_last in train.steps(plan, found, source(found.step), loss, _size_of, until):
        if is_last or found.step % 20 == 1:
            train.note(found, found.step, ("loss", "masks", "gradient", "rate"), numbers)
        while marks and _course(plan, found) >= marks[0]:
            _save_mean(found, plan, out / f"at-{100 * marks.pop(0):.0f}")
        if is_last or found.spent_s - saved > every_s:
            saved = found.spent_s
            _keep(found, plan, out)
    if sizes and (found.step == plan.steps or found.spent_s > plan.time_limit_s):
        found.log[-1]["exact"] = Examination(plan, out, sizes).take(found.state.weights)
        _keep(found, plan, out)
    if is_last and until is None:
        _save_mean(found, plan, out / "average")
    return found


def _course(plan: Plan, found: Run) -> float:
    return train.course_of(plan, found.step, found.spent_s)


def _save_mean(found: Run, plan: Plan, folder: Path) -> None:
    train.prepare(folder)
    network.save(found.state.average, plan.shape, folder)


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
    parser.add_argument("--masked-weight", type=float, default=Plan.masked_weight, help="of the masked tokens' loss")
    parser.add_argument("--rows", type=Path, help="a directory of rows that were made ahead")
    parser.add_argument("--make-rows", type=int, metavar="STEPS", help="fill --rows with rows, and end")
    parser.add_argument("--no-exam", action="store_true", help="`tools.kvasir_tiny.wedlm.exam` can be called later")
    parser.add_argument("--smoke", action="store_true", help="rows and examination as small as a CPU can do")
    given = parser.parse_args()
    plan = replace(
        Plan(windows=windows.Plan(given.window, given.tokens_each)),
        steps=given.steps if given.time_limit_s == math.inf else 10**6,
        time_limit_s=given.time_limit_s,
        learning_rate=given.learning_rate,
        masked_weight=given.masked_weight,
    )
    sizes = replace(SIZES, classic=8)
    if given.smoke:
        small = windows.Plan(min(given.window, 16), 64)
        plan = replace(plan, mixed=((2, 256),), own=(("short", 2, 256),), windows=small)
        sizes = Sizes(classic=1, everyday=1, names=((300, 1024),), names_each=10, at_once=2)
    train.prepare(given.out)
    if given.make_rows:
        made = itertools.islice(batches(plan), given.make_rows)
        row_files.write(rows.stream(made, given.out, given.processes, rows.make), given.rows)
        return
    files = given.rows
    source = from_files(plan, given.out, files) if files else made_now(plan, given.out, given.processes)
    run(plan, given.out, source, given.start, sizes=None if given.no_exam else sizes)


if __name__ == "__main__":
    main()
