"""The engine's way to one namespace's cache store. No call but the probe is made before the store has confirmed that
the token is the namespace's; after a failure a breaker keeps calls away until the probe is answered. Bulk data has
connections of its own: while it moves, a store that answers late is not away.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
from kvasir import errors
from kvasir.clients import AioStoreClient
from kvasir.waits import ANSWER_S, SOON_S

from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.store.answers import StoreMiss, miss_of
from inference_svc.memory.store.patience import PROBE_TIMEOUT_S, Breaker, Budget

_LOG = structlog.get_logger(__name__)
_WRONG_NAMESPACE = "WRONG_NAMESPACE"


T = TypeVar("T")


class StoreClients(NamedTuple):
    """Clients of one store with one token, each with a connection of its own."""

    small: AioStoreClient  # heads, leases, commits, events
    reading: AioStoreClient  # blobs
    writing: AioStoreClient

    def with_token(self, token: str) -> "StoreClients":
        return StoreClients(*(client.with_token(token) for client in self))


@dataclass(frozen=True, slots=True)
class StoreProblem:
    error: errors.KvasirError
    namespace: str
    token_file: Path | None

    @property
    def is_of_another_namespace(self) -> bool:
        """Whether the token is: then two token files are mixed up."""
        return self.error.reason == _WRONG_NAMESPACE

    @property
    def in_words(self) -> str:
        """For the operator, with the file and the remedy. Callers see no file names."""
        where = f"{self.token_file}: " if self.token_file is not None else ""
        return (
            f"namespace {self.namespace!r}: {where}{self.error.message}; put the engine's token for this namespace "
            "there (`kvasir tokens new` makes it with a new namespace), or remove the file"
        )


class BulkTraffic:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.calls = 0  # under way
        self.moved_s: float | None = None  # when some has last moved
        self.is_lost = False  # the disk of the store failed: bytes that it takes have not moved until some are durable
        self._clock = clock

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def has_moved_within(self, seconds: float) -> bool:
        """Whether some has moved a moment ago. From any thread."""
        return self.moved_s is not None and self._clock() - self.moved_s < seconds


class StoreConnection:
    """The clients of the store, the tokens that they show, and how each call is made."""

    def __init__(
        self,
        clients: StoreClients,
        namespace: str,
        token_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clients` carry the engine's credential at the store, which has to be bound to `namespace`. They must not
        retry reads by themselves: a turn has no time for that. `token_file`: where the credential's token comes from,
        for the operator. `clock` gives seconds, monotonic.
        """
        self._connections = clients
        self._newest = clients  # with the newest token
        self._known: StoreClients | None = None  # those whose token is this namespace's, by the store's answer
        self.features: frozenset[str] = frozenset()  # by the store's answer about the token
        self.clock = clock
        self._heard_s: float | None = None  # when the probe was last answered
        self._namespace = namespace
        self._token_file = token_file
        self.problem: StoreProblem | None = None  # why this store must not be used; found by asking it
        self.bulk = BulkTraffic(clock)
        self.breaker = Breaker(self._probe)

    @property
    def is_reachable(self) -> bool:
        """False from a failure until the store answers again. True for a store that was never called."""
        return not self.breaker.is_open

    async def answers(self) -> bool:
        """Whether the store answers and may be used. Calls it now, briefly, and the breaker's probe goes on if not."""
        return await self._answer() is True

    async def is_there(self) -> bool:
        """As `answers`, for those who report it: a store that is late, and answered a moment ago, is there."""
        answer = await self._answer()
        was_heard = self._heard_s is not None and self.clock() - self._heard_s < ANSWER_S
        return was_heard if answer is None else answer

    async def _answer(self) -> bool | None:
        is_late = False
        try:
            await asyncio.wait_for(self._probe(), PROBE_TIMEOUT_S)
        except TimeoutError:
            is_late = True
        except errors.KvasirError:
            pass
        except Exception:  # noqa: BLE001 - whatever it answered, this store cannot be used
            _LOG.exception("store.answer_not_understood")
        else:
            self.breaker.reset()
            return True
        if self.problem is not None:
            self.breaker.try_again()
        elif self._known is None:
            self.breaker.trip()
        return None if is_late else False

    async def renew_token(self, token: str) -> None:
        """Show this token from now on; no calls are made before the store confirmed it. Others end as they began."""
        self._newest = new = self._connections.with_token(token)
        self.problem = None
        await self.answers()
        if self._known is not new:
            self._known = None
            if self.problem is None:
                self.breaker.trip()

    async def close(self) -> None:
        await self.breaker.close()
        for client in self._connections:
            await client.close()

    def moved(self) -> None:
        """Some bulk data has come or was taken: the store is there, however late it answers."""
        self.bulk.moved_s = self.clock()
        if self._known is not None:
            self.breaker.reset()

    @property
    def client(self) -> AioStoreClient:
        return self.clients.small

    @property
    def clients(self) -> StoreClients:
        """The way to the store, for one call: tokens change. Raises PermissionDenied, or Unavailable while unknown."""
        if self._known is not None:
            return self._known
        if self.problem is not None:
            raise errors.PermissionDenied(self.problem.error.message, reason=self.problem.error.reason)
        self.breaker.trip()
        text = "the store has not reported yet the namespace of the engine's token"
        raise errors.Unavailable(text, retry_after_s=1.0)

    async def _probe(self) -> None:
        """Learn whether the newest token is this namespace's. Raises KvasirError unless it is."""
        client, found = None, ""
        while client is not self._newest:  # a token that came in the meantime is checked as well
            client = self._newest
            try:
                capabilities = await client.small.get_capabilities()
                found, self.features = capabilities.namespace, frozenset(capabilities.features)
            except (errors.Unauthenticated, errors.PermissionDenied) as error:
                if client is self._newest:
                    self._refuse(type(error)(f"the store refuses the engine's token: {error.message}"))
                    raise
        if found != self._namespace:
            # Two token files are mixed up. Their namespaces' memories must not be mixed up too.
            text = f"the store's token is bound to namespace {found!r}, expected {self._namespace!r}"
            self._refuse(errors.PermissionDenied(text, reason=_WRONG_NAMESPACE))
            raise errors.PermissionDenied(text, reason=_WRONG_NAMESPACE)
        self._known, self.problem, self._heard_s = client, None, self.clock()

    def _refuse(self, error: errors.KvasirError) -> None:
        is_news = self.problem is None or self.problem.error.message != error.message
        self._known, self.problem = None, StoreProblem(error, self._namespace, self._token_file)
        if is_news:
            _LOG.error("store.not_used", problem=self.problem.in_words)

    async def read(self, call: Callable[[], Awaitable[T]], budget: Budget) -> T:
        """One read within the budget. Raises NotFound as it is and anything else as StoreMiss."""
        if self.problem is not None:
            raise StoreMiss(Miss(MissReason.STORE_REFUSED, self.problem.error.message))
        if self.breaker.is_open:
            raise StoreMiss(Miss(MissReason.STORE_UNREACHABLE, "the store failed a moment ago"))
        if (given_s := budget.remaining_s) <= 0:
            raise StoreMiss(Miss(MissReason.STORE_TIMEOUT, "the turn's budget for the store is spent"))
        try:
            _ = self.clients  # a call may read files, for which the store is not called
            with budget.spending():
                async with asyncio.timeout(given_s):
                    return await call()
        except errors.Unavailable as error:
            self.breaker.trip(error.reason)
            raise StoreMiss(miss_of(error)) from error
        except (TimeoutError, errors.DeadlineExceeded):
            # A call that had only the last few milliseconds of a budget shows nothing about the store.
            if given_s >= budget.seconds / 2:
                self._late()
            raise StoreMiss(
                Miss(MissReason.STORE_TIMEOUT, "no answer within the turn's budget for the store")
            ) from None
        except errors.NotFound:
            raise
        except errors.Unauthenticated as error:
            self.breaker.try_again()
            raise StoreMiss(miss_of(error)) from error
        except (errors.KvasirError, StopAsyncIteration, ValueError) as error:
            raise StoreMiss(miss_of(error)) from error

    async def noting(self, call: Awaitable[T]) -> T:
        """Await a call. If the store does not answer, the breaker trips."""
        try:
            return await call
        except errors.Unavailable as error:
            self.breaker.trip(error.reason)
            raise
        except errors.DeadlineExceeded:
            self._late()
            raise
        except errors.Unauthenticated:
            self.breaker.try_again()
            raise

    def _late(self) -> None:
        """A call got no answer in time: the store is away, unless it is busy."""
        if not (self.bulk.calls and self.bulk.has_moved_within(SOON_S)):
            self.breaker.trip(errors.DeadlineExceeded.reason)
