"""Many random walks, over stores and engines that are renewed now and then.

`python -m tests.cachestore.rights.walks` is the campaign. It ends with 1 if a walk had a problem, or was not done.
"""

import argparse
import asyncio
import contextlib
import logging
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import grpc.aio
import structlog
from kvasir.clients import AioInferenceClient
from kvasir.inference.v1 import handover_pb2_grpc

from inference_svc.engine.api import AgentKey
from tests.cachestore.core.lab import NS
from tests.cachestore.rights.engines import ELSEWHERE, Place, Player, players
from tests.cachestore.rights.judging import HONEST, LIAR, Judge, ViolationError
from tests.cachestore.rights.lying_store import Lies
from tests.cachestore.rights.peered import Mac, macs
from tests.cachestore.rights.turn_lies import Listener, TurnLies
from tests.cachestore.rights.walk import Walk

_STORES_LAST = 25  # walks: facts of each walk's agents stay in the stores
_WALK_S = 120.0


async def walks(root: Path, numbers: Sequence[int], counts: Counter[str]) -> None:
    """So many walks over fresh stores and engines. Raises ViolationError, with the walk's number."""
    async with contextlib.AsyncExitStack() as exits:
        chance = random.Random()
        made = await exits.enter_async_context(macs(*HONEST, LIAR, root=root / "stores"))
        stores = {mac.name: mac for mac in made}
        for name in HONEST:
            other = next(each for each in HONEST if each != name)
            stores[name].allow(other, gives="claim", takes="move")
            stores[LIAR].allow(name, gives="claim", takes="move")
        listener = Listener(chance)
        engines = await exits.enter_async_context(_engines(root / "engines", stores, listener))
        liars = {name: await exits.enter_async_context(stores[name].as_peer(LIAR)) for name in HONEST}
        links = {
            (name, token): engines[name].as_peer(engines[name].tokens[token])
            for name in HONEST
            for token in (LIAR, f"{LIAR}-{ELSEWHERE}")
        }
        callers = {
            name: await exits.enter_async_context(
                AioInferenceClient.connect(engines[name].address, token=engines[name].tokens[LIAR])
            )
            for name in HONEST
        }
        Lies(stores[LIAR], chance, counts)
        for number in numbers:
            chance.seed(number)  # a walk is the same whichever came before it
            for name in HONEST:  # a walk is about rights, not about how many words an hour has
                stores[name].services.moving._handing_over._limits._buckets.clear()
            names = [f"{number}-work", f"{number}-other", f"conversation/{number}"]
            names += [f"{number}-{gift}" for gift in ("new", "gift", "brought")]
            judge, own = Judge(stores, engines, names, counts), random.Random(number)
            turns = TurnLies(judge, own, counts, listener, links, callers)
            try:
                async with asyncio.timeout(_WALK_S):
                    await Walk(judge, liars, own, counts, turns).go()
            except (ViolationError, TimeoutError) as error:
                raise ViolationError(f"walk {number}: {error or 'it does not end'}; {judge.said[-6:]}") from None
            for engine in engines.values():
                for name in names:
                    engine.served.engine.memories.drop(AgentKey(NS, name))
            counts["walks"] += 1


@contextlib.asynccontextmanager
async def _engines(root: Path, stores: dict[str, Mac], listener: Listener) -> AsyncIterator[dict[str, Player]]:
    """One for each store; the liar's turns go to another, which only listens."""
    sockets = tempfile.TemporaryDirectory(prefix="kv")
    server, address = grpc.aio.server(), f"unix:{sockets.name}/{LIAR}"
    handover_pb2_grpc.add_HandOverServiceServicer_to_server(listener, server)
    server.add_insecure_port(address)
    await server.start()
    places = [
        Place(name, stores[name].address, [each for each in (*HONEST, LIAR) if each != name], callers=_others(name))
        for name in HONEST
    ]
    places.append(Place(LIAR, stores[LIAR].address))
    try:
        async with players(root, places, {LIAR: address}) as engines:
            for name in HONEST:
                other = next(each for each in HONEST if each != name)
                engines[name].owner.peers[other] = engines[other].owner
            yield engines
    finally:
        await server.stop(0)
        sockets.cleanup()


def _others(name: str) -> list[str]:
    return [each for each in (*HONEST, LIAR) if each != name]


def part(root: str, numbers: Sequence[int]) -> tuple[Counter[str], str]:
    """Some walks in a process of their own: what was counted, and the problem that ended them."""
    quiet_logs()
    counts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="walk", dir=root) as folder:
        try:
            asyncio.run(walks(Path(folder) / "w", numbers, counts))
        except ViolationError as error:
            return counts, str(error)
        except Exception:  # noqa: BLE001 - the other parts go on
            return counts, f"walk {numbers[0] + counts['walks']}: {traceback.format_exc()}"
    return counts, ""


def walk_on(root: Path, numbers: Sequence[int], processes: int, within_s: float) -> tuple[Counter[str], list[str]]:
    """Many walks in many processes, for so long at most; says how far it is. What was counted, and the problems."""
    counts, problems, began = Counter[str](), list[str](), time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # before a process begins: each has a core
    parts = iter([numbers[at : at + _STORES_LAST] for at in range(0, len(numbers), _STORES_LAST)])
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running = {pool.submit(part, str(root), each) for each in islice(parts, processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for counted, problem in (each.result() for each in done):
                counts += counted
                problems += [problem] if problem else []
                print(f"{counts['walks']} walks, {time.monotonic() - began:.0f} s; {problem}", flush=True)
            if time.monotonic() - began < within_s:
                running |= {pool.submit(part, str(root), each) for each in islice(parts, len(done))}
    return counts, problems


def quiet_logs() -> None:
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number, and seed, of the first")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--within-s", type=float, default=math.inf, help="begin none after so many seconds")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the stores lie")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.walks)
    counts, problems = walk_on(given.directory, numbers, given.processes, given.within_s)
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")
    print(f"{counts['walks']} of {given.walks} walks, {len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems or counts["walks"] < given.walks else 0


if __name__ == "__main__":
    sys.exit(main())
