"""How long a store with many blobs takes to open: `python -m tests.cachestore.core.start_up --blobs 100000`."""

import argparse
import sqlite3
import tempfile
import time
from pathlib import Path

from blake3 import blake3

from tests.cachestore.core.lab import NS, Lab


def fill(root: Path, count: int) -> None:
    """A data directory with so many blobs, made without the store's care: files are empty, and all in one manifest."""
    lab = Lab(root)
    lab.open().close()
    hashes = sorted(blake3(str(number).encode()).hexdigest() for number in range(count))
    blobs = lab.directory_of(NS) / "blobs"
    for shelf in {hash_[:2] for hash_ in hashes}:
        (blobs / shelf).mkdir(parents=True)
    for hash_ in hashes:
        (blobs / hash_[:2] / hash_).touch()
    with sqlite3.connect(root / "kvasir.sqlite3") as connection:
        connection.execute("INSERT INTO namespaces (id, name) VALUES (1, ?)", (NS,))
        connection.executemany(
            "INSERT INTO blobs (namespace_id, hash, size_bytes, kind, created_unix_ms) VALUES (1, ?, 0, 'manifest', 0)",
            [(hash_,) for hash_ in hashes],
        )
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blobs", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "data"
        fill(root, arguments.blobs)
        for _ in range(3):
            began = time.perf_counter()
            store = Lab(root).open()
            print(f"opened {store.statistics.of(NS).blob_count} blobs in {time.perf_counter() - began:.3f} s")
            store.close()


if __name__ == "__main__":
    main()
