"""Files of what was played, a line for each batch: parts that were played side by side, or before a kill, add up."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvasir.errors import DataLoss
from pydantic import TypeAdapter, ValidationError

from kvasir_orchestrator.measuring.accounting import Batch, Played

_LINE = TypeAdapter(tuple[Batch, list[Played]])


def append(path: Path, batch: Batch, played: Sequence[Played]) -> None:
    """Note a batch whose conversations have ended."""
    with path.open("ab") as file:
        file.write(_LINE.dump_json((batch, list(played))) + b"\n")


def read(paths: Iterable[Path], ways: Sequence[str]) -> tuple[list[Played], list[Batch]]:
    """All conversations of the files that were played under every way. Raises DataLoss for a line that is none, and for
    a conversation that was played twice.
    """
    lines = [line for path in paths for line in _lines(path)]
    whole: dict[tuple[str, int], list[str]] = {}
    for _, played in lines:
        for each in played:
            whole.setdefault((each.scenario, each.variant), []).append(each.way)
    if twice := [key for key, found in whole.items() if len(set(found)) < len(found)]:
        raise DataLoss(f"{twice[0][0]}, variant {twice[0][1]}, was played twice: expected other --first", field="first")
    counted = {key for key, found in whole.items() if set(found) >= set(ways)}
    kept = [(batch, played) for batch, played in lines if all((p.scenario, p.variant) in counted for p in played)]
    return [each for _, played in kept for each in played], [batch for batch, _ in kept]


def _lines(path: Path) -> list[tuple[Batch, list[Played]]]:
    *lines, _cut = path.read_bytes().split(b"\n")
    try:
        return [_LINE.validate_json(line) for line in lines]
    except ValidationError as error:
        raise DataLoss(
            f"{path}: expected lines of `kvasir bench memory --played`: {error.errors()[0]['msg']}"
        ) from None
