"""Windows of masks: tokens a pass, the share of computed rows that are kept, and speed, by window, beside one mask."""

from collections.abc import Iterator, Sequence

from inference_svc.engine.api import Ended, Hot
from kvasir_bench.arithmetic import Summary
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Row

_WINDOWS = (1, 4, 8, 16, 32)
_BATCHES = (1, 8)
_REPLY_TOKENS = 64


def run(lab: Lab) -> Case:
    """A model that fills no windows (WeDLM does) has rows of one token a pass alone."""
    pairs = [(length, batch) for length in lab.lengths(64, 512) for batch in lab.batches((1,), _BATCHES)]
    return Case("Windows of masks", lab.pace.rows(pairs, lambda pair: _rows(lab, *pair)))


def _rows(lab: Lab, length: int, batch: int) -> Iterator[Row]:
    tokens = 12 if lab.scope.is_quick else _REPLY_TOKENS
    memories = [lab.agents.remember(lab.prompts.tokens(length, number)) for number in range(batch)]
    own = lab.engine.model.mask_window
    windows = sorted({*_WINDOWS, own.size}) if own else [1]
    what = f"windows at {length} tokens, {batch} rows"
    rounds = lab.pace.counted(what, lambda: [_measured(lab, memories, window, tokens) for window in windows])
    lab.agents.forget(memories)
    for place, (window, found) in enumerate(zip(windows, zip(*rounds, strict=True), strict=True)):
        ends = found[-1][1]
        made = sum(end.completion_tokens for end in ends)
        rate = Summary.of([rate for rate, _ in found])
        yield {
            "context": length,
            "batch": batch,
            "window": window,
            "own_window": own.size if own else 1,
            "threshold": own.entropy_threshold if own else 0.0,
            "tokens_per_s": rate.median,
            **Summary.of([each[place][0] / each[0][0] for each in rounds]).named("speedup"),
            "tokens_per_pass": made / (sum(end.mask_passes.passes for end in ends) or made),
            "p_cache": made / (sum(end.mask_passes.rows for end in ends) or made),
        }


def _measured(lab: Lab, memories: Sequence[LabMemory], window: int, tokens: int) -> tuple[float, list[Ended]]:
    """Tokens per second from the first submit to the last end, of turns that go on from memories."""
    forks = [lab.agents.fork(memory) for memory in memories]
    try:
        runs = [
            lab.start((*fork.tokens, fork.tokens[0]), tokens, Hot(len(fork.tokens)), fork.key, most_drafts=window - 1)
            for fork in forks
        ]
        ends = [each.end() for each in runs]
    finally:
        lab.agents.forget(forks)
    seconds = max(each.last_event_s for each in runs) - runs[0].submitted_s
    return sum(end.completion_tokens for end in ends) / seconds, ends
