"""What `kvasir bench store` counts as the store's time."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest
from kvasir.formats.digest import Digest
from kvasir_bench.store import measuring


class Slow:
    """A store that takes a tenth of a second for each call."""

    def __init__(self) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self.calls = 0

    async def put_blobs(self, blobs: Mapping[Digest, bytes]) -> None:
        self.calls += 1
        await asyncio.sleep(0.1)
        self.blobs.update(blobs)


def test_the_time_in_which_small_blobs_are_made_is_not_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a quarter of their time and more."""

    def made(_identity: Any, chain: str, *_: Any) -> bytes:
        time.sleep(0.05)
        return chain.encode()

    monkeypatch.setattr(measuring, "_file", made)
    client: Any = Slow()
    seconds = asyncio.run(measuring._filled_s(client, measuring._identity("small", 1, 1, 64), 10))
    assert 0.1 <= seconds < 0.4, "the calls alone, all at once"
    assert (client.calls, sorted(client.blobs.values())) == (4, sorted(str(n).encode() for n in range(10)))
