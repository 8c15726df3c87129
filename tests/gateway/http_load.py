"""`make bench-http`: many streams at once through the gateway, then many readers who leave; says what it found.

Streams end whole and without an error, the gateway says how soon it wrote what it received, and after the readers have
left no turn waits or runs.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL

# More than the readers of any run: admission is not what is measured.
ROOM = ("--max-turns", "2000", "--max-turns-per-namespace", "2000", "--max-turns-per-caller", "2000")
WRITTEN_WITHIN_MS = 5.0
# An engine takes 256 calls at once of one key.
_CALLERS = ("ada", "bob")


async def streams(front: Front, count: int, tokens: int) -> Counter[str]:
    """How so many streams at once ended."""
    return await _all(front, [(tokens, None)] * count)


async def leaving(front: Front, count: int) -> Counter[str]:
    """As streams; each reader leaves after a few lines, some before the first."""
    return await _all(front, [(400, number % 5) for number in range(count)])


def running_turns(front: Front) -> int:
    with front.house.client() as client:
        return sum(each.waiting_turns + each.running_turns for each in client.get_stats().namespaces)


def seconds_until_idle(front: Front, within_s: float) -> float | None:
    began_s = time.monotonic()
    while running_turns(front):
        if time.monotonic() - began_s > within_s:
            return None
        time.sleep(0.05)
    return time.monotonic() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--leave", type=int, default=500)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, running_front(Path(root), engine_options=ROOM) as front:
        began_s = time.monotonic()
        ended = asyncio.run(streams(front, asked.streams, asked.tokens))
        print(f"{asked.streams} streams of {asked.tokens} tokens in {time.monotonic() - began_s:.1f} s: {dict(ended)}")
        left = asyncio.run(leaving(front, asked.leave))
        idle_s = seconds_until_idle(front, within_s=60)
        print(f"{asked.leave} readers left: {dict(left)}; idle after {idle_s} s")
        front.gateway.stop()
        told = re.search(r"events=(\d+) written_within_ms_p50=(\S+) p99=(\S+)", front.gateway.log)
        assert told is not None, front.gateway.log
        if refusals := Counter(re.findall(r"reason=(\w+)", front.gateway.log)):
            print(f"refused: {dict(refusals)}")
        print(f"{told[1]} events, written within {told[2]} ms (p50), {told[3]} ms (p99)")
    is_met = (
        set(ended) == {"whole"}
        and set(left) <= {"whole", "left"}
        and idle_s is not None
        and float(told[3]) <= WRITTEN_WITHIN_MS
    )
    print("met" if is_met else "missed")
    return 0 if is_met else 1


async def _all(front: Front, readers: Sequence[tuple[int, int | None]]) -> Counter[str]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    keys = [front.bearer(caller) for caller in _CALLERS]
    async with httpx.AsyncClient(base_url=front.gateway.url, limits=limits, timeout=600) as client:
        reading = (_read(client, keys[number % 2], number, *reader) for number, reader in enumerate(readers))
        return Counter(await asyncio.gather(*reading))


async def _read(
    client: httpx.AsyncClient, key: dict[str, str], number: int, tokens: int, leaves_after: int | None
) -> str:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Reader {number} asks: what is my name?"}],
        "max_tokens": tokens,
        "stream": True,
        "logit_bias": {"2": -100},  # never the end of a reply
    }
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=key) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return f"{answer.status_code} {answer.json()['error']['message'][:200]}"
            lines = 0
            last = ""
            async for line in answer.aiter_lines():
                if leaves_after is not None and lines >= leaves_after:
                    return "left"
                if line.startswith("data: "):
                    lines += 1
                    if '"error"' in line:
                        return "error"
                    last = line
    except httpx.TransportError as error:
        return type(error).__name__
    return "whole" if last == "data: [DONE]" else "cut"


if __name__ == "__main__":
    sys.exit(main())
