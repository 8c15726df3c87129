"""The fuzz: `python -m tests.campaigns.fuzz store|engine|gateway --requests 9 --seed 7`. `--only NUMBER`: one."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvasir_gateway.openapi import document

from tests.campaigns.fuzz.campaign import Findings, Target, fuzz
from tests.campaigns.fuzz.contract import engine_rpcs, store_rpcs
from tests.campaigns.fuzz.targets.engine_target import EngineTarget
from tests.campaigns.fuzz.targets.gateway_target import GatewayTarget
from tests.campaigns.fuzz.targets.store_target import StoreTarget

TARGETS: dict[str, Callable[[Path, int], Target]] = {
    "store": StoreTarget,
    "engine": EngineTarget,
    "gateway": GatewayTarget,
}

# What each can be asked for, by name.
ASKED: dict[str, Callable[[], Iterable[str]]] = {
    "store": store_rpcs,
    "engine": engine_rpcs,
    "gateway": lambda: [
        facts["operationId"] for path in document("").get("paths", {}).values() for facts in path.values()
    ],
}
# Among so many requests each RPC must have been asked for something that it does.
_ENOUGH = 5000


def run(which: str, directory: Path, seed: int, numbers: Sequence[int]) -> Findings:
    """Start the service, send it these requests, stop it."""
    target = TARGETS[which](directory, seed)
    try:
        target.start()
        return fuzz(target, seed, numbers)
    finally:
        target.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("service", choices=sorted(TARGETS))
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="send this request alone, again, and say what it is")
    parser.add_argument("--counts", action="store_true", help="also print how each RPC was answered")
    arguments = parser.parse_args()
    numbers = range(arguments.requests) if arguments.only is None else [arguments.only]
    # A campaign that is told to end ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="fuzz") as directory:
        findings = run(arguments.service, Path(directory), arguments.seed, numbers)
    if arguments.counts:
        print("\n".join(f"{name}: {count}" for name, count in sorted(findings.counts.items()) if " " in name))
    print(findings.summary())
    unmet = [name for name in ASKED[arguments.service]() if not findings.counts[f"{name} did it"]]
    if unmet and len(numbers) >= _ENOUGH:
        print(f"never did what was asked: {unmet}")
    return 1 if findings.problems or (unmet and len(numbers) >= _ENOUGH) else 0


if __name__ == "__main__":
    sys.exit(main())
