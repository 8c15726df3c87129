"""Random bit flips over blobs and manifests: none is served, the blob is named, and the rest goes on.

Each flip is put back by writing the blob again, so that thousands fit on one store.
`python -m tests.cachestore.core.survival.flip_campaign --flips 5000` is the long form.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvasir.errors import DataLoss
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import BlobKind
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, damaged, publish, write
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent

# From time to time the flip is found by a look over everything instead of by a reader.
_SCRUB_EVERY = 50


def campaign(root: Path, flips: int, seed: int = 0, *, is_sealed: bool = False) -> Iterator[str]:
    """What went wrong, in words; nothing when all is well."""
    lab, chance = Lab(root), random.Random(seed)
    if is_sealed:
        lab.seal(NS)
    with lab.open() as store:
        blobs: dict[Digest, tuple[bytes, BlobKind]] = {}
        for number, identity in enumerate((SMALL, MIXED, SMALL)):
            content = SyntheticAgent(identity, number).turn(600)
            publish(store, f"agent-{number}", content, 0)
            blobs |= {digest: (data, BlobKind.TENSORS) for digest, data in content.new_blobs.items()}
            blobs[content.manifest_digest] = (content.manifest_bytes, BlobKind.MANIFEST)
        files = {digest: lab.file_of(digest) for digest in blobs}
        for number in range(flips):
            digest = chance.choice(sorted(blobs, key=str))
            data = bytearray(files[digest].read_bytes())
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            files[digest].write_bytes(data)
            is_scrubbed = number % _SCRUB_EVERY == 0
            found = _scrubbed(store) if is_scrubbed else _refused(store, digest)
            if found != [digest]:
                yield f"flip {number}: bit {bit} of {digest} was not found ({found})"
            if damaged(store, NS) != [digest] or store.blobs.find_missing(NS, list(blobs)) != [digest]:
                yield f"flip {number}: {digest} is not in quarantine alone"
            other = chance.choice([each for each in sorted(blobs, key=str) if each != digest])
            if bytes(store.blobs.read(NS, other)) != blobs[other][0]:
                yield f"flip {number}: {other} changed"
            write(store, digest, *blobs[digest])
        if not store.care.check().is_clean or _scrubbed(store):
            yield "at the end something is wrong"
        if store.statistics.of(NS).counters["blobs_damaged"] != flips:
            yield f"{store.statistics.of(NS).counters} of {flips} flips"


def _refused(store: Store, digest: Digest) -> list[Digest]:
    try:
        store.blobs.read(NS, digest)
    except DataLoss as lost:
        return [digest] if lost.metadata == {"digest": digest.hash} else []
    return []


def _scrubbed(store: Store) -> list[Digest]:
    return [digest for progress in store.care.scrub() for digest in progress.damaged]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=5000)
    parser.add_argument("--sealed", action="store_true", help="the namespace is sealed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        problems = list(campaign(Path(directory) / "data", arguments.flips, seed=1, is_sealed=arguments.sealed))
    print(f"{arguments.flips} flips, problems: {problems}, in {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
