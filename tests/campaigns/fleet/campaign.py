"""`make campaign-fleet`: agents live by a whole fleet whose parts are killed, frozen, cut off and set to other times.

The lives are those of `tests/campaigns/history`, and so are the judges: no turn knows what was taken back, none lacks
what was acknowledged, no version is two memories. Each call goes to any of the stores; what callers saw must have one
order, and no lease two owners. At the end all that was acknowledged is looked for.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import certifi
from kvasir import errors
from kvasir.clients import AioInferenceClient, AioStoreClient
from kvasir.credentials import read_token

from tests.campaigns.faults.faulty_link import FaultyLink
from tests.campaigns.fleet.database import Database, DatabaseClock
from tests.campaigns.fleet.evidence import leave_evidence
from tests.campaigns.fleet.holders import hold
from tests.campaigns.fleet.kept import Kept, Round
from tests.campaigns.fleet.nemesis import Nemesis
from tests.campaigns.fleet.targets import Clock, Link, Peace, Server, Service, Target
from tests.campaigns.history.lives import Lives
from tests.campaigns.history.record import AnyStore
from tests.running import in_memory
from tests.running.programs import Program
from tests.running.set_clock import VARIABLE, set_ahead
from tools.fleet.fleet import Fleet, Plan, running
from tools.fleet.part import FleetError, Part, Process

# An agent waits for its commit, or 64 of them ask for more than a small machine stores.
_COMMIT_WAIT_S, _GIVE_UP_S = 30, 40.0
# By its lease alone, which counts for 4.75 s, an engine answers only if it gives up a store that hangs before.
_BUDGETS_MS = (300, 1000, 5000)
_SETTINGS = [f"[engine]\nstore-budget-ms = {budget}\ncommit-wait-s = {_COMMIT_WAIT_S}\n" for budget in _BUDGETS_MS]
_QUIET_S = 30.0
_AFTER_S = 10.0  # in which lives go on after the last fault
_ENDS_S = 15.0
_HOUR_S = 3600.0
_TELL_S = 15.0
_STORES, _HOLDERS = 2, 4


@dataclass(frozen=True)
class Size:
    """How much a round does: it ends after so many faults, after `within_s`, or when it is ended."""

    faults: int
    agents: int = 64
    engines: int = 3
    within_s: float = 20 * _HOUR_S
    is_ended: Callable[[], bool] = lambda: False


async def play(
    size: Size, seed: int, keep: Callable[[Round], None] = lambda _: None, evidence: Path | None = None
) -> Round:
    """One round, kept before the fleet ends. Everything lies in a directory of its own, which is removed; `evidence`:
    where logs and stacks are left if a part cannot be repaired.
    """
    root, peace = in_memory.home(), Peace()
    try:
        async with _opened(root, size, seed, peace) as (lives, owners, targets):
            services = [each for each in targets if isinstance(each, Service)]
            leave = partial(leave_evidence, root, [each.member for each in services], evidence)
            nemesis = Nemesis(targets, seed, lambda: lives.ledger.commits, peace, leave)
            began, until = time.monotonic(), time.monotonic() + size.within_s
            breaking = asyncio.create_task(nemesis.run(size.faults, until, size.is_ended))
            telling = asyncio.create_task(_tell(seed, nemesis, lives))
            is_over = asyncio.Event()
            within_s = size.within_s + _QUIET_S
            living = asyncio.create_task(lives.run(sys.maxsize, size.agents, within_s, is_over.is_set))
            names = [f"holder {seed} {number}" for number in range(_HOLDERS)]
            holding = [asyncio.create_task(hold(owners, lives.record, name, is_over.is_set)) for name in names]
            await breaking
            lives.findings.problems += nemesis.problems
            took_s = time.monotonic() - began
            await asyncio.sleep(_AFTER_S)
            lives.ledger.looked_at(time.monotonic())
            is_over.set()
            await _ended([living, *holding])
            telling.cancel()
            await _look_for_all(lives)
            found = _round(seed, nemesis, lives, took_s)
            keep(found)
            return found
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _round(seed: int, nemesis: Nemesis, lives: Lives, took_s: float) -> Round:
    found, ledger, seen = lives.findings, lives.ledger, lives.record
    faults = dict(sorted(nemesis.counts.items()))
    judged = sum(map(len, seen.acts.values())), seen.undecided, len(seen.spans), ledger.longest_stall_s
    return Round(seed, faults, ledger.commits, found.lives, len(ledger.agents), took_s, found.problems, *judged)


async def _ended(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Wait for them; whoever still waits for an answer after a while goes without it. Raises the first failure."""
    _, late = await asyncio.wait(tasks, timeout=_ENDS_S)
    for each in late:
        each.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


async def _tell(seed: int, nemesis: Nemesis, lives: Lives) -> None:
    while True:
        await asyncio.sleep(_TELL_S)
        found = f"{lives.findings.lives} lives, {lives.ledger.commits} commits, {len(lives.findings.problems)} problems"
        print(f"seed {seed}: {nemesis.faults} faults, {found}", flush=True)


