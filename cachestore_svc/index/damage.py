"""Notices index entries that the store never wrote, and refuses what a damaged index would have to answer."""

import contextlib
from collections.abc import Iterator

from kvasir.errors import DataLoss


@contextlib.contextmanager
def reading_damage() -> Iterator[None]:
    """Raise as damage what a reader trips over in entries that the store never wrote: at a start, and in a check."""
    try:
        yield
    except (ValueError, TypeError, AssertionError) as error:
        raise index_damaged(f"it holds what nobody wrote ({type(error).__name__}: {error})") from error


def index_damaged(words: str) -> DataLoss:
    """The refusal of what a damaged index would have to answer."""
    return DataLoss(
        f"the index is damaged: {words}; stop the store and run: kvasir store recover", reason="INDEX_DAMAGED"
    )
