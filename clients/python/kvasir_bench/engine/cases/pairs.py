"""Two agents with prompts of one length: one after the other, together, and the second while the first decodes."""

from collections.abc import Mapping
from statistics import mean

from kvasir_bench.arithmetic import medians
from kvasir_bench.engine.lab import Case, Lab, Row, Run

SEQUENTIAL, SIMULTANEOUS, STAGGERED = "sequential", "simultaneous", "staggered"


def run(lab: Lab) -> Case:
    """Each agent's prompt is cold. Medians over the repeats."""
    rows = lab.pace.rows(lab.lengths(96, 1024), lambda length: _rows(lab, length))
    return Case("Two agents: one after the other, together, staggered", rows)


def _rows(lab: Lab, length: int) -> list[Row]:
    reply = 12 if lab.scope.is_quick else 128
    found = lab.pace.counted(f"pairs at {length} tokens", lambda: _round(lab, length, reply))
    times = {arrival: medians(each[arrival] for each in found) for arrival in found[0]}
    sequential_s, counts = times[SEQUENTIAL]["end_to_end_s"], {"prompt_tokens": length, "reply_tokens": reply}
    return [
        {"arrival": arrival, **counts, **each, "ratio_to_sequential": sequential_s / each["end_to_end_s"]}
        for arrival, each in times.items()
    ]


def _round(lab: Lab, length: int, reply: int) -> Mapping[str, dict[str, float]]:
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
