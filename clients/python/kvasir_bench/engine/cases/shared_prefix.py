"""Agents that arrive together with one prefix: computed tokens and waiting times, with and without sharing."""

from collections.abc import Iterator
from itertools import count
from statistics import mean

from kvasir_bench.arithmetic import medians
from kvasir_bench.engine.lab import Case, Lab, Row

_OWN_TOKENS = 64
_REPLY_TOKENS = 16  # who ends with its first token leaves nothing to begin with


def run(lab: Lab) -> Case:
    """Agents of one namespace may share what they prefill; agents without one share with nobody."""
    namespaces = (f"bench {number}" for number in count())
    return Case("A shared prefix", lab.pace.rows(lab.lengths(256, 1024), lambda each: _rows(lab, each, namespaces)))


def _rows(lab: Lab, prefix_tokens: int, namespaces: Iterator[str]) -> list[Row]:
    agents = 3 if lab.scope.is_quick else 8

    def measured() -> list[dict[str, float]]:
        return [_round(lab, agents, prefix_tokens, namespace) for namespace in (None, next(namespaces))]

    found = zip(*lab.pace.counted(f"{agents} agents with one prefix of {prefix_tokens}", measured), strict=True)
    alone, shared = map(medians, found)
    return [
        {
            "sharing": sharing,
            "agents": agents,
            "prefix_tokens": prefix_tokens,
            **each,
            "prefilled_tokens": int(each["prefilled_tokens"]),
            "prefilled_ratio": each["prefilled_tokens"] / alone["prefilled_tokens"],
            "time_ratio": alone["last_first_token_s"] / each["last_first_token_s"],
        }
        for sharing, each in ((False, alone), (True, shared))
    ]


def _round(lab: Lab, agents: int, prefix_tokens: int, namespace: str | None) -> dict[str, float]:
    prefix = lab.prompts.tokens(prefix_tokens, 0)
    prompts = [(*prefix, *lab.prompts.tokens(_OWN_TOKENS, n + 1)) for n in range(agents)]
    runs = [lab.start(prompt, _REPLY_TOKENS, namespace=namespace) for prompt in prompts]
    ends = [each.end() for each in runs]
    seconds = [each.token_times[0] - runs[0].submitted_s for each in runs]
    prefilled = sum(ended.prompt_tokens - ended.cached_tokens for ended in ends)
    return {"prefilled_tokens": prefilled, "mean_first_token_s": mean(seconds), "last_first_token_s": max(seconds)}
