"""The gaps of a running stream while another turn prefills, or restores, a long prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from inference_svc.bench.arithmetic import Summary, gaps
from inference_svc.bench.lab import Case, Lab, Run


@dataclass(frozen=True, slots=True)
class InterruptionRow:
    """The turn beside the stream; keys as in `kvasir.bench.engine_keys`."""

    beside: str
    tokens: int
    median_gap_s: float
    longest_gap_s: float
    longest_gap_s_spread: float
    ratio_to_nothing: float


def run(lab: Lab) -> Case:
    """A stream with a short prompt beside 4,096 tokens of another's."""
    tokens, stream_tokens = (300, 8) if lab.is_quick else (4096, 64)
    tokens = lab.shortened(tokens)
    memory = lab.remember(lab.prompts.tokens(tokens - 1, 1))
    prompt, files = (*memory.tokens, memory.tokens[0]), lab.restored(memory)
    beside: dict[str, Callable[[], Run]] = {
        "prefill": lambda: lab.start(prompt, 1),
        "restore": lambda: lab.start(prompt, 1, files),
    }
    found: dict[str, list[list[float]]] = {"nothing": [], "prefill": [], "restore": []}
    for counts in lab.rounds(f"a stream beside {tokens} tokens"):
        for name, begin_other in beside.items():
            alone, disturbed = _gaps(lab, stream_tokens, begin_other)
            if counts:
                found[name].append(disturbed)
                found["nothing"].append(alone)
    lab.forget([memory])
    quiet = Summary.of([max(each) for each in found["nothing"]]).median
    return Case(
        "The longest gap of a running stream",
        [_row(name, tokens if name != "nothing" else 0, each, quiet) for name, each in found.items()],
    )


def _gaps(lab: Lab, stream_tokens: int, begin_other: Callable[[], Run]) -> tuple[list[float], list[float]]:
    """The stream's gaps before the other turn comes, and until its first token."""
    most = lab.shortened(4096, 256) - 256
    stream = lab.start(lab.prompts.tokens(64, 0), most)
    stream.wait_until(lambda run: len(run.token_times) > stream_tokens)
    other = begin_other()
    other.end()
    so_far = len(stream.token_times)
    stream.wait_until(lambda run: len(run.token_times) > so_far)
    times = list(stream.token_times)
    stream.cancel()
    began = next(index for index, time in enumerate(times) if time >= other.submitted_s)
    return gaps(times[:began], times[0], other.submitted_s), gaps(times, other.submitted_s, other.token_times[0])


def _row(name: str, tokens: int, found: list[list[float]], quiet: float) -> InterruptionRow:
    longest = Summary.of([max(each) for each in found])
    return InterruptionRow(
        beside=name,
        tokens=tokens,
        median_gap_s=median(gap for each in found for gap in each),
        longest_gap_s=longest.median,
        longest_gap_s_spread=longest.spread,
        ratio_to_nothing=longest.median / quiet,
    )
