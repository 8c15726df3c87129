"""What takes a memory back goes on as soon as the holder of the agent's lease lets go, and leaves nothing behind."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition, KvasirError, Unavailable
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.facts.records import LeaseToken
from cachestore_svc.store import aio_store
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent

KV = kv_identity_hash(SMALL)
THEIRS = "theirs"
HOLDS_S = 600.0


class Scene:
    """A store whose agents' leases an engine has, and what it was asked."""

    def __init__(self, lab: Lab, store: Store, threads: StoreThreads) -> None:
        self.lab, self.store, self.aio = lab, store, AioStore(store, threads)
        self.tries = 0
        self._tokens: dict[tuple[str, str], LeaseToken] = {}

    def hold(self, agent_id: str, namespace: str = NS) -> None:
        publish(self.store, agent_id, SyntheticAgent(SMALL, 1).turn(30), 0, namespace)
        self._tokens[namespace, agent_id] = self.store.leases.acquire(namespace, agent_id, KV, "e", HOLDS_S).token

    def let_go(self, agent_id: str, namespace: str = NS) -> None:
        self.store.leases.release(namespace, agent_id, KV, self._tokens[namespace, agent_id])

    def delete(self, agent_id: str, left_s: float | None = None) -> "asyncio.Task[object]":
        def delete(namespace: str) -> object:
            self.tries += 1
            return self.store.agents.delete(namespace, agent_id)

        return asyncio.create_task(self.aio.run_once_free(NS, agent_id, left_s, delete))

    async def refused(self, tries: int) -> None:
        """Return when it was tried so often, and what was found is known."""
        async with asyncio.timeout(30):
            while self.tries < tries or self.aio.threads.room.held_units:  # noqa: ASYNC110  on threads
                await asyncio.sleep(0.005)

    @property
    def waiting(self) -> int:
        return len(self.store._core.released._callbacks)


@asynccontextmanager
async def scene(directory: Path) -> AsyncIterator[Scene]:
    lab, threads = Lab(directory), StoreThreads(4)
    with lab.open() as store:
        try:
            yield Scene(lab, store, threads)
        finally:
            threads.close()


def run(test: Awaitable[None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(in_time())


@pytest.fixture
def polls_never(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "PAUSE_S"):
        monkeypatch.setattr(aio_store, name, HOLDS_S)


@pytest.mark.usefixtures("polls_never")
def test_a_release_wakes_all_that_wait_for_the_agent_and_nobody_else(tmp_path: Path) -> None:
    async def test() -> None:
        async with scene(tmp_path) as at:
            for agent in ("ada", "bob"):
                at.hold(agent)
            at.hold("ada", THEIRS)
            ada, bob = at.delete("ada"), at.delete("bob")
            await at.refused(2)
            at.let_go("ada", THEIRS)
            at.let_go("bob")
            await bob
            await at.refused(3)
            assert (at.tries, ada.done()) == (3, False)
            at.let_go("ada")
            await ada
            assert (at.tries, at.waiting) == (4, 0)

    run(test())


@pytest.mark.usefixtures("polls_never")
def test_a_release_behind_the_look_is_not_missed_and_one_before_it_wakes_nobody_twice(tmp_path: Path) -> None:
    async def test() -> None:
        async with scene(tmp_path) as at:
            at.hold("ada")

            def finds_it_held(_: str) -> None:
                at.tries += 1
                if at.tries == 1:
                    at.let_go("ada")
                if at.tries < 3:
                    raise FailedPrecondition("held", reason="LEASE_HELD", metadata={"left_ms": "600000"})

            calling = asyncio.create_task(at.aio.run_once_free(NS, "ada", None, finds_it_held))
            await at.refused(2)
            await asyncio.sleep(0.1)
            assert (at.tries, at.waiting) == (2, 1)
            calling.cancel()

    run(test())


@pytest.mark.usefixtures("polls_never")
@pytest.mark.parametrize("end", ["cancelled", "out of time", "refused"])
def test_a_caller_who_waits_no_more_leaves_nothing(tmp_path: Path, end: str) -> None:
    async def test() -> None:
        async with scene(tmp_path) as at:
            at.hold("ada")
            left_s = 5.0 if end == "out of time" else None
            stays, ends = at.delete("ada"), at.delete("nobody" if end == "refused" else "ada", left_s)
            await at.refused(2)
            if end == "cancelled":
                ends.cancel()
            [ended] = await asyncio.gather(ends, return_exceptions=True)
            expected = {"cancelled": asyncio.CancelledError, "out of time": Unavailable, "refused": KvasirError}
            assert isinstance(ended, expected[end])
            [callbacks] = at.store._core.released._callbacks.values()
            assert len(callbacks) == 1
            at.let_go("ada")
            await stays
            assert at.waiting == 0

    run(test())


def test_a_lease_that_ends_and_that_nobody_gives_back_is_waited_for_no_longer(tmp_path: Path) -> None:
    async def test() -> None:
        async with scene(tmp_path) as at:
            at.hold("ada")
            deleting = at.delete("ada")
            await at.refused(2)
            at.lab.clock.pass_s(HOLDS_S + 1)
            await deleting

    run(test())


def test_a_wait_leaves_no_error_to_the_garbage_collector(tmp_path: Path) -> None:
    async def test() -> None:
        async with scene(tmp_path) as at:
            at.hold("ada")
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            deleting = at.delete("ada")
            await at.refused(2)
            at.let_go("ada")
            await deleting
            gc.collect()
            assert [each for each in gc.garbage if isinstance(each, KvasirError)] == []

    try:
        run(test())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_lease_that_is_renewed_in_its_last_millisecond_is_polled_at_intervals(tmp_path: Path) -> None:
    async def test() -> None:
        tries = 0

        async def call() -> None:
            nonlocal tries
            tries += 1
            left_ms = "0" if tries == 1 else "600000"
            raise FailedPrecondition("held", reason="LEASE_HELD", metadata={"left_ms": left_ms})

        async with scene(tmp_path) as here:
            with pytest.raises(Unavailable):
                await here.aio.once_free(NS, "planner", 0.5, call)
        assert tries < 20

    run(test())
