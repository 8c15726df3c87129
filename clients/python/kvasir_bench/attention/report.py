"""`kvasir bench attention`: runs the program that measures attention over pages, and shows its results."""

from collections.abc import Callable, Mapping
from typing import Any

from kvasir.cli.running.program import run_program

KEYS = """Names in the JSON stay. `implementation` is what the engine would use here. Each of `rows` has `who` (fused:
the kernels; emulation: their source on a CPU; reference: MLX operations; bf16 SDPA: MLX's attention over contiguous
exact rows, plain or with a padding mask), `batch` rows of `tokens` tokens stored in `bits`, `call_s` (seconds a call),
`read_bytes_per_s` (bytes of the stored rows over that), `share_of_copy` (that over `copy_bytes_per_s`, bytes read and
written by a copy) and, of kernels, `error` (relative, against the reference in fp32). `times_mean_something` is false
on a CPU and in a quick run, which have no `targets`."""


def run(*, is_quick: bool, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; `KEYS` names the results. Raises FailedPrecondition, with the program's last line, if it could not."""
    arguments = ["--quick"] if is_quick else []
    return run_program("kvasir_bench.attention", arguments, "attention could not be measured", say)


def table(results: Mapping[str, Any]) -> str:
    """The results as plain text."""
    lines = [
        f"{results['machine']['device']} · {results['implementation']} · "
        f"a copy moves {results['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    ]
    if not results["times_mean_something"]:
        lines.append("these times mean nothing: a CPU or a quick run shows only that it works")
    lines.append(f"{'':<24}{'rows':>5}{'tokens':>8}{'bits':>6}{'µs':>10}{'of copy':>10}{'error':>10}")
    for row in results["rows"]:
        error = f"{row['error']:.1e}" if "error" in row else ""
        lines.append(
            f"{row['who']:<24}{row['batch']:>5}{row['tokens']:>8}{row['bits']:>6}{row['call_s'] * 1e6:>10.1f}"
            f"{row['share_of_copy']:>10.1%}{error:>10}"
        )
    for target in results["targets"]:
        verdict = "met" if target["is_met"] else "NOT MET"
        lines.append(f"{verdict}: {target['what']}: {target['found']:.2f}, wanted {target['wanted']}")
    return "\n".join(lines)
