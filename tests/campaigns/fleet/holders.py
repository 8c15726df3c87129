"""Owners of leases, who take them from any store, and give them back or let them end: of a line never two at once."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvasir import errors
from kvasir.formats.block_hash import kv_identity_hash

from tests.campaigns.history.record import AnyStore, Record
from tests.made_models.synthetic import SMALL
from tools.kvasir_tiny.words import Dice

_KV = kv_identity_hash(SMALL)
_LINES = 3
_LASTS_S = (5.0, 8.0, 12.0)
_PAUSE_S = 0.5


async def hold(store: AnyStore, record: Record, name: str, is_over: Callable[[], bool]) -> None:
    """Until it is over, have one lease after the other, and note when."""
    dice = Dice(f"holder {name}")
    while not is_over():
        await asyncio.sleep(_PAUSE_S * dice.random())
        line, ttl_s = f"held {dice.below(_LINES)}", dice.pick(_LASTS_S)
        with suppress(errors.KvasirError):
            lease, span = await store.acquire_lease(line, _KV, name, ttl_s)
            record.spans.append(span)
            await asyncio.sleep(ttl_s * dice.random())
            if dice.chance(0.5):
                now = time.monotonic()  # also the end of this owner's earlier spans of the line
                record.spans[:] = [
                    replace(each, until=min(each.until, now)) if (each.line, each.owner) == (line, name) else each
                    for each in record.spans
                ]
                await store.release_lease(line, _KV, lease)
