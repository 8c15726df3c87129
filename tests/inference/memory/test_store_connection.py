"""The way to a store that is away, slow, of another namespace or talks nonsense: kept shut, and opened again."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir import errors
from kvasir.clients import AioStoreClient
from kvasir.formats.digest import Digest
from kvasir.waits import ANSWER_S

from inference_svc.memory.store import connection, patience
from inference_svc.memory.store.answers import StoreMiss
from inference_svc.memory.store.connection import StoreClients
from inference_svc.memory.store.patience import Breaker, Budget
from inference_svc.memory.store.remote_cache import RemoteCache


def test_a_budget_is_spent_by_waiting_and_earned_by_bytes() -> None:
    now = [0.0]
    budget = Budget(0.25, 1000, lambda: now[0])
    with budget.spending():
        now[0] += 0.2
    assert budget.remaining_s == pytest.approx(0.05)
    budget.earn(500)
    assert budget.remaining_s == pytest.approx(0.55)
    with contextlib.suppress(ZeroDivisionError), budget.spending():
        now[0] += 9
        raise ZeroDivisionError
    assert budget.remaining_s == 0


def test_a_budget_is_longer_for_a_block_whose_time_is_counted_and_no_loss_for_the_rest() -> None:
    now = [0.0]
    budget = Budget(0.25, 1000, lambda: now[0])
    with budget.at_least(2.0):
        assert budget.remaining_s == 2.0
        with contextlib.suppress(ZeroDivisionError), budget.spending():
            now[0] += 1.5
            raise ZeroDivisionError
        assert budget.remaining_s == pytest.approx(0.5)
    assert (budget.spent_s, budget.remaining_s) == (1.5, pytest.approx(0.25))
    with budget.at_least(0.1):
        assert budget.remaining_s == pytest.approx(0.25), "it is no less than it was"


async def test_a_breaker_opens_at_a_failure_and_closes_when_the_probe_is_answered() -> None:
    answers = iter((errors.Unavailable("away"), errors.DeadlineExceeded("slow"), None))
    probes = 0

    async def probe() -> None:
        nonlocal probes
        probes += 1
        if (failure := next(answers)) is not None:
            raise failure

    breaker = Breaker(probe)
    assert not breaker.is_open
    breaker.trip()
    breaker.trip()
    assert breaker.is_open
    await asyncio.wait_for(breaker.closed.wait(), 5)
    assert not breaker.is_open
    assert probes == 3
    await breaker.close()


async def test_a_probe_that_fails_in_an_unknown_way_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK_S", 0.001)
    async with asyncio.timeout(10):
        answers = iter((ValueError("nonsense"), None))

        async def probe() -> None:
            if (failure := next(answers)) is not None:
                raise failure

        breaker = Breaker(probe)
        breaker.trip()
        await breaker.closed.wait()
        await breaker.close()


@pytest.mark.parametrize(("spent_s", "is_reachable"), [(0.0, False), (0.045, True)])
@pytest.mark.parametrize("times_out_itself", [True, False])
async def test_only_a_call_that_had_most_of_the_budget_reports_that_a_store_is_away(
    spent_s: float, is_reachable: bool, times_out_itself: bool
) -> None:
    async with asyncio.timeout(10):

        async def slow(_agent: str) -> None:
            if times_out_itself:
                raise errors.DeadlineExceeded("slow")
            await asyncio.Event().wait()

        async def nothing() -> Any:
            return SimpleNamespace(namespace="default", features=())

        client: Any = SimpleNamespace(get_agent=slow, get_capabilities=nothing, close=nothing)
        store = RemoteCache(StoreClients(client, client, client), "default")
        assert await store.connection.answers()
        budget = Budget(0.05, 1000, lambda: 0.0)
        budget.spent_s = spent_s
        with pytest.raises(StoreMiss, match="budget"):
            await store.agents.heads("a", "cd" * 32, budget)
        assert store.connection.is_reachable is is_reachable
        await store.connection.close()


@pytest.mark.parametrize(
    ("moved_ago_s", "is_under_way", "is_reachable"),
    [(None, True, False), (9.0, True, False), (0.5, False, False), (0.5, True, True)],
)
async def test_a_store_that_answers_late_while_bulk_data_moves_is_there(
    moved_ago_s: float | None, is_under_way: bool, is_reachable: bool
) -> None:
    async with asyncio.timeout(10):
        now = [0.0]

        async def late(*_arguments: object, **_how: object) -> None:
            raise errors.DeadlineExceeded("slow")

        async def nothing() -> Any:
            return SimpleNamespace(namespace="default", features=())

        small: Any = SimpleNamespace(get_agent=late, find_missing=late, get_capabilities=nothing, close=nothing)
        bulk: Any = SimpleNamespace(close=nothing)
        store = RemoteCache(StoreClients(small, bulk, bulk), "default", clock=lambda: now[0])
        assert await store.connection.answers()
        if moved_ago_s is not None:
            store.connection.moved()
            now[0] += moved_ago_s
        with store.connection.bulk.under_way() if is_under_way else contextlib.nullcontext():
            with pytest.raises(StoreMiss):
                await store.agents.heads("a", "cd" * 32, Budget(0.05, 1000, lambda: 0.0))
            assert store.connection.is_reachable is is_reachable
            with pytest.raises(errors.DeadlineExceeded):
                await store.blobs.renew([], 1.0)
            assert store.connection.is_reachable is is_reachable
        store.connection.moved()
        assert store.connection.is_reachable
        await store.connection.close()


@pytest.mark.parametrize(
    ("reason", "retry_after_s", "tries"), [("DISK_FAILED", 60, 1), ("DISK_FAILED", 1, 5), ("STREAM_CUT", None, 5)]
)
async def test_bytes_that_a_store_refuses_again_and_again_have_not_moved_and_come_again_if_it_may_take_them_soon(
    monkeypatch: pytest.MonkeyPatch, reason: str, retry_after_s: float | None, tries: int
) -> None:
    """Else an engine that ends goes on trying, as long as bytes move. Those of a stream that was cut have moved."""
    sent, now = list[object](), [0.0]

    async def refused(_client: object, upload: Any, _timeout_s: float) -> None:
        sent.append(upload)
        upload._report()  # a frame was taken
        raise errors.Unavailable("refused", reason=reason, retry_after_s=retry_after_s)

    async def all_of(_client: object, digests: list[Digest], **_how: object) -> list[Digest]:
        return digests

    async def at_once(*_given: object) -> None:
        return

    async def known(_client: object, **_how: object) -> Any:
        return SimpleNamespace(namespace="default", features=())

    monkeypatch.setattr(AioStoreClient, "get_capabilities", known)
    monkeypatch.setattr(AioStoreClient, "_send", refused)
    monkeypatch.setattr(AioStoreClient, "find_missing", all_of)
    monkeypatch.setattr(AioStoreClient, "_pause", at_once)
    async with asyncio.timeout(10), AioStoreClient.connect("127.0.0.1:1") as client:
        store = RemoteCache(StoreClients(client, client, client), "default", clock=lambda: now[0])
        assert await store.connection.answers()
        for _ in range(2):
            now[0] += 60
            with pytest.raises(errors.Unavailable):
                await store.blobs.write_tensors([b"some", b"files"], 5.0)
        assert store.connection.bulk.has_moved_within(60.0) is (reason != "DISK_FAILED")
        assert len(sent) == 2 * tries
        await store.connection.close()


async def test_a_store_whose_token_is_another_namespaces_is_not_used() -> None:
    async with asyncio.timeout(10):

        async def capabilities() -> Any:
            return SimpleNamespace(namespace="south", features=())

        async def never(*_arguments: object, **_how: object) -> None:
            raise AssertionError("a call reached the wrong namespace")

        client: Any = SimpleNamespace(
            get_capabilities=capabilities, get_agent=never, put_blobs=never, close=capabilities
        )
        store = RemoteCache(StoreClients(client, client, client), "north")
        assert not await store.connection.answers()
        with pytest.raises(StoreMiss, match="'south', expected 'north'"):
            await store.agents.heads("a", "cd" * 32, Budget(1.0, 1000, lambda: 0.0))
        with pytest.raises(errors.PermissionDenied):
            await store.blobs.write_tensors([b"x"], 1.0)
        await store.connection.close()


async def test_an_answer_that_is_none_makes_a_store_unreachable_and_no_bug() -> None:
    async with asyncio.timeout(10):

        async def nonsense() -> Any:
            return None

        client: Any = SimpleNamespace(get_capabilities=nonsense, close=nonsense)
        store = RemoteCache(StoreClients(client, client, client), "default")
        assert not await store.connection.answers()
        await store.connection.close()


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_store_that_answers_why_it_serves_nothing_is_away_for_that_reason(
    is_read: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one whose disk is away: the log knew it as unreachable, whose process ran."""

    async def nothing() -> Any:
        return SimpleNamespace(namespace="default", features=())

    async def fail() -> None:
        raise errors.Unavailable("no such device", reason="DISK_FAILED")

    client: Any = SimpleNamespace(get_capabilities=nothing, close=nothing)
    store = RemoteCache(StoreClients(client, client, client), "default").connection
    assert await store.answers()
    with pytest.raises(StoreMiss if is_read else errors.Unavailable):
        await (store.read(fail, Budget(1.0, 1000, lambda: 0.0)) if is_read else store.noting(fail()))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "store.unreachable" in line]
    assert "DISK_FAILED" in line
    await store.close()


