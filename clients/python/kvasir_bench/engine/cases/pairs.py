"""Two agents with prompts of one length: one after the other, together, and the second while the first decodes."""

from collections.abc import Mapping
from statistics import mean, median

from kvasir_bench.engine.lab import Case, Lab, Row, Run

_LENGTHS = (1024,)
SEQUENTIAL, SIMULTANEOUS, STAGGERED = "sequential", "simultaneous", "staggered"


def run(lab: Lab) -> Case:
    """Each agent's prompt is cold. Medians over the repeats."""
    lengths = lab.chosen_lengths((96,) if lab.scope.is_quick else _LENGTHS)
    rows = lab.pace.rows(lengths, lambda length: _rows(lab, length))
    return Case("Two agents: one after the other, together, staggered", rows)


def _rows(lab: Lab, length: int) -> list[Row]:
    reply = 12 if lab.scope.is_quick else 128
    found = lab.pace.counted(f"pairs at {length} tokens", lambda: _round(lab, length, reply))
    medians = {arrival: [*map(median, zip(*(each[arrival] for each in found), strict=True))] for arrival in found[0]}
    return [
        {
            "arrival": arrival,
            "prompt_tokens": length,
            "reply_tokens": reply,
            "first_s": first,
            "second_s": second,
            "end_to_end_s": total,
            "tokens_per_s": 2 * reply / total,
            "stream_tokens_per_s": rate,
            "ratio_to_sequential": medians[SEQUENTIAL][2] / total,
        }
        for arrival, (first, second, total, rate) in medians.items()
    ]


def _round(lab: Lab, length: int, reply: int) -> Mapping[str, tuple[float, ...]]:
    """By arrival: seconds to each agent's first token and to the last of both, and a stream's tokens per second."""
    first, second = (lab.prompts.tokens(length, number) for number in (0, 1))
    alone, after = (lab.start(prompt, reply).ended() for prompt in (first, second))
    together = [lab.start(prompt, reply) for prompt in (first, second)]
    return {
        SEQUENTIAL: _times(alone, after),
        SIMULTANEOUS: _times(*(each.ended() for each in together)),
        STAGGERED: _times(*lab.start_together(first, second, reply)),
    }


def _times(first: Run, second: Run) -> tuple[float, ...]:
    last_s = max(first.token_times[-1], second.token_times[-1])
    rate = mean((len(times) - 1) / (times[-1] - times[0]) for times in (first.token_times, second.token_times))
    return first.first_token_s, second.first_token_s, last_s - first.submitted_s, rate
