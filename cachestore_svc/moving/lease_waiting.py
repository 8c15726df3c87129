"""Waits, on the event loop, until no engine may answer any more from a memory that is about to be taken back.

The store's threads do not wait: a call that finds a live lease asks its holder to let go, and is repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvasir.errors import FailedPrecondition, Unavailable
from kvasir.waits import LOOK_S, PAUSE_S

T = TypeVar("T")
# The part of a caller's time that is kept for the last answer, and the least of it: a busy machine answers late.
_ANSWER_PART, _ANSWER_S = 0.2, 0.1


async def once_free(call: Callable[[], Awaitable[T]], left_s: float | None) -> T:
    """The answer of `call` once no lease is in its way. `left_s`: the caller's time; None: as long as a lease holds.

    Raises what `call` raises, and Unavailable (LEASE_HELD) when the lease outlasts the caller's time.
    """
    loop = asyncio.get_running_loop()
    give_up = None if left_s is None else loop.time() + left_s - max(_ANSWER_S, _ANSWER_PART * left_s)
    pause_s = LOOK_S
    while True:
        try:
            return await call()
        except FailedPrecondition as error:
            if error.reason != "LEASE_HELD":
                raise
            held_s = int(error.metadata["left_ms"]) / 1000
            pause_s = min(pause_s, held_s)
            if give_up is not None and loop.time() + pause_s > give_up:
                raise Unavailable(
                    "an inference service holds the agent's lease and has not let go yet",
                    reason="LEASE_HELD",
                    retry_after_s=min(held_s, 1.0),
                    metadata=error.metadata,
                ) from None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S)
