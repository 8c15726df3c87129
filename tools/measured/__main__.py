"""`python -m tools.measured FILE…` adds results of `kvasir prove` to the kept ones, and writes them side by side."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvasir.errors import InvalidArgument
from kvasir_bench.prove.figures import figures, read_shown, side_by_side
from kvasir_bench.tables import markdown_table

HERE = Path(__file__).parent
KEPT = "machines"


def add(files: Sequence[Path], here: Path = HERE) -> list[Path]:
    """Add results under names of their own, and write the page. Raises InvalidArgument, before anything is written, for
    one that was changed after it was signed."""
    results = [read_shown(file) for file in files]
    (here / KEPT).mkdir(exist_ok=True)
    added = []
    for result in results:
        chip = re.sub(r"\W+", "-", figures(result).get("chip", "unknown").lower()).strip("-")
        added.append(here / KEPT / f"{result['day']}-{chip}-{result['digest'][:8]}.json")
        added[-1].write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    (here / f"{KEPT}.md").write_text(page(here), "utf-8")
    return added


def page(here: Path = HERE) -> str:
    """All kept results, a column for each."""
    results = [read_shown(file) for file in sorted((here / KEPT).glob("*.json"))]
    lines = [
        "# Machines",
        "",
        "[All measurements](README.md). Each column is one run of `kvasir prove`, whose signed JSON is in "
        f"`{KEPT}`; `kvasir prove --results FILE` checks and shows one. Times of different machines compare "
        "only as far as their loads do.",
        "",
        *markdown_table(side_by_side(results)),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.measured", description=__doc__)
    parser.add_argument("file", nargs="+", type=Path, help="the JSON that `kvasir prove` wrote")
    try:
        for path in add(parser.parse_args().file):
            print(path)
    except (InvalidArgument, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