async def test_an_answer_about_the_token_before_says_nothing_of_the_one_that_came_meanwhile() -> None:
    was_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def north() -> Any:
        was_asked.set()
        await may_answer.wait()
        return SimpleNamespace(namespace="north", features=())

    async def south() -> Any:
        return SimpleNamespace(namespace="south", features=())

    new: Any = SimpleNamespace(get_capabilities=south)
    old: Any = SimpleNamespace(get_capabilities=north, with_token=lambda _token: new, close=south)
    store = RemoteCache(StoreClients(old, old, old), "north")
    asking = asyncio.create_task(store.connection.answers())
    await was_asked.wait()
    await store.connection.renew_token("new")
    may_answer.set()
    assert not await asking
    with pytest.raises(StoreMiss, match="'south', expected 'north'"):
        await store.agents.heads("a", "cd" * 32, Budget(1.0, 1000, lambda: 0.0))
    await store.connection.close()


async def test_a_store_that_goes_after_refusals_is_found_as_soon_as_any() -> None:
    refusals = [errors.Unauthenticated("no")] * 3
    are_told = asyncio.Event()

    async def probe() -> None:
        if refusals:
            refused = refusals.pop()
            if not refusals:
                are_told.set()
            raise refused

    breaker = Breaker(probe)
    breaker.try_again()
    await are_told.wait()
    breaker.trip()
    await asyncio.wait_for(breaker.closed.wait(), 0.5)
    await breaker.close()


@pytest.mark.parametrize("silent_s", [0.0, ANSWER_S - 1, ANSWER_S + 1])
async def test_a_store_that_answered_a_moment_ago_is_late_and_not_away(
    silent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PROBE_TIMEOUT_S", 0.05)
    async with asyncio.timeout(10):
        now_s, answer = 100.0, asyncio.Event()
        answer.set()
        failure: Exception | None = None

        async def capabilities() -> Any:
            if failure is not None:
                raise failure
            await answer.wait()
            return SimpleNamespace(namespace="default", features=())

        async def close() -> None:
            pass

        client: Any = SimpleNamespace(get_capabilities=capabilities, close=close)
        store = RemoteCache(StoreClients(client, client, client), "default", clock=lambda: now_s)
        assert await store.connection.is_there()
        answer.clear()
        now_s += silent_s
        assert await store.connection.is_there() == (silent_s < ANSWER_S)
        assert not await store.connection.answers()
        failure = errors.Unavailable("away")
        assert not await store.connection.is_there(), "who does not listen is away at once"
        failure = None
        answer.set()
        assert await store.connection.is_there()
        await store.connection.close()
