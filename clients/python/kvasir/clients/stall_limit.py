"""The time that a stream may go without progress; `aio/stall_limit.py` is the asynchronous client's."""

import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from kvasir.errors import DeadlineExceeded

_Item = TypeVar("_Item")


class StallLimit:
    """Ends its block with DeadlineExceeded when nothing has made progress in it for `seconds`; None: never.

    A thread cancels the call that blocks: nothing else ends it.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._until = 0.0
        self._call: Any = None
        self._is_over = False
        self._ended = threading.Event()

    def progress(self) -> None:
        """Something has moved: the time begins again."""
        if self._seconds is not None:
            self._until = time.monotonic() + self._seconds

    def counting(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The same items; each that is taken is progress."""
        for item in items:
            self.progress()
            yield item

    def watched(self, method: Any) -> Any:
        """The method, whose call is cancelled when the time is over."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._call = method(*args, **kwargs)
            return self._call

        return call

    def __enter__(self) -> Self:
        self.progress()
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="kvasir-stall-limit", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._is_over and error is not None:
            raise DeadlineExceeded(f"the transfer made no progress for {self._seconds:g} s") from None

    def _watch(self) -> None:
        while not self._ended.wait(max(self._until - time.monotonic(), 0.001)):
            if time.monotonic() >= self._until and self._call is not None:
                self._is_over = True
                self._call.cancel()
                return
