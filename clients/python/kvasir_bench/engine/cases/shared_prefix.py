"""Agents that arrive together with one prefix: computed tokens and waiting times, with and without sharing."""

from dataclasses import dataclass
from statistics import mean

from kvasir_bench.arithmetic import Summary
from kvasir_bench.engine.lab import Case, Lab

_OWN_TOKENS = 64
_REPLY_TOKENS = 16  # who ends with its first token leaves nothing to begin with


@dataclass(frozen=True, slots=True)
class SharedPrefixRow:
    """With or without sharing; keys as in `kvasir_bench.engine.keys`."""

    sharing: bool
    agents: int
    prefix_tokens: int
    prefilled_tokens: int
    mean_first_token_s: float
    last_first_token_s: float
    prefilled_ratio: float
    time_ratio: float


def run(lab: Lab) -> Case:
    """Agents of one namespace may share what they prefill; agents without one share with nobody."""
    agents, prefix_tokens = (3, 256) if lab.is_quick else (8, 1024)
    found: dict[bool, list[tuple[int, float, float]]] = {False: [], True: []}
    for number, counts in enumerate(lab.rounds(f"{agents} agents with one prefix of {prefix_tokens}")):
        for sharing, rounds in found.items():
            each = _round(lab, agents, prefix_tokens, f"bench {number}" if sharing else None)
            rounds += [each] if counts else []
    alone_tokens, _, alone_s = (Summary.of(column).median for column in zip(*found[False], strict=True))
    rows: list[SharedPrefixRow] = []
    for sharing, rounds in found.items():
        tokens, mean_s, last_s = (Summary.of(column).median for column in zip(*rounds, strict=True))
        rows.append(
            SharedPrefixRow(
                sharing=sharing,
                agents=agents,
                prefix_tokens=prefix_tokens,
                prefilled_tokens=int(tokens),
                mean_first_token_s=mean_s,
                last_first_token_s=last_s,
                prefilled_ratio=tokens / alone_tokens,
                time_ratio=alone_s / last_s,
            )
        )
    return Case("A shared prefix", rows)


def _round(lab: Lab, agents: int, prefix_tokens: int, namespace: str | None) -> tuple[int, float, float]:
    """Tokens computed, mean and longest time to the first token."""
    prefix = lab.prompts.tokens(prefix_tokens, 0)
    prompts = [(*prefix, *lab.prompts.tokens(_OWN_TOKENS, n + 1)) for n in range(agents)]
    runs = [lab.start(prompt, _REPLY_TOKENS, namespace=namespace) for prompt in prompts]
    ends = [each.end() for each in runs]
    seconds = [each.token_times[0] - runs[0].submitted_s for each in runs]
    return sum(ended.prompt_tokens - ended.cached_tokens for ended in ends), mean(seconds), max(seconds)
