"""The lease of one line: requested when a turn begins, beside its other work, and given back for good."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

import structlog
from kvasir import errors
from kvasir.waits import LOOK_S, PAUSE_S, RETRY_S, SOON_S

from inference_svc.engine.api import AgentKey
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.lines.line_states import COUNTS_S, Lease
from inference_svc.memory.store.answers import LEASE_TTL_S
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache

_LOG = structlog.get_logger(__name__)
_HELD = "LEASE_HELD"
MOVED = ("AGENT_MOVED", "AGENT_MOVING")  # why a store gives nobody a lease: the agent is another store's, or on its way
Spawn = Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"]


class LineLease:
    def __init__(self, key: AgentKey, store: RemoteCache, parts: LineParts, spawn: Spawn) -> None:
        self.held: Lease | None = None
        self.is_wanted = False  # another engine waits for it
        self._key = key
        self._store = store
        self._parts = parts
        self._spawn = spawn
        self._generation = 0  # of the last lease that this process had; 0: none yet, or it was given back
        self._doubted_at = 0.0
        self._epoch = 0  # rises whenever the lease is given back: answers to earlier requests are void
        self._acquiring: asyncio.Task[None] | None = None
        self._failure: errors.KvasirError | None = None  # why the last request failed

    @property
    def generation(self) -> int:
        """Of the lease that the line's next commit brings; 0 without a lease."""
        return self.held.generation if self.held is not None else 0

    @property
    def is_requested(self) -> bool:
        return self._acquiring is not None

    @property
    def is_elsewhere(self) -> bool:
        return self._failure is not None and self._failure.reason in (_HELD, *MOVED)

    def _counting(self) -> Lease | None:
        return self.held if self.held is not None and self.held.counts(self._parts.lease_clock()) else None

    @property
    def _holder(self) -> str:
        """Who has it, as the store named that engine; empty if it did not."""
        return self._failure.metadata.get("owner", "") if self._failure is not None else ""

    def request(self, *, takes: bool = True) -> None:
        """Request it, unless this engine has it. The turn does not wait for the answer. `takes`: from another, too."""
        if self._counting() is None and self._store.connection.is_reachable:
            self._request(takes=takes)

    @property
    def is_wanted_now(self) -> bool:
        """Whether another engine waits for the lease that this engine has."""
        return self.is_wanted and self.held is not None

    def _request(self, *, takes: bool = True) -> "asyncio.Task[None]":
        if self._acquiring is None:
            self._acquiring = self._spawn(self._acquire(takes=takes))
        return self._acquiring

    async def answered(self, budget: Budget) -> None:
        with budget.spending():
            if self._acquiring is not None:
                await asyncio.wait({self._acquiring}, timeout=max(budget.remaining_s, 0))

    async def obtain(self, patience_s: float, *, takes: bool = True) -> Lease:
        """The lease; its holder has `patience_s` to give it back. Raises Unavailable (AGENT_HELD_ELSEWHERE)."""
        began, pause_s = self._parts.clock(), LOOK_S
        give_up = began + patience_s
        while True:
            if (lease := self._counting()) is not None:
                return lease
            request = self._request(takes=takes)
            await asyncio.wait({request}, timeout=max(give_up - self._parts.clock(), SOON_S))
            if not request.done():  # it goes on: its answer is of use to the next turn
                raise errors.DeadlineExceeded("the store has not answered yet about the agent's line")
            if self.held is not None:
                return self.held
            if self._failure is not None and self._failure.reason != _HELD:
                raise self._failure
            if (now := self._parts.clock()) >= give_up:
                raise errors.Unavailable(
                    "another inference service, or a change of the agent, holds its line; retry, or call that service",
                    reason="AGENT_HELD_ELSEWHERE",
                    metadata={"agent_id": self._key.agent_id, "owner": self._holder},
                    retry_after_s=1.0,
                )
            await asyncio.sleep(min(pause_s, give_up - now))  # the last request is made when the patience ends
            # Each request is a write at the store: the longer the wait, the fewer of them.
            waited_s = self._parts.clock() - began
            pause_s = min(max(min(2 * pause_s, PAUSE_S), waited_s / 4), RETRY_S)

    def unverified(self) -> None:
        """Events were lost: so may be a lease that is held, or about to be granted."""
        self._doubted_at = self._parts.lease_clock()
        if self.held is not None:
            self.held.unverified(self._doubted_at)

    def give_back(self) -> None:
        if (lease := self._dropped()) is not None:
            self._spawn(self._release(lease))

    async def hand_on(self) -> None:
        """As `give_back`, and wait for the store, if it is there: another engine goes on, or this one ends."""
        if (lease := self._dropped()) is not None:
            await self._release(lease)

    def _dropped(self) -> Lease | None:
        """A release may arrive behind the next request, which therefore begins again: its generation differs."""
        lease, self.held, self._generation = self.held, None, 0
        self._epoch += 1
        return lease

    async def _release(self, lease: Lease) -> None:
        # After that time the lease has ended by itself. Until then a rollback or the like may be waiting for it.
        with contextlib.suppress(errors.KvasirError):
            await self._store.leases.release(
                self._key.agent_id,
                self._parts.engine.model.kv_identity_hash,
                self._parts.owner,
                lease.generation,
                LEASE_TTL_S,
            )

    async def _acquire(self, *, takes: bool) -> None:
        sent_at, epoch = self._parts.lease_clock(), self._epoch
        try:
            granted = await self._store.leases.acquire(
                self._key.agent_id,
                self._parts.engine.model.kv_identity_hash,
                self._parts.owner,
                begins_anew=not self._generation,
                asks=takes,
                timeout_s=COUNTS_S,
            )
        except errors.KvasirError as error:
            self.held, self._failure = None, error
        except Exception as error:  # noqa: BLE001 - an invalid answer: the turn goes on without a lease
            _LOG.warning("lease.answer_not_understood", error=type(error).__name__)
            self.held, self._failure = None, errors.Unavailable("the store's answer was not understood")
        else:
            lease = Lease.granted(granted.generation, granted.head.identity, sent_at)
            self._failure = None
            if sent_at < self._doubted_at:
                lease.unverified(self._doubted_at)
            if self._epoch != epoch:  # taken back meanwhile: the granted head may be older than that
                self._spawn(self._release(lease))
                return
            self.held, self._generation, self.is_wanted = lease, lease.generation, False
        finally:
            self._acquiring = None
