"""How long commits take, alone, and what they ask of the index: `python -m tests.campaigns.sizes.commits [--sqlite]`.

A server of PostgreSQL is started for it, which syncs its log to the disk; blobs are stored before, and not timed: that
takes most of the time, which `--seconds` bounds.
"""

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.waits import giving_way
from kvasir_bench.arithmetic import percentile

from cachestore_svc.index.postgres.pipeline import Statement
from cachestore_svc.index.postgres.session import Session
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.recovery.means import Means
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, upload
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot
from tools.fleet.servers import DATABASE, Postgres

_TURN_TOKENS = 30
_TERMS = CommitTerms(bind_shared=True)  # as engines commit
_KEPT_VERSIONS = 8  # of which each commit then lets one go, as a store at work does


@contextmanager
def syncing_server(root: Path) -> Iterator[str]:
    """The address of a database on a server in this directory."""
    for name in ("logs", "postgres"):
        (root / name).mkdir(mode=0o700)
    root.chmod(0o711)  # the server runs as another user, and must come to its own directory
    server = Postgres(root / "postgres", root / "logs")
    server.prepare(server.port)
    server.part.start()
    try:
        server.part.wait_until_ready()
        server.make_database()
        with patch.dict(os.environ, PGPASSFILE=str(server.passfile)):
            yield f"postgresql://kvasir@127.0.0.1:{server.port}/{DATABASE}"
    finally:
        server.part.stop()


def opened(root: Path, catalog: str) -> Store:
    return Store.open(Lab(root, catalog=catalog).config(), Means(time.time, secrets.token_hex))


def stored(store: Store, blocks: int) -> SyntheticAgent:
    """An agent with so many full blocks, which are stored."""
    agent = SyntheticAgent(SMALL)
    upload(store, agent.turn(blocks * BLOCK_TOKENS, is_prompt=True))
    return agent


class Committer:
    """An agent that commits turn after turn, each on top of the last."""

    def __init__(self, store: Store, number: int, beginning: SyntheticAgent | None = None) -> None:
        """`beginning`: the memory that it goes on from, whose blobs are stored."""
        self._store, self._name, self._version = store, f"agent {number}", 0
        self._agent = beginning.fork(number) if beginning else SyntheticAgent(SMALL, number)

    @property
    def catalog_clock(self) -> int:
        """The processor's time of the thread that writes to the index."""
        [writer] = (each for each in threading.enumerate() if each.name == "kvasir-index")
        return time.pthread_getcpuclockid(writer.ident or 0)

    def prepared(self) -> SyntheticSnapshot:
        """The next turn's memory, all of it stored but for the commit."""
        snapshot = self._agent.turn(_TURN_TOKENS, is_prompt=True)
        upload(self._store, snapshot)
        return snapshot

    def commit(self, snapshot: SyntheticSnapshot) -> float:
        """Milliseconds that it took."""
        began = time.perf_counter()
        self._store.snapshots.commit(NS, self._name, snapshot.manifest_digest, self._version, _TERMS)
        self._version += 1
        return 1000 * (time.perf_counter() - began)


def measured(
    committers: Sequence[Committer], rounds: int, for_s: float = 60, report: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Milliseconds of a commit of each, all at once in each round, and of processors' time that each cost the store, of
    which its index a part. No round begins after so many seconds.
    """
    took, cpu_s, catalog_cpu_s, began = list[float](), 0.0, 0.0, time.monotonic()
    clock = committers[0].catalog_clock
    with ThreadPoolExecutor(len(committers)) as threads:
        for done in range(rounds):
            if took and time.monotonic() - began > for_s:
                break
            snapshots = list(threads.map(Committer.prepared, committers))
            cpu_s -= time.process_time()
            catalog_cpu_s -= time.clock_gettime(clock)
            took += threads.map(Committer.commit, committers, snapshots)
            cpu_s += time.process_time()
            catalog_cpu_s += time.clock_gettime(clock)
            report(f"{len(committers)} at once: {done + 1} of {rounds} rounds, {time.monotonic() - began:.0f} s")
    times = {"median_ms": round(statistics.median(took), 1), "p99_ms": round(percentile(took, 99), 1)}
    cpu = {"store_cpu_ms": cpu_s, "catalog_cpu_ms": catalog_cpu_s}
    return {"commits": len(took), **times, **{name: round(1000 * each / len(took), 2) for name, each in cpu.items()}}


def asked_by_one(committer: Committer) -> Counter[str]:
    """How often one commit sent each statement to a server and waited for its answer; the first words of each."""
    asked: Counter[str] = Counter()
    execute = Session._in_one_trip

    def counted(session: Session, statement: Statement) -> Any:
        asked[" ".join(statement.sql.split())[:60]] += 1
        return execute(session, statement)

    snapshot = committer.prepared()
    with patch.object(Session, "_in_one_trip", counted):
        committer.commit(snapshot)
    return asked


def _progress(words: str) -> None:
    print(f"\r{words}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=400, help="for each number of agents, all of theirs together")
    parser.add_argument("--seconds", type=float, default=40, help="for each number of agents, at most")
    parser.add_argument("--agents", type=int, nargs="*", default=[1, 8, 64], help="that commit at once")
    parser.add_argument("--blocks", type=int, default=0, help="full blocks that each memory begins with")
    parser.add_argument("--sqlite", action="store_true", help="an index in a file, to compare with")
    parser.add_argument("--dir", type=Path, help="on which disk; left out: the one for temporary files")
    given = parser.parse_args()
    with ExitStack() as exits:
        directory = exits.enter_context(tempfile.TemporaryDirectory(prefix="kvasir-commits-", dir=given.dir))
        url = "" if given.sqlite else exits.enter_context(syncing_server(Path(directory)))
        store = exits.enter_context(opened(Path(directory) / "data", url))
        exits.enter_context(giving_way())  # as the service has it
        numbers = iter(range(1_000_000))
        beginning, took = stored(store, given.blocks) if given.blocks else None, {}
        for agents in given.agents:
            committers = [Committer(store, next(numbers), beginning) for _ in range(agents)]
            measured(committers, _KEPT_VERSIONS, given.seconds / 4)
            if url:
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute("ANALYZE")  # as the server's autovacuum does within a minute
            took[agents] = measured(committers, -(-given.commits // agents), given.seconds, _progress)
        asked = asked_by_one(committers[0])
    print(file=sys.stderr)
    trips = {"round_trips_of_one": asked.total(), "statements": dict(asked)} if asked else {}
    print(json.dumps({"is_on_postgres": not given.sqlite, "agents_at_once": took, **trips}, indent=1))


if __name__ == "__main__":
    main()
