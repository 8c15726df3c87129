"""The targets of `kvasir bench store`, and its results for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir_bench.arithmetic import Target
from kvasir_bench.tables import text_table, verdicts

# The least part of the slowest baseline: of large blobs, and of small ones.
_LARGE, _SMALL = ("put", "put_files", "pull", "get_files"), ("put", "put_files", "pull")


def targets(results: Mapping[str, Any]) -> Iterator[Target]:
    """What the project wants of a store."""
    small, large, startup = results["sizes"][0], results["sizes"][-1], results["startup"]
    for size, limit, names in ((large, 0.8, _LARGE), (small, 0.6, _SMALL)):
        for name in names:
            yield Target(f"{name}, {size['name']} / {size['slowest'][name]}", size["ratio_to_slowest"][name], limit)
    yield Target("put into a sealed namespace / put", large["ratio_of_sealed"]["put"], 0.7)
    yield Target("get from a sealed namespace / get", large["ratio_of_sealed"]["get"], 0.7)
    yield Target("find 1,000 digests, ms", results["find_missing_1000_ms"], 10.0, is_most=True)
    yield Target(f"start with {startup['blobs']:,} blobs, s", startup["seconds"], 2.0, is_most=True)


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    """The results as plain text."""
    sizes = results["sizes"]
    rows = [
        (size["name"], f"{size['block_bytes'] / 1e6:.2f} MB", *(f"{rate:,.0f}" for rate in size["mb_per_s"].values()))
        for size in sizes
    ]
    yield from text_table([("MB/s", "block", *sizes[0]["mb_per_s"]), *rows])
    yield f"small blobs put per second: {results['startup']['small_blobs_put_per_s']:,}"
    yield from text_table(verdicts(results["targets"]))
