"""Files of what was played, a line for each batch: parts that were played side by side, or before a kill, add up."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvasir.errors import DataLoss
from pydantic import TypeAdapter, ValidationError

from kvasir_bench.scenarios.accounting import Batch, Playthrough

_REASON = "RESULTS_DAMAGED"
_LINE = TypeAdapter(tuple[Batch, list[Playthrough]])


def append(path: Path, batch: Batch, played: Sequence[Playthrough]) -> None:
    with path.open("ab") as file:
        file.write(_LINE.dump_json((batch, list(played))) + b"\n")


def read(paths: Iterable[Path], ways: Sequence[str]) -> tuple[list[Playthrough], list[Batch]]:
    """Conversations that were played under every way, once and by one kind of engine. Raises DataLoss."""
    lines = [line for path in paths for line in _lines(path)]
    engines: dict[tuple[str, int], dict[str, str]] = {}
    for batch, played in lines:
        for each in played:
            by_way = engines.setdefault((each.scenario, each.variant), {})
            if each.way in by_way:
                raise DataLoss(
                    f"{each.scenario}, variant {each.variant}, was played twice: expected other --first",
                    field="first",
                    reason=_REASON,
                )
            by_way[each.way] = batch.engine
    counted = {key for key, by_way in engines.items() if by_way.keys() >= set(ways)}
    for scenario, variant in sorted(counted):
        if len(found := {engine for engine in engines[scenario, variant].values() if engine}) > 1:
            text = f"{scenario}, variant {variant}: expected one engine, got {' and '.join(sorted(found))}"
            raise DataLoss(text, reason=_REASON)
    parts = [_part(batch, played, counted) for batch, played in lines]
    return [each for _, played in parts for each in played], [batch for batch, played in parts if played]


def _part(
    batch: Batch, played: Sequence[Playthrough], counted: Container[tuple[str, int]]
) -> tuple[Batch, list[Playthrough]]:
    """What counts of a batch; what its conversations took together is divided among them."""
    kept = [each for each in played if (each.scenario, each.variant) in counted]
    share = len(kept) / len(played) if played else 0.0
    return replace(
        batch,
        conversations=len(kept),
        wall_s=batch.wall_s * share,
        hot_bytes=round(batch.hot_bytes * share),
        stored_bytes=round(batch.stored_bytes * share),
    ), kept


def _lines(path: Path) -> list[tuple[Batch, list[Playthrough]]]:
    *lines, _cut = path.read_bytes().split(b"\n")
    try:
        return [_LINE.validate_json(line) for line in lines]
    except ValidationError as error:
        raise DataLoss(
            f"{path}: expected lines of `kvasir bench memory --played`: {error.errors()[0]['msg']}", reason=_REASON
        ) from None
