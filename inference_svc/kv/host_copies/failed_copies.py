"""Whether threads can copy from the device, by the copies that failed."""

import threading

import structlog

_LOG = structlog.get_logger(__name__)
MOST_FAILURES = 3
"""Copies that fail in a row before threads make no more."""


class FailedCopies:
    """What has shown that threads cannot copy from the device: several failures, one after the other, with no copy
    between them that arrived. One failure shows nothing; copies that were under way together fail together.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self.is_refused = False
        self._lock = threading.Lock()

    def failed(self, why: BaseException, before: int) -> None:
        """A copy failed that began after so many failures in a row."""
        with self._lock:
            # Without memory for the file no other way of copying serves either.
            self.in_a_row += self.in_a_row == before and not isinstance(why, MemoryError)
            _LOG.warning("host_copy.out_failed", why=f"{type(why).__name__}: {why}", in_a_row=self.in_a_row)
            if self.in_a_row >= MOST_FAILURES:
                self._refuse(why)

    def arrived(self) -> None:
        """All copies of one file did."""
        self.in_a_row = 0

    def refuse(self, why: BaseException) -> None:
        """Let no thread copy any more. Idempotent."""
        with self._lock:
            self._refuse(why)

    def _refuse(self, why: BaseException) -> None:
        if not self.is_refused:
            self.is_refused = True
            _LOG.warning("host_copy.out_refused", why=f"{type(why).__name__}: {why}")


out = FailedCopies()
"""Of all copies from the device. Where `is_refused`, MLX's way serves, which is slower."""