@contextlib.asynccontextmanager
async def _opened(
    root: Path, size: Size, seed: int, peace: Peace
) -> AsyncIterator[tuple[Lives, AnyStore, list[Target]]]:
    links: dict[str, FaultyLink] = {}

    def through(caller: str, called: str, port: int) -> int:
        link = links.setdefault(f"{caller} to {called}", FaultyLink(None, port))
        return link.port

    clocks = {name: root / name for name in ("clock", *(f"clock of store-{number + 1}" for number in range(_STORES)))}
    for clock in clocks.values():
        set_ahead(clock, 0.0)
    plan = Plan(size.engines, "nginx", "0.01", _SETTINGS, (), _STORES, True, through, _begin(clocks))
    async with contextlib.AsyncExitStack() as ends:
        fleet = await asyncio.to_thread(ends.enter_context, running(root, plan))
        token = read_token(fleet.client_token)
        assert fleet.door is not None
        # The first engine is called directly; the others through links, which break as nginx does.
        first, *others = fleet.engines
        ports = [through("callers", each.name, each.port) for each in others]
        addresses = [first.address, *(f"127.0.0.1:{port}" for port in ports), fleet.door.address]
        for link in links.values():
            ends.callback(link.close)
        clients = [AioInferenceClient.connect(address, token=token) for address in addresses]
        stores = [AioStoreClient.connect(each.address, token=token) for each in fleet.stores]
        lives = Lives(clients, stores, seed, doors=clients[1:], give_up_s=_GIVE_UP_S)
        engines = read_token(fleet.store.home.tokens / "engine.token")
        owners = AnyStore(
            [AioStoreClient.connect(each.address, token=engines) for each in fleet.stores], lives.record, seed
        )
        for each in (lives, owners):
            ends.push_async_callback(each.close)
        yield lives, owners, _targets(fleet, links, clocks, peace)


def _targets(fleet: Fleet, links: Mapping[str, FaultyLink], clocks: Mapping[str, Path], peace: Peace) -> list[Target]:
    """The more stands on a part, the longer it is left alone: agents must come to something in between."""
    peace_s = {"postgres": 3.0, "postgres-2": 3.0, "s3": 2.5}
    assert fleet.standby is not None
    called = {name: name.rpartition(" to ")[2] for name in links}
    database = Database(fleet.postgres, fleet.standby, 10.0)
    return [
        *(
            Link(name, link, peace_s.get(called[name], 0.8), ("busy", "busy") if called[name] == "s3" else ())
            for name, link in links.items()
        ),
        *(Service(each, 6.0, peace) for each in fleet.engines),
        *(Service(each, 15.0, peace) for each in fleet.stores),
        database,
        DatabaseClock(database, 5.0),
        Server(fleet.s3.part, 8.0),
        *(Clock(name, file, 3.0 * len(clocks)) for name, file in clocks.items()),
    ]


def _begin(clocks: Mapping[str, Path]) -> Callable[[Part], Process]:
    """Kvasir's programs are forked, which costs no imports, and read a clock of their own; each store its own one."""

    def begin(part: Part) -> Process:
        clock = clocks.get(f"clock of {part.name}", clocks["clock"])
        env = {"SSL_CERT_FILE": certifi.where(), **part.env, VARIABLE: str(clock), "NO_COLOR": "1"}
        return Program("kvasir", part.argv[3:], out=part.log_file, err=part.log_file, env=env)

    return begin


async def _look_for_all(lives: Lives) -> None:
    """A service that was killed last starts again; then all that was acknowledged is looked for. A fleet that does not
    answer, with all its parts repaired, is a problem like any other.
    """
    try:
        async with asyncio.timeout(_QUIET_S):
            while not await _answers(lives):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            await lives.look_for_all()
    except TimeoutError:
        lives.findings.problems.append(f"not all was looked for in {_QUIET_S:g} s after the last fault")
        lives.judge_order()


async def _answers(lives: Lives) -> bool:
    with contextlib.suppress(errors.KvasirError):
        await lives.store.list_agents()
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make campaign-fleet", description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000, help="in all, those of a resumed file counted")
    parser.add_argument("--round", type=int, default=500, help="faults of a fleet, after which all is looked for")
    parser.add_argument("--agents", type=int, default=64, help="that live at once")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20 * 60, help="after which it ends with fewer faults")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next has the next")
    parser.add_argument(
        "--kept", type=Path, default=Path("out/campaign-fleet.json"), help="what each round found; beside it logs"
    )
    parser.add_argument("--resume", action="store_true", help="add to what is kept, from the next seed on")
    given = parser.parse_args(arguments)
    os.environ.setdefault("SSL_CERT_FILE", certifi.where())
    kept = Kept(given.kept, is_resumed=given.resume)
    until = time.monotonic() + given.minutes * 60
    is_ended = False

    def end(*_: object) -> None:
        nonlocal is_ended
        is_ended = True

    before = signal.signal(signal.SIGTERM, end)  # all is repaired, looked for and kept, as after the last fault

    def keep(done: Round) -> None:
        kept.add(done)
        print(kept.summary(), *done.problems, sep="\n", flush=True)

    try:
        while not is_ended and kept.faults < given.faults and (left_s := until - time.monotonic()) > 0:
            faults = min(given.round, given.faults - kept.faults)
            size = Size(faults, given.agents, given.engines, left_s, lambda: is_ended)
            seed = kept.next_seed(given.seed)
            evidence = given.kept.with_name(f"{given.kept.stem}-{seed}-logs")
            asyncio.run(play(size, seed, keep, evidence))
    except FleetError as error:
        print(f"make campaign-fleet: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return bool(kept.problems)


if __name__ == "__main__":
    sys.exit(main())
