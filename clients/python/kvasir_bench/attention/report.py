"""The results of `kvasir bench attention` for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvasir_bench.tables import text_table, verdicts

KEYS = """Names in the JSON stay. `implementation` is what the engine would use here. Each of `rows` has `who` (fused:
the kernels; reference: MLX operations; bf16 SDPA: MLX's attention over contiguous exact rows, plain or with a padding
mask), `batch` rows of `tokens` tokens stored in `bits`, `call_s` (seconds a call), `read_bytes_per_s` (bytes of the
stored rows over that), `share_of_copy` (that over `copy_bytes_per_s`, bytes read and written by a copy) and, of
kernels, `error` (relative, against the reference in fp32). `times_mean_something` is false on a CPU and in a quick
run, which have no `targets`."""


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{results['machine']['device']} · {results['implementation']} · "
        f"a copy moves {results['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    )
    if not results["times_mean_something"]:
        yield "these times mean nothing: a CPU or a quick run shows only that it works"
    yield from text_table(table(results))
    if results["targets"]:
        yield from text_table(verdicts(results["targets"]))


def table(results: Mapping[str, Any]) -> list[Sequence[str]]:
    return [("", "rows", "tokens", "bits", "µs", "of copy", "error"), *map(_cells, results["rows"])]


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    counts = (str(row[key]) for key in ("batch", "tokens", "bits"))
    error = f"{row['error']:.1e}" if "error" in row else ""
    return (row["who"], *counts, f"{row['call_s'] * 1e6:.1f}", f"{row['share_of_copy']:.1%}", error)
