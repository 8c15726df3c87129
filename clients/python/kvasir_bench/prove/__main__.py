"""`python -m kvasir_bench.prove STEP`: prints the value of a proof's step as JSON, and ends when its input does."""

import argparse
import signal
import sys

from kvasir.cli.running.program import end_with_input

from kvasir_bench.program import printed, progress
from kvasir_bench.prove.step import ProofScope
from kvasir_bench.prove.steps import STEPS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.prove", description=__doc__)
    parser.add_argument("step", choices=[step.name for step in STEPS])
    parser.add_argument("--model", default="", help="directory or name; the shipped model if left out")
    parser.add_argument("--quick", action="store_true", help="small and once, for a look")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # services of the step are ended in order
    end_with_input()
    step = next(step for step in STEPS if step.name == given.step)
    return printed(lambda: step.measure(ProofScope(given.model, given.quick), progress))


if __name__ == "__main__":
    sys.exit(main())
