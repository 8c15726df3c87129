"""Two agents with prompts of one length: one after the other, together, and the second while the first decodes."""

from collections.abc import Mapping
from itertools import pairwise
from statistics import mean, median

from kvasir_bench.arithmetic import Target, gaps, medians
from kvasir_bench.engine.lab import Case, Lab, Row, Run

_LEAST_RATIO = 2.0
SEQUENTIAL, SIMULTANEOUS, STAGGERED = "sequential", "simultaneous", "staggered"


def pairs(lab: Lab) -> Case:
    """Each agent's prompt is cold. Medians over the repeats."""
    rows = lab.pace.rows(lab.lengths(96, 1024), lambda length: _pairs_rows(lab, length))
    return Case("Two agents: one after the other, together, staggered", rows)


def _pairs_rows(lab: Lab, length: int) -> list[Row]:
    reply = 12 if lab.scope.is_quick else 128
    found = lab.pace.counted(f"pairs at {length} tokens", lambda: _pairs_round(lab, length, reply))
    times = {arrival: medians(each[arrival] for each in found) for arrival in found[0]}
    sequential_s, counts = times[SEQUENTIAL]["end_to_end_s"], {"prompt_tokens": length, "reply_tokens": reply}
    return [
        {"arrival": arrival, **counts, **each, "ratio_to_sequential": sequential_s / each["end_to_end_s"]}
        for arrival, each in times.items()
    ]


def _pairs_round(lab: Lab, length: int, reply: int) -> Mapping[str, dict[str, float]]:
    """By arrival: seconds to each agent's first token and to the last of both, and tokens per second."""
    first, second = (lab.prompts.tokens(length, number) for number in (0, 1))
    alone, after = (lab.start(prompt, reply).ended() for prompt in (first, second))
    together = [lab.start(prompt, reply) for prompt in (first, second)]
    return {
        SEQUENTIAL: _times(alone, after),
        SIMULTANEOUS: _times(*(each.ended() for each in together)),
        STAGGERED: _times(*lab.start_together(first, second, reply)),
    }


def _times(first: Run, second: Run) -> dict[str, float]:
    streams = (first.token_times, second.token_times)
    total_s = max(times[-1] for times in streams) - first.submitted_s
    return {
        "first_s": first.first_token_s,
        "second_s": second.first_token_s,
        "end_to_end_s": total_s,
        "tokens_per_s": sum(map(len, streams)) / total_s,
        "stream_tokens_per_s": mean((len(times) - 1) / (times[-1] - times[0]) for times in streams),
    }


def staggered(lab: Lab) -> Case:
    """Two prompts of one length; B arrives after a third of A's 427 tokens (the seed's two seconds, to scale)."""
    rows = lab.pace.rows(lab.lengths(96, 1024), lambda length: [_staggered_row(lab, length)])
    targets = [
        target
        for row in rows
        for target in (
            Target(f"B's first token, sequential / staggered, {row['prompt_tokens']}", row["ratio"], _LEAST_RATIO),
            Target("A's longest gap / (budget + one cell + one step)", row["gap_ratio"], 1.0, is_most=True),
        )
    ]
    return Case("The staggered case", rows, targets)


def _staggered_row(lab: Lab, length: int) -> Row:
    found = lab.pace.counted(f"B joins A, and waits for A, {length} tokens", lambda: _staggered_round(lab, length))
    return {"prompt_tokens": length, **medians(found, "ratio")}


def _staggered_round(lab: Lab, prompt_tokens: int) -> dict[str, float]:
    reply_tokens = 24 if lab.scope.is_quick else 427
    first, second = (lab.prompts.tokens(prompt_tokens, number) for number in (0, 1))
    third = reply_tokens // 3
    # One after the other: B arrives at the same point of A, and waits.
    alone, waited = lab.start(first, reply_tokens).ended(), lab.start(second, 1).ended()
    running, joined = lab.start_together(first, second, reply_tokens)
    waited_s = alone.token_times[-1] - alone.token_times[third - 1] + waited.first_token_s
    gap_s = max(gaps(running.token_times, joined.submitted_s, joined.token_times[0]))
    budget_s = lab.engine.longest_gap_s
    cell_s = max(later - earlier for earlier, later in pairwise((waited.submitted_s, *waited.cell_times)))
    step_s = median(gaps(running.token_times, joined.token_times[0], running.token_times[-1]))
    return {
        "alone_first_s": alone.first_token_s,
        "first_s": running.first_token_s,
        "sequential_s": waited_s,
        "staggered_s": joined.first_token_s,
        "ratio": waited_s / joined.first_token_s,
        "longest_gap_s": gap_s,
        "allowed_gap_s": budget_s + cell_s + step_s,
        "gap_ratio": gap_s / (budget_s + cell_s + step_s),
        "budget_s": budget_s,
        "cell_s": cell_s,
        "step_s": step_s,
    }
