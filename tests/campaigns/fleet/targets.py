"""What a campaign breaks of a fleet, and repairs after a while: links, services, servers of others, clocks."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tests.campaigns.faults.faulty_link import Fault, FaultyLink
from tests.running.set_clock import set_ahead
from tools.fleet.fleet import Member
from tools.fleet.part import FleetError, Part
from tools.kvasir_tiny.words import Dice

# Longer than a lease, and shorter: both must be safe.
LASTS_S = (0.1, 0.1, 0.3, 0.3, 0.3, 1.0, 1.0, 2.5, 6.0)
_MET_S = 2.0
_MOMENT_S = 0.09
STARTS_S, _LONG_S = 120.0, 45.0
_DAY_S = 86_400.0
_AHEAD_S = (-30 * _DAY_S, -7200.0, -60.0, 0.0, 60.0, 7200.0, 30 * _DAY_S)
WALK_S = (3.0, 20.0, -3.0)
_LASTING = ("hang", "outage", "slow")
_MOMENTARY = ("blip", "delay")


class Target(Protocol):
    """A part that has one fault at a time. `peace_s`: how long it is left alone in between, in the mean."""

    name: str
    peace_s: float

    async def strike(self, dice: Dice) -> str:
        """Break it, wait, and repair it. Returns what happened; empty if nothing was there to be broken."""
        ...

    async def keep_up(self) -> None:
        """In a calm: start again what gave up because of faults of other parts."""
        await asyncio.sleep(0)  # most have nothing that does


class Link(Target):
    """A connection between two parts. A fault that no byte met is none."""

    def __init__(self, name: str, link: FaultyLink, peace_s: float, more_kinds: Sequence[str]) -> None:
        self.name, self.peace_s = f"link {name}", peace_s
        self._link, self._kinds = link, (*_LASTING, *_MOMENTARY, *more_kinds)

    async def strike(self, dice: Dice) -> str:
        kind, lasts_s = dice.pick(self._kinds), dice.pick(LASTS_S)
        self._link.arm(Fault(kind, dice.chance(0.7), dice.below(4000), dice.random()))
        give_up = time.monotonic() + _MET_S
        while not self._link.was_met and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self._link.was_met and kind not in _MOMENTARY:
            await asyncio.sleep(lasts_s)
        was_met = self._link.was_met
        self._link.disarm()
        return f"{self.name}: {kind}" if was_met else ""


class Peace:
    """In a storm a part may not start for as long as that on which it stands is broken. One that tries for long ends
    the storm, and only what does not start in peace is a problem.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._starting = dict[str, float]()

    @property
    def is_wanted(self) -> bool:
        return any(time.monotonic() - since > _LONG_S for since in tuple(self._starting.values()))

    def is_now(self, is_calm: bool) -> None:
        """Told again and again."""
        self._began_s = (self._began_s or time.monotonic()) if is_calm else None

    def lasted_s(self) -> float:
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def start_again(self, part: Part) -> None:
        """Raises FleetError."""
        self._starting[part.name] = time.monotonic()
        try:
            start_again(part, self.lasted_s)
        finally:
            del self._starting[part.name]


class Service(Target):
    """An engine or a store, whose supervisor starts it again; or that and its supervisor."""

    def __init__(self, member: Member, peace_s: float, peace: Peace) -> None:
        self.name, self.peace_s, self.member, self._peace = member.name, peace_s, member, peace

    async def strike(self, dice: Dice) -> str:
        what = dice.pick(("kill", "kill", "kill with its supervisor", "freeze", "slow"))
        lasts_s, pid = dice.pick(LASTS_S), self.member.pid
        if what == "freeze":
            was_struck = await frozen(pid, lasts_s)
        elif what == "slow":
            was_struck = await slowed(pid, lasts_s)
        elif what == "kill":
            was_struck = _send(pid, signal.SIGKILL)
        else:
            was_struck = self.member.part.is_running
            await asyncio.to_thread(self.member.part.kill)
            _send(pid, signal.SIGKILL)
            await asyncio.sleep(lasts_s)
        await self.keep_up()
        return f"{what} {self.name}" if was_struck else ""

    async def keep_up(self) -> None:
        """A supervisor whose service cannot start several times ends, too."""
        if not self.member.part.is_running:
            _send(self.member.pid, signal.SIGKILL)
            await asyncio.to_thread(self._peace.start_again, self.member.part)


class Server(Target):
    """The S3 server."""

    def __init__(self, part: Part, peace_s: float) -> None:
        self.name, self.peace_s, self._part = part.name, peace_s, part

    async def strike(self, dice: Dice) -> str:
        what, lasts_s = dice.pick(("kill", "freeze", "slow")), dice.pick(LASTS_S)
        process = self._part.process
        assert process is not None
        if what == "freeze":
            await frozen(process.pid, lasts_s)
        elif what == "slow":
            await slowed(process.pid, lasts_s)
        else:
            await asyncio.to_thread(self._part.kill)
            await asyncio.sleep(lasts_s)
            await asyncio.to_thread(start_again, self._part)
        return f"{what} {self.name}"


class Clock(Target):
    """The file of the clock that some services read. It walks from where it is, or is set."""

    def __init__(self, name: str, file: Path, peace_s: float) -> None:
        self.name, self.peace_s, self._file, self._ahead_s = name, peace_s, file, 0.0

    async def strike(self, dice: Dice) -> str:
        before = self._ahead_s
        self._ahead_s = before + dice.pick(WALK_S) if dice.chance(0.5) else dice.pick(_AHEAD_S)
        set_ahead(self._file, self._ahead_s)
        return "" if self._ahead_s == before else f"{self.name} is set"


async def frozen(pid: int, lasts_s: float) -> bool:
    """Stop it and its children for a while. Returns whether there was a process."""
    if stopped := send_family(pid, signal.SIGSTOP):
        await asyncio.sleep(lasts_s)
    for each in stopped:
        _send(each, signal.SIGCONT)
    return bool(stopped)


async def slowed(pid: int, lasts_s: float) -> bool:
    """As on a disk or a processor that others use up: of each moment it has a tenth. Returns as `frozen`."""
    until = time.monotonic() + lasts_s
    was_there = await frozen(pid, _MOMENT_S)
    while was_there and time.monotonic() < until:
        await asyncio.sleep(_MOMENT_S / 9)
        await frozen(pid, _MOMENT_S)
    return was_there


def send_family(pid: int, number: int) -> list[int]:
    """A signal to a process and its children, of which the last may just begin; those that there were."""
    sent = [each for each in _family(pid) if _send(each, number)]
    return sent + [each for each in _family(pid) if each not in sent and _send(each, number)]


def _family(pid: int) -> list[int]:
    """The process and its children, each of which may hold a lock or a connection; of Linux alone the children."""
    if not pid:
        return []
    with suppress(OSError):
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return [pid]


def start_again(part: Part, waited_s: Callable[[], float] | None = None) -> None:
    """Again, until what a killed one left is gone. Raises FleetError after STARTS_S of `waited_s`, else of all time."""
    began_s = time.monotonic()
    waited_s = waited_s or (lambda: time.monotonic() - began_s)
    while not part.is_running:
        part.start()
        try:
            part.wait_until_ready()
        except FleetError:
            part.kill()
            if waited_s() > STARTS_S:
                raise
            time.sleep(0.2)


def _send(pid: int, number: int) -> bool:
    """Whether there was a process."""
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
    return False
