"""Several streams as one: all that they give comes, and none outlives the first failure."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest
from kvasir.clients.aio.blob_transfers import side_by_side


def streams(ended: list[str], *, failing: str = "") -> list[AsyncGenerator[str, None]]:
    async def stream(name: str, pause_s: float) -> AsyncGenerator[str, None]:
        try:
            for number in range(3):
                await asyncio.sleep(pause_s)
                if name == failing and number == 1:
                    raise ValueError(name)
                yield f"{name}{number}"
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    return [stream("a", 0.001), stream("b", 0.002), stream("c", 0)]


async def items_of(sources: list[AsyncGenerator[str, None]], until: Callable[[str], bool]) -> list[str]:
    """The end of the loop would end what is left, so that is looked for before."""
    found = []
    merged = side_by_side(sources)
    try:
        async for item in merged:
            found.append(item)
            if until(item):
                break
    finally:
        await merged.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not any(source.ag_frame for source in sources), "all have ended"
    return found


def test_all_items_come_each_streams_in_order() -> None:
    ended: list[str] = []
    found = asyncio.run(items_of(streams(ended), lambda _: False))
    assert sorted(found) == [f"{name}{number}" for name in "abc" for number in range(3)]
    assert all([item for item in found if item[0] == name] == [f"{name}{n}" for n in range(3)] for name in "abc")
    assert sorted(ended) == ["a", "b", "c"]


@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_the_first_failure_is_raised_when_all_have_ended(failing: str) -> None:
    ended: list[str] = []
    with pytest.raises(ValueError, match=failing):
        asyncio.run(items_of(streams(ended, failing=failing), lambda _: False))
    assert sorted(ended) == ["a", "b", "c"]


def test_leaving_early_ends_all_streams() -> None:
    ended: list[str] = []
    asyncio.run(items_of(streams(ended), lambda item: item == "c0"))
    assert sorted(ended) == ["a", "b", "c"]


async def test_a_failure_while_others_fail_too_leaves_no_task_behind() -> None:
    async def fail(name: str) -> AsyncGenerator[str, None]:
        await asyncio.sleep(0)
        if name:
            raise ValueError(name)
        yield name

    with pytest.raises(ValueError, match=r"[ab]"):
        await items_of([fail("a"), fail("b")], lambda _: False)
    assert len(asyncio.all_tasks()) == 1
