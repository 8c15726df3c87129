"""A schema as numbered steps, of which most are files of SQL; one that was released never changes."""

from collections.abc import Set
from pathlib import Path

from cachestore_svc.index.refusals import data_too_new


def statements(step: Path) -> tuple[str, ...]:
    """The statements of a file: a semicolon before an empty line ends one, as those within a function do not."""
    return tuple(step.read_text(encoding="utf-8").rstrip().removesuffix(";").split(";\n\n"))


def missing(applied: Set[int], count: int) -> list[int]:
    """The numbers of the steps to come, of `count` in all. Raises FailedPrecondition (DATA_TOO_NEW)."""
    if unknown := applied - set(range(1, count + 1)):
        raise data_too_new(max(unknown), count)
    return [number for number in range(1, count + 1) if number not in applied]
