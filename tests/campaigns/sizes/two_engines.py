"""What a second engine on the same store costs the first: `python -m tests.campaigns.sizes.two_engines [--local]`.

Two real engines with kvasir-tiny, one store over PostgreSQL and a bucket; each engine has cores of its own where there
are enough. Each does the same turns alone and beside the other, alternately; its speed is how soon it is through.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import certifi
from kvasir.clients import AioInferenceClient
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.sizes.commits import syncing_server
from tests.campaigns.sizes.far import behind_a_link
from tests.running.system_fixtures import ENGINE_SERVICE, House, Service

_LINK = 10e9 / 8
_SAID = ("My name is Anna. My dog is called Rex.", "What is my name?", "What is my dog called?", "What is my name?")


def second_engine(house: House) -> Service:
    """An engine beside the house's, with a state of its own."""
    first = house.engine
    log, state = house.root / "second.log", str(house.root / "second")
    second = Service("second engine", first.program, ENGINE_SERVICE, first.socket.with_name("f"), log)
    at = first.options.index("--state-dir") + 1
    second.options = [*first.options[:at], state, *first.options[at + 1 :]]
    return second


def pin(services: Sequence[Service], beside: Service) -> int:
    """Give each service cores of its own, and the rest to another; how many cores each has, 0: there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = 2 if len(cores) >= 8 else int(len(cores) > len(services))
    if each:
        for place, service in enumerate(services):
            _put_on(service.pid, cores[place * each : (place + 1) * each])
        _put_on(beside.pid, cores[len(services) * each :])
    return each


def _put_on(pid: int, cores: Sequence[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():  # those that begin later are where their makers are
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


async def _speak(client: AioInferenceClient, agent_id: str, turns: int) -> list[str]:
    """An agent's turns; those whose memory is not durable."""
    other = []
    for turn in range(turns):
        said = {"messages" if turn == 0 else "append_messages": [{"role": "user", "content": _SAID[turn % len(_SAID)]}]}
        events = client.generate(agent_id=agent_id, sampling={"max_tokens": 64}, timeout_s=120, **said)
        if problem := await not_durable(events):
            other += [f"{agent_id}: {problem}"]
    return other


async def not_durable(events: AsyncIterator[pb.GenerateResponse]) -> str:
    """Why a turn's memory is not known to be durable; empty where it is."""
    problem = "its stream ended without its end"
    async for event in events:
        if event.WhichOneof("event") == "finished":
            snapshot = event.finished.snapshot
            is_durable = snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
            problem = "" if is_durable else f"{pb.SnapshotState.Name(snapshot.state)} {snapshot.reason}"
    return problem


async def _lives(address: str, name: str, agents: int, turns: int) -> tuple[float, list[str]]:
    async with AioInferenceClient.connect(address) as client:
        began = time.perf_counter()
        found = await asyncio.gather(*(_speak(client, f"{name} {number}", turns) for number in range(agents)))
        return time.perf_counter() - began, [each for one in found for each in one]


def live(address: str, name: str, agents: int, turns: int) -> tuple[float, list[str]]:
    """So many new agents' turns, all agents at once: seconds, and what was not stored."""
    return asyncio.run(_lives(address, name, agents, turns))


def _compared(engines: Sequence[Service], callers: Executor, agents: int, turns: int, repeats: int) -> dict[str, Any]:
    names = ("first", "second")
    alone: dict[str, list[float]] = {name: [] for name in names}
    both: dict[str, list[float]] = {name: [] for name in names}
    not_stored = list[str]()

    def run(which: Sequence[int], took: dict[str, list[float]], about: str) -> None:
        asked = [callers.submit(live, engines[each].address, f"{about} {names[each]}", agents, turns) for each in which]
        for each, found in zip(which, asked, strict=True):
            seconds, other = found.result()
            took[names[each]].append(seconds)
            not_stored.extend(other)

    run((0, 1), {name: [] for name in names}, "warm")
    for repeat in range(repeats):
        for each in (0, 1):
            run((each,), alone, f"alone {repeat}")
            run((0, 1), both, f"both {repeat} {each}")
    shares = {name: round(statistics.median(alone[name]) / statistics.median(both[name]), 3) for name in names}
    seconds = {"alone": alone, "both": both}
    return {
        **{
            f"{about}_s": {name: [round(each, 2) for each in took[name]] for name in names}
            for about, took in seconds.items()
        },
        "speed_beside_the_other": shares,
        "not_stored": not_stored,
    }


def measured(root: Path, agents: int, turns: int, repeats: int, *, is_local: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        house = House(root / "house", engine_options=("--commit-wait-s", "30"))
        if not is_local:
            for name in ("database", "bucket"):
                (root / name).mkdir(parents=True)
            catalog = stack.enter_context(syncing_server(root / "database"))
            url, keys = stack.enter_context(behind_a_link(root / "bucket", _LINK))
            house.store.options += ["--catalog", catalog, "--blobs", url, "--blob-credentials-file", str(keys)]
        stack.callback(house.close)
        house.start()
        second = second_engine(house)
        stack.callback(second.kill)
        second.start()
        cores = pin((house.engine, second), house.store)
        spawned = multiprocessing.get_context("spawn")
        callers = stack.enter_context(ProcessPoolExecutor(2, mp_context=spawned))  # one would be the bound of both
        found = _compared((house.engine, second), callers, agents, turns, repeats)
        return {"cores_of_each_engine": cores, "is_local": is_local, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=8, help="of each engine, at once")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--local", action="store_true", help="a store over a directory and SQLite")
    parser.add_argument("--dir", type=Path, help="on which disk; left out: the one for temporary files")
    given = parser.parse_args()
    os.environ.setdefault("SSL_CERT_FILE", certifi.where())  # the bucket's client wants some
    with tempfile.TemporaryDirectory(prefix="kvasir-two-", dir=given.dir) as directory:
        Path(directory).chmod(0o711)  # PostgreSQL runs as another user, and must come to its own directory
        found = measured(Path(directory), given.agents, given.turns, given.repeats, is_local=given.local)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
