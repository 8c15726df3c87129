"""`python -m inference_svc.bench`: measures the engine and prints JSON; `kvasir bench engine` shows it.

Progress goes to stderr, in lines. Everything is measured in one run and reported as medians and ratios: a busy machine
changes all of them alike.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir.bench import engine_keys
from kvasir.errors import KvasirError

from inference_svc.bench import machine
from inference_svc.bench.arithmetic import rounded_row
from inference_svc.bench.cases import (
    cancelling,
    decode,
    first_token,
    interruptions,
    matching,
    memory_bytes,
    peer,
    shared_prefix,
    staggered,
)
from inference_svc.bench.lab import Case, Lab, MeasuredEngine
from inference_svc.model import kvasir_tiny

CASES: Mapping[str, Callable[[Lab], Case]] = {
    "decode": decode.run,
    "peer": peer.run,
    "first_token": first_token.run,
    "staggered": staggered.run,
    "gaps": interruptions.run,
    "cancel": cancelling.run,
    "memory": memory_bytes.run,
    "matching": matching.run,
    "shared_prefix": shared_prefix.run,
}
PEERS = ("mlx-lm",)
REPEATS = 5


def measured(lab: Lab, cases: Sequence[str]) -> dict[str, Any]:
    """The values of all names in `kvasir.bench.engine_keys`."""
    about = machine.machine(lab.engine)
    found = {name: CASES[name](lab) for name in cases}
    return {
        "machine": {**about, "load_after": round(os.getloadavg()[0], 2)},
        "model": machine.model(lab.engine),
        "settings": {"is_quick": lab.is_quick, "repeats": lab.repeats},
        "cases": {
            name: {"title": case.title, "rows": [rounded_row(row) for row in case.rows]} for name, case in found.items()
        },
        "targets": [target.row(name) for name, case in found.items() for target in case.targets],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m inference_svc.bench",
        description=__doc__,
        epilog=engine_keys.help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="", help="directory or name; the shipped model if left out")
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--peer", choices=PEERS, help="measure this one too, in the same run")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of every measurement (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small and once, for a look")
    parser.add_argument("--memory-budget-bytes", type=int, default=4 << 30, help="for KV (default %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    arguments = _arguments()
    cases = list(arguments.only or (name for name in CASES if name != "peer"))
    if arguments.peer and "peer" not in cases:
        cases.append("peer")
    model = arguments.model or kvasir_tiny.path()
    with tempfile.TemporaryDirectory() as nowhere:
        try:
            engine = MeasuredEngine.opened(model, Path(nowhere), arguments.memory_budget_bytes)
        except KvasirError as error:
            _say(error.message)
            return 1
        try:
            lab = Lab(
                engine,
                model,
                time.perf_counter,
                repeats=1 if arguments.quick else arguments.repeats,
                is_quick=arguments.quick,
                say=_say,
            )
            results = measured(lab, cases)
        finally:
            engine.close()
    json.dump(results, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
