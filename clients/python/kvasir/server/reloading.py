"""SIGHUP: a service reads credentials and peers again. An invalid file changes nothing, and is reported."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from kvasir.credentials import OWNER
from kvasir.server.operating.audit import ALLOWED, REFUSED, Audit
from kvasir.server.operating.log_errors import places

_LOG = logging.getLogger("kvasir.reload")


class TakenInPart(ValueError):
    """Some of a part's files are wrong, and the others were taken. The message names what is in force."""


class Reloading:
    """What one service reads again. On its event loop."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._parts: dict[str, Callable[[], Awaitable[int]]] = {}
        self._running: asyncio.Task[None] | None = None
        self.problems: tuple[str, ...] = ()  # the parts that could not be read the last time

    @property
    def facts(self) -> dict[str, Any]:
        """For `/healthz`: lines of the audit, and what could not be read the last time."""
        return {"audit": self._audit.counts, "not_reloaded": self.problems}

    def add(self, part: str, read: Callable[[], Awaitable[int]]) -> None:
        """`read` takes the new set and returns how many calls it ended. Raises ValueError for a file that is wrong."""
        self._parts[part] = read

    def on_hangup(self) -> None:
        """From now on SIGHUP reloads; one that `kvasir up` held back while the process began is heard now."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._begin)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    async def reload(self) -> None:
        """Read all parts, each by itself: one that is wrong does not keep the others from being read."""
        parts, problems, ended = list[str](), list[str](), 0
        for part, read in self._parts.items():
            try:
                ended += await read()
            except ValueError as error:
                # It names a file of the operator's and what is wrong there, never a token.
                stays = "" if isinstance(error, TakenInPart) else "the old set stays: "
                _LOG.error("reload.refused part=%s %s%s", part, stays, error)
                problems.append(part)
            except Exception as error:  # noqa: BLE001 - the caller of the reload waits for its line in the audit
                _LOG.error("reload.failed part=%s error=%s at=%s", part, type(error).__name__, places(error))
                problems.append(part)
            else:
                parts.append(part)
        self.problems = tuple(problems)
        done = " ".join(parts)
        _LOG.info("reload.done parts=%s ended_calls=%d", done or "none", ended)
        outcome, reason = (REFUSED, f"UNUSABLE_{'_'.join(problems).upper()}") if problems else (ALLOWED, "")
        self._audit.tell(OWNER, "reload", outcome, reason, {"parts": done, "ended_calls": str(ended)})

    def _begin(self) -> None:
        previous = self._running

        async def after_previous() -> None:
            if previous is not None:
                await asyncio.wait((previous,))
            await self.reload()

        self._running = asyncio.get_running_loop().create_task(after_previous())
