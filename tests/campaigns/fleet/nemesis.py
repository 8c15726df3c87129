"""Breaks the parts of a fleet in a seeded random order, one fault after another, and repairs each."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.campaigns.faults.faulty_link import Fault, FaultyLink
from tests.running.set_clock import set_ahead
from tools.fleet.fleet import Fleet, Member
from tools.fleet.part import FleetError, Part
from tools.kvasir_tiny.words import Dice

# Longer than a lease, and shorter: both must be safe.
_FAULTS_S = (0.1, 0.3, 1.0, 2.5, 6.0)
_PEACE_S = 0.8
_STARTS_S = 120.0
_DAY_S = 86_400.0
_AHEAD_S = (-30 * _DAY_S, -7200.0, -60.0, 0.0, 60.0, 7200.0, 30 * _DAY_S)
_LINK_KINDS = ("hang", "outage", "blip", "delay", "slow")


class Nemesis:
    """`links`: by name, what stands between two parts. `clock`: the file of the clock that all services read."""

    def __init__(self, fleet: Fleet, links: Mapping[str, FaultyLink], clock: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.is_over = False
        self._fleet, self._links, self._clock = fleet, links, clock
        self._dice = Dice(f"nemesis {seed}")

    @property
    def faults(self) -> int:
        return self.counts.total()

    async def run(self, faults: int, until_s: float) -> None:
        """So many faults, or up to that time; then all is repaired."""
        while self.faults < faults and time.monotonic() < until_s and not self.is_over:
            what, fault = self._next()
            await asyncio.to_thread(fault)
            self.counts[what] += 1
            await asyncio.to_thread(self._repair)
            await asyncio.sleep(_PEACE_S * self._dice.random())
        await asyncio.to_thread(self._repair)

    def _next(self) -> tuple[str, Callable[[], None]]:
        dice, fleet = self._dice, self._fleet
        name, link = dice.pick(list(self._links.items()))
        member = dice.pick([*fleet.engines, fleet.store])
        server = dice.pick([fleet.postgres.part, fleet.s3.part])
        return dice.pick(
            [
                *[(f"link {name}", lambda: self._break(link, dice.pick(list(_LINK_KINDS))))] * 5,
                ("s3 answers 503", lambda: self._break(self._links["store to s3"], "busy")),
                (f"kill {member.name}", lambda: self._kill_service(member)),
                (f"kill {member.name}", lambda: self._kill_service(member)),
                (f"kill {member.name} and its supervisor", lambda: self._kill_group(member)),
                (f"kill {server.name}", server.kill),
                (f"freeze {server.name}", lambda: self._freeze_part(server)),
                (f"freeze {member.name}", lambda: self._freeze_pid(member.pid)),
                ("the clock is set", self._set_clock),
            ]
        )

    def _break(self, link: FaultyLink, kind: str) -> None:
        is_answer = self._dice.chance(0.7)
        link.arm(Fault(kind, is_answer, self._dice.below(4000), self._dice.random()))
        self._last()
        link.disarm()

    def _kill_service(self, member: Member) -> None:
        """Its supervisor starts it again."""
        _send(member.pid, signal.SIGKILL)
        self._last()

    def _kill_group(self, member: Member) -> None:
        pid = member.pid
        member.part.kill()
        _send(pid, signal.SIGKILL)
        self._last()

    def _freeze_part(self, part: Part) -> None:
        part.send(signal.SIGSTOP)
        self._last()
        part.send(signal.SIGCONT)

    def _freeze_pid(self, pid: int) -> None:
        _send(pid, signal.SIGSTOP)
        self._last()
        _send(pid, signal.SIGCONT)

    def _set_clock(self) -> None:
        set_ahead(self._clock, self._dice.pick(list(_AHEAD_S)))

    def _last(self) -> None:
        time.sleep(self._dice.pick(list(_FAULTS_S)))

    def _repair(self) -> None:
        """Start what does not run. What a supervisor looks after is back in its own time."""
        give_up = time.monotonic() + _STARTS_S
        for part in (self._fleet.postgres.part, self._fleet.s3.part):
            _start(part, give_up)
        for member in (self._fleet.store, *self._fleet.engines):
            if not member.part.is_running:
                _send(member.pid, signal.SIGKILL)
                _start(member.part, give_up)


def _start(part: Part, give_up: float) -> None:
    """Again, until what a killed one left is gone."""
    while not part.is_running:
        part.start()
        try:
            part.wait_until_ready()
        except FleetError:
            part.kill()
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


def _send(pid: int, number: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
