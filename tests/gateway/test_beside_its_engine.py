"""A gateway that starts beside its engine waits for it: a call to a missing engine would delay the next ones."""

import asyncio
import time
from pathlib import Path

from kvasir_gateway.__main__ import until_it_listens


async def test_a_start_waits_until_its_engine_listens_or_its_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    await until_it_listens(f"unix:{path}", 0.1, time.monotonic)
    waiting = asyncio.create_task(until_it_listens(f"unix:{path}", 600, time.monotonic))
    await asyncio.wait({waiting}, timeout=0.2)
    assert not waiting.done()
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), path):
        await asyncio.wait_for(waiting, 10)
    if not path.exists():  # Python 3.13 removes it
        path.touch()
    await asyncio.wait_for(until_it_listens(f"unix:{path}", 600, time.monotonic), 10)
