"""A proof of played steps, as a process that a test kills: `python -m tests.bench.played_proof DIRECTORY`.

Each step adds its name to DIRECTORY/begun. It waits as long as DIRECTORY/hold has its name. The last line of the output
is the JSON of all records.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvasir_bench.prove.proving import KeptSteps, Prover, only_proof
from kvasir_bench.prove.step import ProofScope, Step

NAMES = ("first", "second", "third", "fourth")
STEPS = tuple(Step(name, f"The {name}", 2, 1, lambda *_: {}) for name in NAMES)


def prover(directory: Path, measured: Callable[[Step], dict[str, Any]], **known: Any) -> Prover:
    """With its steps kept in the directory."""
    options = {"wait": lambda: None, "report": lambda _: None, "slept": lambda: 0.0, **known}
    made_with = options.pop("made_with", {"versions": {"kvasir": "1"}})
    return Prover(ProofScope(), KeptSteps(directory / "prove", made_with), measured, **options)


def main() -> None:
    directory = Path(sys.argv[1])

    def measured(step: Step) -> dict[str, Any]:
        with (directory / "begun").open("a") as begun:
            begun.write(f"{step.name}\n")
        while (directory / "hold").exists() and (directory / "hold").read_text() == step.name:
            time.sleep(0.01)
        return {"claims": [{"what": step.title, "is_met": True}]}

    with only_proof(directory / "prove"):
        print(json.dumps(prover(directory, measured).prove(STEPS)))


if __name__ == "__main__":
    main()
