"""Limits the engine's wait for its store: a budget of time without progress, and a breaker after a failure."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import Context

import structlog
from kvasir import errors
from kvasir.waits import LONGEST_RETRY_S, LOOK_S, RETRY_S

_LOG = structlog.get_logger(__name__)
PROBE_TIMEOUT_S = 1.0


class Budget:
    """The time that one turn may lose to the store without progress; received bytes earn more of it."""

    def __init__(self, seconds: float, min_bytes_per_s: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._allowed_s = seconds
        self._min_bytes_per_s = min_bytes_per_s
        self._clock = clock
        self.spent_s = 0.0

    @property
    def remaining_s(self) -> float:
        return max(self._allowed_s - self.spent_s, 0.0)

    def earn(self, received_bytes: int) -> None:
        """Received bytes extend the budget: a store that sends at `min_bytes_per_s` or faster never uses it up."""
        self._allowed_s += received_bytes / self._min_bytes_per_s

    @contextlib.contextmanager
    def at_least(self, seconds: float) -> Iterator[None]:
        """For the block so much of it is left. The time of the block is no loss for the rest."""
        allowed_s, before_s = self._allowed_s, self.spent_s
        self._allowed_s = max(allowed_s, before_s + seconds)
        try:
            yield
        finally:
            self._allowed_s = allowed_s + self.spent_s - before_s

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the block, even if it fails."""
        began = self._clock()
        try:
            yield
        finally:
            self.spent_s += self._clock() - began


class Breaker:
    """Keeps calls away from a store that failed, until a probe in the background finds it answering."""

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        self._probe = probe
        self._prober: asyncio.Task[None] | None = None
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.closed.set()

    @property
    def is_open(self) -> bool:
        return self.opened.is_set()

    def trip(self, why: str = errors.Unavailable.reason) -> None:
        if not self.is_open:
            self.closed.clear()
            self.opened.set()
            _LOG.warning("store.unreachable", why=why)
            if self._prober is not None:
                self._prober.cancel()  # after refusals it waits too long for a store that is away
                self._prober = None
            self.try_again()

    def try_again(self) -> None:
        if self._prober is None or self._prober.done():
            # In an empty context: the task outlives the call that found the store away.
            self._prober = asyncio.create_task(self._until_it_answers(), context=Context())

    async def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)

    def reset(self) -> None:
        if self.is_open:
            self.opened.clear()
            self.closed.set()
            _LOG.info("store.reachable")

    async def _until_it_answers(self) -> None:
        delay_s = LOOK_S
        while True:
            await asyncio.sleep(delay_s)
            try:
                await asyncio.wait_for(self._probe(), PROBE_TIMEOUT_S)
            except (errors.Unavailable, errors.DeadlineExceeded, TimeoutError):
                delay_s = min(2 * delay_s, RETRY_S)
            except errors.KvasirError:
                self.reset()  # a refusal is an answer, and may be taken back
                delay_s = min(2 * delay_s, LONGEST_RETRY_S)
            except Exception:  # noqa: BLE001 - it has no reader but the log
                # A prober that ends would leave the breaker open for good.
                _LOG.exception("store.probe_failed")
                delay_s = min(2 * delay_s, RETRY_S)
            else:
                break
        self.reset()
