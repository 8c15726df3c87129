"""Which test would have caught which fault of systems like this: `python -m tests.lessons` writes tests/LESSONS.md.

A test says it itself, in its docstring or a comment: "(LESSONS 4)". The table is made of that.
"""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/LESSONS.md"
_SAID = re.compile(r"LESSONS\s+((?:\d+(?:, | and )?)+)")

FAULTS = {
    1: "a trim leaves old K and V in the tail, and somebody attends to them",
    2: "a concurrent merge mixes rows",
    3: "a row is extracted while right-padding is pending",
    4: "an offset is changed in place while the model holds it",
    5: "a sliding-window cache that cannot be trimmed is trimmed",
    6: "live state and stored snapshot share memory",
    10: "a failed restore poisons later requests",
    11: "a restore reports success and prefills everything again",
    12: "a snapshot labelled N holds the state of N + k",
    13: "KV of other weights with the same shapes is accepted",
    14: "KV of another namespace is reused",
    15: "what a slot held before reaches another user",
    16: "low-bit KV breaks tool calls, and the bad memory is kept and reused",
    17: "a KV flag is accepted, reported, and not applied",
    18: "models with states or windows silently never hit",
    20: "caps of memory are exceeded",
    21: "one long prompt blocks cancels and every stream",
    25: "a disconnect leaves a row decoding for ever; nobody can cancel a prefill",
    26: "a detokenizer is built for every request",
    27: "parallel agents evict each other's KV",
    28: "a handler swallows its cancellation and leaks",
}
REQUIRED = {*range(1, 7), *range(10, 13), *range(15, 19), 21, *range(25, 29)}


@functools.cache
def covered() -> dict[int, list[str]]:
    """Ids of the tests that name each row."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if "LESSONS" not in source or path.name == "test_lessons.py":
            continue
        for name, body in _tests(source):
            for rows in _SAID.findall(body):
                for row in re.findall(r"\d+", rows):
                    found[int(row)].append(f"{path.relative_to(ROOT)}::{name}")
    return dict(found)


def table(rows: dict[int, list[str]]) -> str:
    lines = ["# What went wrong elsewhere, and the tests that would have caught it here", ""]
    lines += ["Written by `python -m tests.lessons`: a test names its rows itself.", ""]
    lines += ["| # | what went wrong | tests |", "|---|---|---|"]
    for row, fault in FAULTS.items():
        named = "<br>".join(f"`{test}`" for test in dict.fromkeys(rows.get(row, [])))
        lines.append(f"| {row} | {fault} | {named or '—'} |")
    return "\n".join(lines) + "\n"


def named_in_table(text: str) -> dict[int, list[str]]:
    """Rows of a written table, and the tests that they name."""
    rows = re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", text, re.MULTILINE)
    return {int(row): re.findall(r"`([^`]+)`", tests) for row, tests in rows}


def _tests(source: str) -> list[tuple[str, str]]:
    """Name and source of every test of a file, methods included."""
    functions: list[tuple[str, ast.stmt]] = []
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            functions += [(f"{node.name}::", member) for member in node.body]
        functions.append(("", node))
    return [
        (prefix + node.name, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        for prefix, node in functions
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]


if __name__ == "__main__":
    TABLE.write_text(table(covered()))
    missing = sorted(REQUIRED - covered().keys())
    print(f"{TABLE.name} written; rows without a test: {missing or 'none'}")
