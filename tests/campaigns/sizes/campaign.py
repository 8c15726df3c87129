"""`make campaign-sizes`, the long form of this folder's test: it wants 30 GB of disk, 12 GiB of RAM, half an hour."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.campaigns.sizes.rounds import Round, play

_SLOW = 50e6
ROUNDS = (
    Round("1 of 131,072", 1, 131_072, 6.0),
    Round("20 of 32,768", 20, 32_768, 6.0),
    Round("8 of 32,768, slow", 8, 32_768, 6.0, slow_bytes_per_s=_SLOW, good_within_s=600.0),
    Round("8 of 32,768, stalled", 8, 32_768, 6.0, stalls_at=(0.1, 0.6)),
    Round("8 of 32,768, killed", 8, 32_768, 6.0, kills_at=(0.2, 0.5, 0.8)),
    Round("64 of 8,192, stalled and killed", 64, 8192, 4.0, stalls_at=(0.2,), kills_at=(0.5,)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words of the rounds to play")
    parser.add_argument("--directory", type=Path, help="on the disk that is used")
    arguments = parser.parse_args()
    problems = 0
    for played in ROUNDS:
        if arguments.only not in played.name:
            continue
        with tempfile.TemporaryDirectory(prefix="kvasir-sizes-", dir=arguments.directory) as directory:
            findings = play(played, Path(directory))
        print(findings.summary(), *findings.problems, sep="\n  ", flush=True)
        problems += len(findings.problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
