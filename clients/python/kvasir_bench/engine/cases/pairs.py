"""Two agents with prompts of one length: one after the other, at the same moment, and the second while the first
decodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from kvasir_bench.engine.lab import Case, Lab, Run

_LENGTHS = (1024,)
SEQUENTIAL, SIMULTANEOUS, STAGGERED = "sequential", "simultaneous", "staggered"


@dataclass(frozen=True, slots=True)
class PairRow:
    """How the second agent arrives; keys as in `kvasir_bench.engine.keys`."""

    arrival: str
    prompt_tokens: int
    reply_tokens: int
    first_s: float
    second_s: float
    end_to_end_s: float
    tokens_per_s: float
    ratio_to_sequential: float


def run(lab: Lab) -> Case:
    """Each agent's prompt is cold. Medians over the repeats."""
    lengths = lab.chosen_lengths((96,) if lab.is_quick else _LENGTHS)
    rows = lab.rows(lengths, lambda length: _rows(lab, length))
    return Case("Two agents: one after the other, together, staggered", rows)


def _rows(lab: Lab, length: int) -> list[PairRow]:
    reply = 12 if lab.is_quick else 128
    found: dict[str, list[tuple[float, float, float]]] = {}
    for counts in lab.rounds(f"pairs at {length} tokens"):
        for arrival, each in _round(lab, length, reply).items():
            found.setdefault(arrival, [])
            found[arrival] += [each] if counts else []
    medians = {arrival: tuple(map(median, zip(*each, strict=True))) for arrival, each in found.items()}
    alone_s = medians[SEQUENTIAL][2]
    return [
        PairRow(arrival, length, reply, first, second, total, 2 * reply / total, alone_s / total)
        for arrival, (first, second, total) in medians.items()
    ]


def _round(lab: Lab, length: int, reply: int) -> Mapping[str, tuple[float, float, float]]:
    """By arrival: seconds to each agent's first token from its own submit, and from the first submit to the last
    token.
    """
    first, second = (lab.prompts.tokens(length, number) for number in (0, 1))
    alone = _ended(lab.start(first, reply))
    after = _ended(lab.start(second, reply))
    together = [lab.start(prompt, reply) for prompt in (first, second)]
    for each in together:
        each.end()
    joined = lab.run()

    def arrive() -> None:
        lab.start(second, reply, run=joined)

    running = lab.run().when(lambda run: len(run.token_times) >= reply // 3, arrive)
    _ended(lab.start(first, reply, run=running))
    joined.end()
    return {
        SEQUENTIAL: _times(alone, after),
        SIMULTANEOUS: _times(*together),
        STAGGERED: _times(running, joined),
    }


def _ended(run: Run) -> Run:
    run.end()
    return run


def _times(first: Run, second: Run) -> tuple[float, float, float]:
    last_s = max(first.token_times[-1], second.token_times[-1])
    return first.first_token_s, second.first_token_s, last_s - first.submitted_s
