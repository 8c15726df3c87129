"""The hammer: `python -m tests.campaigns.hammer --requests 10000`, or `make hammer`. Goes on where it was ended.

Rounds are independent of one another, so several processes can do parts of them: `--shard 0/4` … `--shard 3/4`, and
`--merge` when they are done. A round that was interrupted is done again from its beginning.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.campaigns.hammer.arena import RoundPlan, RoundResult
from tests.campaigns.hammer.rounds import run_round

_MEMORY_GIB = ((0.25, 0.014), (0.014, 0.25), (0.02, 1.0, 0.03))


def plans(seed: int, requests: int, requests_per_round: int, concurrency: int) -> list[RoundPlan]:
    """The rounds of a campaign; the last may be shorter."""
    return [
        RoundPlan(
            seed,
            number,
            min(requests_per_round, requests - number * requests_per_round),
            concurrency,
            memory_gib=_MEMORY_GIB[number % len(_MEMORY_GIB)],
            kills=1,
            stops=number % 2,
        )
        for number in range(-(-requests // requests_per_round))
    ]


class Checkpoints:
    """Results of finished rounds, one line of JSON each, in one file per shard."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, shard: str, result: RoundResult) -> None:
        line = {
            "plan": vars(result.plan),
            "requests": result.requests,
            "compared": result.compared,
            "seconds": round(result.seconds, 1),
            "counts": dict(result.counts),
            "problems": [f"{each.sort}: {each.agent}: {each.what[:200]}" for each in result.problems],
        }
        with (self._directory / f"{shard.replace('/', '-of-')}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def done(self, wanted: list[RoundPlan]) -> dict[int, dict[str, Any]]:
        """Results of these rounds, by number, whichever shard did them."""
        plans_wanted = json.loads(json.dumps([vars(plan) for plan in wanted]))
        found: dict[int, dict[str, Any]] = {}
        for path in sorted(self._directory.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    result = json.loads(line)
                except ValueError:
                    continue  # the process died while it wrote it: that round is done again
                if result["plan"] in plans_wanted:
                    found[result["plan"]["number"]] = result
        return found


def report(done: dict[int, dict[str, Any]], wanted: list[RoundPlan]) -> int:
    """Print what all rounds saw together; the exit code."""
    counts: Counter[str] = Counter()
    for result in done.values():
        counts.update(result["counts"])
    problems = [f"round {number}: {each}" for number, result in sorted(done.items()) for each in result["problems"]]
    missing = [plan.number for plan in wanted if plan.number not in done]
    print(f"{len(done)} of {len(wanted)} rounds, {sum(result['requests'] for result in done.values())} requests")
    print(f"{sum(result['compared'] for result in done.values())} turns compared with the same turns alone")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print("\n".join(problems) or "no problems")
    if missing:
        print(f"not done: rounds {missing}")
    return 1 if problems or missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hammer", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests-per-round", type=int, default=250)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="do every Nth round, from the Ith on")
    parser.add_argument("--round", type=int, help="do this round alone, again")
    parser.add_argument("--out", type=Path, default=Path("out/hammer"))
    parser.add_argument("--merge", action="store_true", help="only report what all shards have done")
    arguments = parser.parse_args()
    wanted = plans(arguments.seed, arguments.requests, arguments.requests_per_round, arguments.concurrency)
    checkpoints = Checkpoints(arguments.out)
    if not arguments.merge:
        index, _, count = arguments.shard.partition("/")
        mine = wanted[int(index) :: int(count)] if arguments.round is None else [wanted[arguments.round]]
        try:
            do(mine, checkpoints, arguments.shard, arguments.out, is_again=arguments.round is not None)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 130
        wanted = mine
    return report(checkpoints.done(wanted), wanted)


def do(mine: list[RoundPlan], checkpoints: Checkpoints, shard: str, out: Path, *, is_again: bool) -> None:
    """Do the rounds that are not done, and say how it goes."""
    began, asked = time.monotonic(), 0
    for plan in mine:
        if plan.number in checkpoints.done([plan]) and not is_again:
            continue
        directory = out / f"round-{plan.seed}-{plan.number}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        result = asyncio.run(run_round(plan, directory))
        checkpoints.add(shard, result)
        asked += result.requests
        rate = asked / (time.monotonic() - began)
        print(
            f"round {plan.number} ({mine.index(plan) + 1} of {len(mine)}): {result.requests} requests, "
            f"{result.compared} compared, {len(result.problems)} problems, {rate:.1f} requests/s",
            flush=True,
        )
        for problem in result.problems:
            print(f"  {problem.sort}: {problem.agent}: {problem.what[:300]}", flush=True)
        if not result.problems:
            shutil.rmtree(directory)  # what went wrong stays: records, logs and the store


if __name__ == "__main__":
    sys.exit(main())
