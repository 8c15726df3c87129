"""The threads of the store: one namespace never has all, and who waits is served in turn."""

import asyncio
import threading
from collections import Counter

import pytest

from cachestore_svc.store import threads as store_threads
from cachestore_svc.store.threads import StoreThreads


async def test_a_namespace_whose_calls_hang_leaves_threads_for_others() -> None:
    go_on = threading.Event()
    threads = StoreThreads(8)
    hanging = [threads.start("a", go_on.wait, 20) for _ in range(100)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        assert await threads.run("b", lambda: "served") == "served"
        also = threads.start("c", go_on.wait, 20)
        assert await threads.run("d", lambda: "served") == "served"
    go_on.set()
    assert await asyncio.gather(*hanging, also) == [True] * 101
    threads.close()


async def test_calls_that_last_keep_their_namespace_from_no_thread_while_another_was_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_threads, "SOON_S", 0.02)
    go_on = threading.Event()
    threads = StoreThreads(8, beside=2)
    await threads.run("b", int)
    lasting = [threads.start("a", go_on.wait, 60) for _ in range(2)]
    async with asyncio.timeout(20):
        assert await threads.start("a", lambda: "served") == "served"
    go_on.set()
    assert await asyncio.gather(*lasting) == [True, True]
    assert (threads.room.held_units, threads.room._excused) == (0, Counter())
    threads.close()


async def test_waiting_calls_are_served_in_turn_by_namespace() -> None:
    served: list[str] = []
    go_on = threading.Event()
    threads = StoreThreads(1)
    first = threads.start("z", go_on.wait, 20)
    await asyncio.sleep(0)
    calls = [threads.start(name, served.append, name) for name in [*"a" * 10, *"b" * 2]]
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.gather(first, *calls)
    threads.close()
    assert served[:4] == ["a", "b", "a", "b"]
    assert Counter(served) == {"a": 10, "b": 2}


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_call_runs_to_its_end_and_gives_its_thread_back(cancels: int) -> None:
    """A caller who goes away, and then is removed: what the call holds is closed by neither before its end."""
    ended, go_on = threading.Event(), threading.Event()

    def work() -> None:
        assert go_on.wait(20)
        ended.set()

    threads = StoreThreads(1)
    calling = asyncio.create_task(threads.run("a", work))
    for _ in range(cancels):
        await asyncio.sleep(0.05)
        calling.cancel()
    await asyncio.sleep(0.05)
    assert not calling.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set()
    assert threads.room.held_units == 0
    threads.close()


async def test_long_calls_of_one_namespace_leave_the_interpreter_to_others() -> None:
    threads, running, most = StoreThreads(), 0, 0
    done = threading.Event()

    def look_up() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        done.wait(60)
        running -= 1

    greedy = [asyncio.create_task(threads.run_long("greedy", look_up)) for _ in range(8)]
    await asyncio.sleep(0.05)
    assert (running, most) == (1, 1)
    await asyncio.wait_for(threads.run_long("other", lambda: None), 20)
    await asyncio.wait_for(threads.run("other", lambda: None), 20)
    done.set()
    await asyncio.gather(*greedy)
    assert most == 1
    threads.close()


async def test_a_thread_is_given_back_whatever_its_call_comes_to() -> None:
    threads = StoreThreads(4)
    for _ in range(20):
        (failed,) = await asyncio.gather(threads.run("a", int, "one"), return_exceptions=True)
        assert isinstance(failed, ValueError)
    await asyncio.sleep(0)
    assert threads.room.held_units == 0
    threads.close()
