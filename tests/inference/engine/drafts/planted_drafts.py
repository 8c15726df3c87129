"""Drafts as a test wants them: of replies that are known, right, wrong or half right."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

from inference_svc.engine.drafting import drafter
from inference_svc.engine.drafting.draft_lengths import Proposal
from inference_svc.engine.drafting.past_text import PastText
from inference_svc.engine.sampling import Sampler

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
        known = len(self.tokens)
        return self.tries(self._text[known:], known)[:most], 8


@contextmanager
def planted() -> Iterator[type[Told]]:
    """Meanwhile every draft is tried, and is what the caller makes of the replies that it gives."""
    with (
        patch.object(drafter, "PastText", Told),
        patch.object(Sampler, "forced", lambda *_: ()),  # which would take their place
        patch.object(drafter.DraftCosts, "lengths", every_draft),
        patch.multiple(Told, replies={}, tries=Told.__dict__["tries"]),
    ):
        yield Told


def every_draft(_self: object, _rows: int, proposals: dict[Any, Proposal], _most_rows: int) -> Any:
    return {row: each.most for row, each in proposals.items() if each.most > 0}


def wrong_at(step: int) -> Tries:
    """Its wrong tokens are in a vocabulary of even size, too: MLX looks at no index, and would write elsewhere."""
    return lambda rest, known: tuple(
        token ^ 1 if (known + place) % step == 0 else token for place, token in enumerate(rest)
    )
