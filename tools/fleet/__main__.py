"""`make fleet`: runs a fleet until Ctrl-C, and prints its addresses and what to try."""

import argparse
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir.cli.running.holding import holders

from tools.fleet.fleet import Fleet, Plan, running
from tools.fleet.part import FleetError
from tools.fleet.servers import DOORS

_ENDS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 1.0


def main() -> int:
    """The exit code: 0 after Ctrl-C or SIGTERM, 1 when the fleet did not start or a part ended."""
    parser = argparse.ArgumentParser(prog="make fleet", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("out/fleet"), help="holds everything (default: out/fleet)")
    parser.add_argument("--engines", type=_count, default=3, help="engines (3)")
    parser.add_argument("--stores", type=_count, default=1, help="stores over the one database and bucket (1)")
    parser.add_argument(
        "--door", choices=[*DOORS, "none"], default="nginx", help="for gRPC, before the engines (nginx)"
    )
    parser.add_argument("--json", action="store_true", help="print all addresses on one line, once all is ready")
    given = parser.parse_args()
    for number in _ENDS:
        signal.signal(number, _leave)
    root, plan = given.dir.absolute(), Plan(given.engines, given.door, stores=given.stores)
    try:
        with _alone(root) as lock, running(root, plan, lock) as fleet:
            print(json.dumps(fleet.facts()) if given.json else _words(fleet), flush=True)
            return _watch(fleet)
    except _LeaveError:
        return 0
    except FleetError as error:
        print(f"make fleet: {error}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 64, got {text!r}")
    return int(text)


def _leave(*_: object) -> None:
    """Once: a service that gets it again and again ends no sooner."""
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)
    raise _LeaveError


class _LeaveError(Exception):
    """Ctrl-C, or SIGTERM."""


@contextmanager
def _alone(root: Path) -> Iterator[int]:
    """Be the only fleet of the directory; returns its lock, which each part holds too, so that what a killed fleet left
    is seen. Raises FleetError, which names who is there."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock_file = root / "lock"
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pids = " ".join(map(str, holders(lock_file)))
            text = f"a fleet runs in {root}, or is left of one: `kill {pids}` ends it; or name another directory: DIR=…"
            raise FleetError(text) from None
        yield descriptor
    finally:
        os.close(descriptor)


def _watch(fleet: Fleet) -> int:
    """Until a part has ended that nobody starts again."""
    while True:
        time.sleep(_LOOK_S)
        for part in fleet.parts:
            if not part.is_running:
                print(f"make fleet: {part.name} has ended; see {part.log_file}", file=sys.stderr)
                return 1


def _words(fleet: Fleet) -> str:
    first = fleet.engines[0]
    token = f"--token-file {fleet.client_token}"
    members = "\n".join(f"  {each.name:<10} {each.address}  pid {each.pid}" for each in (*fleet.engines, *fleet.stores))
    options = " ".join(fleet.engine_options)
    door = ""
    if fleet.door is not None:
        door = f"  {fleet.plan.door:<10} {fleet.door.address}  gRPC\n"
    at = fleet.door.address if fleet.door is not None else first.address
    return f"""A fleet is ready in {fleet.root}:
  gateway    http://{fleet.http}  HTTP; its key is in {fleet.client_token}
{door}{members}
  postgres   127.0.0.1:{fleet.postgres.port}   s3  127.0.0.1:{fleet.s3.port}
Try in another terminal:
  kvasir --engine {at} {token} chat ada --once "My name is Anna."
  kvasir --home {fleet.store.home.root} fleet status {options}
  kill -9 {first.pid}      # an engine; ada goes on at another one
  kvasir --engine {at} {token} chat ada --once "What is my name?"
Ctrl-C ends it all; what the agents remember stays in that directory."""


if __name__ == "__main__":
    sys.exit(main())
