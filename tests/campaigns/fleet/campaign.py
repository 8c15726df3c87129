"""`make campaign-fleet`: agents live by a whole fleet whose parts are killed, frozen, cut off and set to other times.

The lives are those of `tests/campaigns/history`, and so are the judges: no turn knows what was taken back, none lacks
what was acknowledged, no version is two memories. At the end all that was acknowledged is looked for.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import certifi
from kvasir.clients import AioInferenceClient, AioStoreClient
from kvasir.credentials import read_token

from tests.campaigns.faults.faulty_link import FaultyLink
from tests.campaigns.fleet.nemesis import Nemesis
from tests.campaigns.history.lives import Findings, Lives
from tests.running import in_memory
from tests.running.programs import Program
from tests.running.set_clock import VARIABLE, set_ahead
from tools.fleet.fleet import Fleet, Plan, running
from tools.fleet.part import FleetError, Part, Process

_SETTINGS = "[engine]\nstore-budget-ms = 1000\ncommit-wait-s = 5\n"
_QUIET_S = 90.0
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Size:
    """How much a run does: it ends after so many faults, or after `within_s`."""

    faults: int
    agents: int = 64
    engines: int = 3
    within_s: float = 20 * _HOUR_S


@dataclass(frozen=True)
class Result:
    findings: Findings
    nemesis: Nemesis
    commits: int
    took_s: float

    def summary(self) -> str:
        faults = dict(sorted(self.nemesis.counts.items()))
        per_hour = self.nemesis.faults * _HOUR_S / self.took_s
        return (
            f"{self.nemesis.faults} faults in {self.took_s:.0f} s ({per_hour:.0f} an hour): {faults}\n"
            f"{self.commits} acknowledged commits; {self.findings.summary()}"
        )


async def run(size: Size, seed: int) -> Result:
    """Everything lies in a directory of its own, which is removed."""
    root = in_memory.home()
    try:
        async with _opened(root, size, seed) as (fleet, lives, links):
            nemesis = Nemesis(fleet, links, root / "clock", seed)
            began, until = time.monotonic(), time.monotonic() + size.within_s
            breaking = asyncio.create_task(nemesis.run(size.faults, until))
            living = asyncio.create_task(lives.run(sys.maxsize, size.agents, size.within_s + _QUIET_S, breaking.done))
            await breaking
            took_s = time.monotonic() - began
            await living
            await _until_all_answer(lives)
            await lives.look_for_all()
            return Result(lives.findings, nemesis, lives.ledger.commits, took_s)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.asynccontextmanager
async def _opened(root: Path, size: Size, seed: int) -> AsyncIterator[tuple[Fleet, Lives, dict[str, FaultyLink]]]:
    links: dict[str, FaultyLink] = {}

    def through(caller: str, called: str, port: int) -> int:
        link = links.setdefault(f"{caller} to {called}", FaultyLink(None, port))
        return link.port

    set_ahead(root / "clock", 0.0)
    plan = Plan(size.engines, "nginx", "0.01", _SETTINGS, (), through, _begin(root / "clock"))
    async with contextlib.AsyncExitStack() as ends:
        fleet = await asyncio.to_thread(ends.enter_context, running(root, plan))
        for link in links.values():
            ends.callback(link.close)
        token = read_token(fleet.client_token)
        assert fleet.door is not None
        addresses = [*(each.address for each in fleet.engines), fleet.door.address]
        clients = [AioInferenceClient.connect(address, token=token) for address in addresses]
        lives = Lives(clients, AioStoreClient.connect(fleet.store.address, token=token), seed, doors=clients[-1:])
        ends.push_async_callback(lives.close)
        await lives.calibrate()
        yield fleet, lives, links


def _begin(clock: Path) -> Callable[[Part], Process]:
    """Kvasir's programs are forked, which costs no imports, and read a clock of their own."""

    def begin(part: Part) -> Process:
        env = {"SSL_CERT_FILE": certifi.where(), **part.env, VARIABLE: str(clock), "NO_COLOR": "1"}
        return Program("kvasir", part.argv[3:], out=part.log_file, err=part.log_file, env=env)

    return begin


async def _until_all_answer(lives: Lives) -> None:
    """A service that was killed last starts again; then all that was acknowledged can be looked for."""
    give_up = time.monotonic() + _QUIET_S
    while True:
        try:
            await lives.store.list_agents()
            return
        except Exception:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make campaign-fleet", description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--agents", type=int, default=64, help="that live at once")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20 * 60, help="after which it ends with fewer faults")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    size = Size(given.faults, given.agents, given.engines, given.minutes * 60)
    os.environ.setdefault("SSL_CERT_FILE", certifi.where())
    try:
        result = asyncio.run(run(size, given.seed))
    except FleetError as error:
        print(f"make campaign-fleet: {error}", file=sys.stderr)
        return 1
    print(result.summary())
    print("\n".join(result.findings.problems))
    return bool(result.findings.problems)


if __name__ == "__main__":
    sys.exit(main())
