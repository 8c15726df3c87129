"""The gaps of running streams while another agent joins with a long prompt, forks a long memory, or is restored."""

from collections.abc import Callable
from statistics import median

from kvasir_bench.arithmetic import Summary, Target, gaps
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Row, Run

_MOST_STALLED_STEPS = 2.0
NOTHING = "nothing"


def run(lab: Lab) -> Case:
    """Streams with short prompts beside the longest context that is measured."""
    rows = _rows(lab, lab.lengths(300, 4096)[-1])
    targets = [
        Target(
            f"steps that {row['beside']} of {row['tokens']} tokens stalls",
            row["stalled_steps"],
            _MOST_STALLED_STEPS,
            True,
        )
        for row in rows
        if lab.is_gpu and row["beside"] != NOTHING
    ]
    return Case("The longest gap of running streams", rows, targets)


def _rows(lab: Lab, tokens: int) -> list[Row]:
    streams, stream_tokens = (1, 8) if lab.scope.is_quick else (4 if lab.is_gpu else 1, 64)
    memory = lab.agents.remember(lab.prompts.tokens(tokens - 1, 1))
    prompt, files = (*memory.tokens, memory.tokens[0]), lab.agents.restored(memory)
    beside: dict[str, Callable[[], Run]] = {
        "prefill": lambda: lab.start(prompt, 1),
        "fork": lambda: _forked(lab, memory),
        "restore": lambda: lab.start(prompt, 1, files),
    }
    # By what happens beside: for each repeat, the gaps of all streams.
    found: dict[str, list[list[float]]] = {NOTHING: [], **{name: [] for name in beside}}

    def rows_so_far() -> list[Row]:
        names = {NOTHING: 0, **dict.fromkeys(beside, tokens)}
        return [_row(name, count, streams, found[name], found[NOTHING]) for name, count in names.items()]

    for counts in lab.pace.rounds(f"{streams} streams beside {tokens} tokens"):
        for name, begin_other in beside.items():
            alone, disturbed = _gaps(lab, streams, stream_tokens, begin_other)
            if counts:
                found[name].append(disturbed)
                found[NOTHING].append(alone)
        if counts:
            lab.pace.keep(rows_so_far())
    lab.agents.forget([memory])
    return rows_so_far()


def _forked(lab: Lab, memory: LabMemory) -> Run:
    """A turn of a fork of the memory; the fork is dropped when the engine is done with it."""
    fork = lab.agents.fork(memory)
    run = lab.agents.resume(fork, memory.tokens[:1], 1)
    run.end()
    lab.agents.forget([fork])
    return run


def _gaps(
    lab: Lab, streams: int, stream_tokens: int, begin_other: Callable[[], Run]
) -> tuple[list[float], list[float]]:
    """The streams' gaps before the other turn comes, and until its first token."""
    most = lab.shortened(4096, 256) - 256
    running = [lab.start(lab.prompts.tokens(64, number), most) for number in range(streams)]
    for stream in running:
        stream.wait_until(lambda run: len(run.token_times) > stream_tokens)
    began_s = lab.clock()
    other = begin_other()
    other.end()
    for stream in running:
        so_far = len(stream.token_times)
        stream.wait_until(lambda run, so_far=so_far: len(run.token_times) > so_far)  # type: ignore[misc]
    all_times = [list(stream.token_times) for stream in running]
    for stream in running:
        stream.cancel()
    # All streams have joined once the last of them has its first token.
    together_s = max(times[0] for times in all_times)
    quiet = [
        gap for times in all_times for gap in gaps([time for time in times if time < began_s], together_s, began_s)
    ]
    return quiet, [gap for times in all_times for gap in gaps(times, began_s, other.token_times[0])]


def _row(name: str, tokens: int, streams: int, found: list[list[float]], quiet: list[list[float]]) -> Row:
    longest = Summary.of([max(each) for each in found])
    step_s = median(gap for each in quiet for gap in each)
    return {
        "beside": name,
        "tokens": tokens,
        "streams": streams,
        "median_gap_s": median(gap for each in found for gap in each),
        **longest.named("longest_gap_s"),
        "ratio_to_nothing": longest.median / median(max(each) for each in quiet),
        "stalled_steps": longest.median / step_s - 1,
    }
