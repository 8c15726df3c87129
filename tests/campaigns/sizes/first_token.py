"""How soon a far memory's first token comes, beside a near one's: `python -m tests.campaigns.sizes.first_token`.

Both services are killed with -9 before each turn, so all of the memory comes from the store: in turn from its disk, and
from a bucket behind a link (`far`), of which the store keeps no copies. A played model has Llama 3.1 8B's pages.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import certifi
from kvasir.clients import AioInferenceClient
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.sizes import rounds
from tests.campaigns.sizes.far import behind_a_link
from tests.campaigns.sizes.played_house import BYTES_PER_TOKEN, PlayedHouse

_STORED_WITHIN_S = 300.0
_TURN_S = 120.0


def _remember(house: PlayedHouse, agent: rounds.PlayedAgent) -> None:
    """One turn of a new agent, after which all of its memory is stored."""

    async def speak() -> None:
        async with AioInferenceClient.connect(house.engine.address) as client:
            await rounds._turn(client, agent, findings, messages=[{"role": "user", "content": agent.text}])

    findings = rounds.SizeFindings()
    asyncio.run(speak())
    rounds._check_stored(house, [agent], findings, time.monotonic() + _STORED_WITHIN_S)
    assert findings.problems == [], findings.summary()


async def _first_token_s(house: PlayedHouse, agent_id: str) -> float:
    """Of a turn that goes on with a stored memory, behind another agent's: what a process does once is done."""
    async with AioInferenceClient.connect(house.engine.address) as client:
        await _turn(client, "somebody else", messages=[{"role": "user", "content": "Good morning."}])
        first_s, source = await _turn(client, agent_id, append_messages=[{"role": "user", "content": "Go on."}])
    assert source == pb.CACHE_SOURCE_WARM, f"the memory came from elsewhere: {pb.CacheSource.Name(source)}"
    return first_s


async def _turn(client: AioInferenceClient, agent_id: str, **said: Any) -> tuple[float, pb.CacheSource]:
    return await first_delta(client.generate(agent_id=agent_id, sampling={"max_tokens": 4}, timeout_s=_TURN_S, **said))


async def first_delta(events: AsyncIterator[pb.GenerateResponse]) -> tuple[float, pb.CacheSource]:
    """Seconds until a turn's first token, and where its memory came from. The turn must have a token, and end."""
    first_s, source, began = None, pb.CACHE_SOURCE_UNSPECIFIED, time.perf_counter()
    kind = None
    async for event in events:
        kind = event.WhichOneof("event")
        if kind == "started":
            source = event.started.source
        elif kind == "delta" and first_s is None:
            first_s = time.perf_counter() - began
    assert first_s is not None, "the turn had no token"
    assert kind == "finished", f"the turn ended with {kind}"
    return first_s, source


def _forget_files(directory: Path) -> None:
    """What the kernel has of them in RAM, so that they are read from the disk."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measured(root: Path, gbit: float, tokens: int, repeats: int, *, is_cold: bool = False) -> dict[str, float]:
    """Seconds of each, medians. `is_cold`: the near store's files are read from the disk, not from the kernel's RAM."""
    memory_gib = 1.1 * (tokens + 1024) * BYTES_PER_TOKEN / 2**30
    agent = rounds.PlayedAgent("ada", rounds._text(rounds.Round("first token", 1, tokens, memory_gib), 0))
    took: dict[str, list[float]] = {"disk": [], "bucket": []}
    with ExitStack() as stack:
        url, keys = stack.enter_context(behind_a_link(root, gbit * 1e9 / 8))
        houses = {name: PlayedHouse(root / name, memory_gib) for name in took}
        no_copies = ("--blobs", url, "--blob-credentials-file", str(keys), "--blob-tier-bytes", "0")
        houses["bucket"].store.options += no_copies
        for house in houses.values():
            stack.callback(house.close)
            house.engine.options += ["--store-budget-ms", "5000"]  # a slow look is measured, not given up
            house.start()
            _remember(house, agent)
            house.restart_dear()
            house.kill()
        for _ in range(repeats):
            for name, house in houses.items():
                if is_cold and name == "disk":
                    _forget_files(house.data_dir)
                house.start()
                took[name].append(asyncio.run(_first_token_s(house, agent.name)))
                house.kill()
    seconds = {name: statistics.median(each) for name, each in took.items()}
    return {
        "tokens": agent.memory_tokens,
        **{f"first_token_from_{name}_s": round(each, 3) for name, each in seconds.items()},
        "link_s": round(agent.memory_tokens * BYTES_PER_TOKEN / (gbit * 1e9 / 8), 3),  # the bytes alone
        "bucket_to_disk": round(seconds["bucket"] / seconds["disk"], 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbit", type=float, default=10, help="of the link, a second")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cold", action="store_true", help="read the near memory from the disk, not from the page cache"
    )
    parser.add_argument("--dir", type=Path, help="on which disk; left out: the one for temporary files")
    given = parser.parse_args(arguments)
    os.environ.setdefault("SSL_CERT_FILE", certifi.where())  # the bucket's client wants some
    with tempfile.TemporaryDirectory(prefix="kvasir-first-", dir=given.dir) as directory:
        found = measured(Path(directory), given.gbit, given.tokens, given.repeats, is_cold=given.cold)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
