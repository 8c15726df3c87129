"""Agents that arrive together with one prefix: computed tokens and waiting times, with and without sharing."""

from collections.abc import Iterator
from itertools import count
from statistics import mean, median

from kvasir_bench.engine.lab import Case, Lab, Row

_OWN_TOKENS = 64
_LENGTHS = (1024,)
_REPLY_TOKENS = 16  # who ends with its first token leaves nothing to begin with


def run(lab: Lab) -> Case:
    """Agents of one namespace may share what they prefill; agents without one share with nobody."""
    namespaces = (f"bench {number}" for number in count())
    lengths = lab.chosen_lengths((256,) if lab.scope.is_quick else _LENGTHS)
    return Case("A shared prefix", lab.pace.rows(lengths, lambda length: _rows(lab, length, namespaces)))


def _rows(lab: Lab, prefix_tokens: int, namespaces: Iterator[str]) -> list[Row]:
    agents = 3 if lab.scope.is_quick else 8

    def measured() -> list[tuple[int, float, float]]:
        return [_round(lab, agents, prefix_tokens, namespace) for namespace in (None, next(namespaces))]

    found = zip(*lab.pace.counted(f"{agents} agents with one prefix of {prefix_tokens}", measured), strict=True)
    alone, shared = ([*map(median, zip(*each, strict=True))] for each in found)
    return [
        {
            "sharing": sharing,
            "agents": agents,
            "prefix_tokens": prefix_tokens,
            "prefilled_tokens": int(tokens),
            "mean_first_token_s": mean_s,
            "last_first_token_s": last_s,
            "prefilled_ratio": tokens / alone[0],
            "time_ratio": alone[2] / last_s,
        }
        for sharing, (tokens, mean_s, last_s) in ((False, alone), (True, shared))
    ]


def _round(lab: Lab, agents: int, prefix_tokens: int, namespace: str | None) -> tuple[int, float, float]:
    """Tokens computed, mean and longest time to the first token."""
    prefix = lab.prompts.tokens(prefix_tokens, 0)
    prompts = [(*prefix, *lab.prompts.tokens(_OWN_TOKENS, n + 1)) for n in range(agents)]
    runs = [lab.start(prompt, _REPLY_TOKENS, namespace=namespace) for prompt in prompts]
    ends = [each.end() for each in runs]
    seconds = [each.token_times[0] - runs[0].submitted_s for each in runs]
    return sum(ended.prompt_tokens - ended.cached_tokens for ended in ends), mean(seconds), max(seconds)
