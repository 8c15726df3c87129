"""PostgreSQL with a standby, as targets: the standby is promoted when its primary was killed, and roles change; and the
clock of the database steps, by which leases end.
"""

import asyncio
import signal
import time

import psycopg

from tests.campaigns.fleet.targets import LASTS_S, STARTS_S, WALK_S, Target, frozen, send_family, slowed, start_again
from tests.running.postgres import clock_ahead
from tools.fleet.part import FleetError
from tools.fleet.servers import DATABASE, Postgres
from tools.kvasir_tiny.words import Dice

_KINDS = ("kill", "freeze", "slow", "promote", "freeze and promote", "kill the standby")


class Database(Target):
    """What is acknowledged is on both servers. A primary that was killed comes back as the other's standby alone."""

    def __init__(self, primary: Postgres, standby: Postgres, peace_s: float) -> None:
        self.name, self.peace_s = "postgres", peace_s
        self._primary, self._standby = primary, standby

    @property
    def primary(self) -> Postgres:
        """Of the two the one that takes writes, if any does."""
        return self._primary

    async def strike(self, dice: Dice) -> str:
        what, lasts_s = dice.pick(_KINDS), dice.pick(LASTS_S)
        process = self._primary.part.process
        assert process is not None
        match what:
            case "freeze":
                await frozen(process.pid, lasts_s)
            case "slow":
                await slowed(process.pid, lasts_s)
            case "promote" | "freeze and promote":
                await self._fail_over(process.pid, lasts_s, signal.SIGKILL if what == "promote" else signal.SIGSTOP)
                return f"{what} the standby of postgres"
            case "kill the standby":
                await self._restarted(self._standby, lasts_s)
                return "kill the standby of postgres"
            case _:
                await self._restarted(self._primary, lasts_s)
        return f"{what} postgres"

    async def _restarted(self, server: Postgres, lasts_s: float) -> None:
        await asyncio.to_thread(server.part.kill)
        await asyncio.sleep(lasts_s)
        await asyncio.to_thread(start_again, server.part)
        await asyncio.to_thread(self._primary.wait_for_standby)

    async def _fail_over(self, pid: int, lasts_s: float, ends_by: int) -> None:
        """The standby is alone for a while; then the old primary, which is gone, begins as its standby anew. One that
        stood still takes nothing any more."""
        family = send_family(pid, ends_by)
        await asyncio.to_thread(self._standby.promote)
        self._primary, self._standby = self._standby, self._primary
        await asyncio.sleep(lasts_s)
        for each in family if ends_by == signal.SIGSTOP else ():  # numbers of ended processes may be others' by now
            send_family(each, signal.SIGKILL)
        await asyncio.to_thread(self._standby.part.kill)
        await asyncio.to_thread(self._follow)

    def _follow(self) -> None:
        """Again, until what the killed server left is gone. Raises FleetError."""
        give_up = time.monotonic() + STARTS_S
        while True:
            try:
                self._standby.follow(self._primary)
                break
            except FleetError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)
        start_again(self._standby.part)
        self._primary.wait_for_standby()


class DatabaseClock(Target):
    """The clock of the database's server and its standby: the function of the schema that stores ask. It steps whoever
    looks at it, or starts meanwhile.
    """

    def __init__(self, database: Database, peace_s: float) -> None:
        self.name, self.peace_s = "clock of postgres", peace_s
        self._database, self._ahead_s = database, 0.0

    async def strike(self, dice: Dice) -> str:
        self._ahead_s += dice.pick(WALK_S)
        try:
            await asyncio.to_thread(self._database.primary.ask, clock_ahead(self._ahead_s), DATABASE)
        except psycopg.Error:  # the server is away
            return ""
        return f"{self.name} steps"
