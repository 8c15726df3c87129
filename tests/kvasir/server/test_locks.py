"""Locks by key: one holder of a key at a time, others in order, and no trace of a key that nobody uses."""

import asyncio

from kvasir.server.locks import Locks


async def test_holders_of_one_key_take_turns_and_leave_nothing() -> None:
    locks, seen = Locks[str](), list[str]()

    async def hold(key: str, name: str) -> None:
        async with locks.held(key):
            seen.append(f"{name} begins")
            await asyncio.sleep(0)
            seen.append(f"{name} ends")

    first = asyncio.create_task(hold("a", "first"))
    rest = [asyncio.create_task(hold(key, name)) for key, name in (("a", "second"), ("a", "third"), ("b", "other"))]
    await asyncio.sleep(0)
    assert "a" in locks
    rest[1].cancel()
    await asyncio.gather(first, *rest, return_exceptions=True)
    assert "a" not in locks
    assert len(locks) == 0
    own = [event for event in seen if not event.startswith("other")]
    assert own == ["first begins", "first ends", "second begins", "second ends"]
    assert seen.index("other begins") < seen.index("first ends")
