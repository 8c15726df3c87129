"""Windows of masks: tokens a pass, the share of computed rows that are kept, and speed, by window, beside one mask.

A model that knows the shipped conversations answers questions about them, each reply to its end; any other goes on with
a text, for as many tokens each.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from inference_svc.engine.api import Ended, Hot
from kvasir_bench.arithmetic import Summary
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Row

_WINDOWS = (1, 4, 8, 16, 32)
_BATCHES = (1, 8)
_REPLY_TOKENS = 64
_QUESTIONS = 4  # that each row answers, one after another

_Group = Sequence[tuple[Sequence[int], LabMemory]]  # prompts, and memories of them


def run(lab: Lab) -> Case:
    """A model that fills no windows (WeDLM does) has rows of one token a pass alone."""
    pairs = [(length, batch) for length in lab.lengths(64, 512) for batch in lab.batches((1,), _BATCHES)]
    return Case("Windows of masks", lab.pace.rows(pairs, lambda pair: _rows(lab, *pair)))


def _rows(lab: Lab, length: int, batch: int) -> Iterator[Row]:
    tokens = 12 if lab.scope.is_quick else _REPLY_TOKENS
    prompts = lab.prompts.questions(lab.engine.model.tokenizer_digest, length, batch * _QUESTIONS)
    how: dict[str, Any] = {"stop_token_ids": lab.engine.end_token_ids} if prompts else {}
    prompts = prompts or [(*text, text[0]) for text in (lab.prompts.tokens(length, n) for n in range(batch))]
    memories = [lab.agents.remember(prompt) for prompt in prompts]
    groups = [
        list(zip(prompts, memories, strict=True))[first : first + batch] for first in range(0, len(prompts), batch)
    ]
    own = lab.engine.model.mask_window
    windows = sorted({*_WINDOWS, own.size}) if own else [1]
    what = f"windows at {length} tokens, {batch} rows"
    rounds = lab.pace.counted(
        what, lambda: [_measured(lab, groups, tokens, most_drafts=window - 1, **how) for window in windows]
    )
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


def _measured(lab: Lab, groups: Sequence[_Group], tokens: int, **how: Any) -> tuple[float, list[Ended]]:
    """Tokens per second from the first submit to the last end of each group of turns, which go on from memories."""
    seconds, ends = 0.0, list[Ended]()
    for group in groups:
        forks = [lab.agents.fork(memory) for _, memory in group]
        try:
            runs = [
                lab.start(prompt, tokens, Hot(len(prompt) - 1), fork.key, **how)
                for (prompt, _), fork in zip(group, forks, strict=True)
            ]
            ends += [each.end() for each in runs]
        finally:
            lab.agents.forget(forks)
        seconds += max(each.last_event_s for each in runs) - runs[0].submitted_s
    return sum(end.completion_tokens for end in ends) / seconds, ends
