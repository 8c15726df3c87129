"""Drafts as a test wants them: of replies that are known, right, wrong or half right."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from inference_svc.engine.drafting.draft_lengths import Proposal
from inference_svc.engine.drafting.past_text import PastText

Tries = Callable[[tuple[int, ...], int], tuple[int, ...]]


class Told(PastText):
    """A past that knows the replies, and says what a test makes of them."""

    replies: ClassVar[dict[tuple[int, ...], tuple[int, ...]]] = {}
    tries: ClassVar[Tries] = staticmethod(lambda rest, _: rest)

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        text = tuple(token_ids)
        self._text = next((p + r for p, r in self.replies.items() if text[: len(p)] == p), text)

    def next(self, most: int) -> tuple[tuple[int, ...], int]:
        known = len(self._tokens)
        return self.tries(self._text[known:], known)[:most], 8


def every_draft(_self: object, _rows: int, proposals: dict[Any, Proposal], _most_rows: int) -> Any:
    return {row: each.most for row, each in proposals.items() if each.most > 0}


def wrong_at(step: int) -> Tries:
    return lambda rest, known: tuple(
        token + 1 if (known + place) % step == 0 else token for place, token in enumerate(rest)
    )
