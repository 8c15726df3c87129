"""`python -m tools.measured FILE…` adds results of `kvasir prove` to the kept ones, and writes them side by side."""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument
from kvasir_bench.prove.figures import figures, read_shown, side_by_side
from kvasir_bench.tables import markdown_table

HERE = Path(__file__).parent
KEPT = "machines"
# No result names its card. The beginning of its digest, and the card that its commit names.
CARDS = {"6c9e3c48": "NVIDIA H100", "894d4f48": "NVIDIA H200"}


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
    """Each kind of machine's newest results, a column for each."""
    results = list(newest([read_shown(file) for file in sorted((here / KEPT).glob("*.json"))]))
    heading, *rows = side_by_side(results)
    cards = ("card", *(CARDS.get(result["digest"][:8], "–") for result in results))
    lines = [
        "# Machines",
        "",
        "[All measurements](README.md). Each column is one run of `kvasir prove`, the newest of its "
        "kind of machine. Claims are about exactness, targets about speed and memory. **Bold**: something was missed. "
        f"Signed JSON of these is in `{KEPT}`, of earlier runs there in git; `kvasir prove --results FILE` checks "
        "and shows one, with each target. Times of different machines compare only as far as their loads do.",
        "",
        *markdown_table([heading, cards, *map(_marked, rows)]),
    ]
    return "\n".join(lines) + "\n"


def newest(results: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Of each kind of machine the runs of its last day. Quick ones only where no other is kept."""
    kinds = defaultdict(list)
    for result in results:
        found = figures(result)
        kinds[tuple(found.get(name) for name in ("chip", "cores", "attention by"))].append(result)
    for runs in kinds.values():
        whole = [run for run in runs if not run["made_with"]["is_quick"]] or runs
        last = max(run["day"] for run in whole)
        yield from (run for run in whole if run["day"] == last)


def _marked(row: Sequence[str]) -> Sequence[str]:
    """In bold where a claim, a step or a target is missed."""
    name, *cells = row
    if name == "steps failed or claims broken":
        return (name, *(cell if cell == "0" else f"**{cell}**" for cell in cells))
    if name not in ("claims met", "targets met"):
        return row
    return (name, *(f"**{cell}**" if len(set(cell.split(" of "))) == 2 else cell for cell in cells))


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
