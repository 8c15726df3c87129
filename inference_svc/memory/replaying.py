"""How a memory's KV is computed again with the same bits: prompts in cells, and replies token by token, in the runs
that the memory's turns left (`Computed` in manifest.proto). A reply's rows would have other bits in cells. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inference_svc.text.token_ids import TokenIds

Runs = tuple[int, ...]
"""Pairs, ascending: the first token of each run that was computed one by one, and the first token behind it."""


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One turn of the engine: it goes on from `keep` tokens, and computes the prompt's rest, then the reply."""

    keep: int
    prompt: int
    reply: tuple[int, ...]  # the last token is only drawn: its row is no part of the run


def runs_of_turn(known: Runs | None, cached: int, prompt: int, decoded_to: int) -> Runs | None:
    """The runs of a memory that a turn leaves, which began with `cached` tokens of one with the runs `known`. None: it
    is not known how those were computed.
    """
    before = cut(known, cached) if cached else ()
    if before is None or decoded_to <= prompt:
        return before
    return (*before, prompt, decoded_to)


def cut(runs: Runs | None, tokens: int) -> Runs | None:
    """The runs within the first `tokens` tokens."""
    if runs is None:
        return None
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return tuple(edge for first, end in pairs if first < tokens for edge in (first, min(end, tokens)))


def replay_steps(token_ids: TokenIds, runs: Sequence[int]) -> Iterator[ReplayStep]:
    """The turns that compute the tokens by these runs. The last one has no reply: its prompt is all tokens."""
    done, count = 0, len(token_ids)
    for first, end in zip(runs[::2], runs[1::2], strict=True):
        behind = token_ids[min(end, count - 1)]
        yield ReplayStep(done, first, (*token_ids[first:end], behind))
        done = end
    yield ReplayStep(done, count, ())
