"""The papers' tables: the published figures of `published.json`, and where the measured rows beside them come from."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvasir_bench.paper import others, semantic

Row = Mapping[str, Any]
_WEDLM = "not built: WeDLM"


@dataclass(frozen=True, slots=True)
class Source:
    """The cases that a table needs, and its rows of their findings."""

    cases: tuple[str, ...]
    rows: Callable[..., Iterable[Row]]
    lengths: tuple[int, ...] = ()  # contexts to measure where the published rows have none
    missing: str = "not measured"  # why a published row has none beside it


def _not_built(reason: str) -> Source:
    return Source((), lambda: (), missing=reason)


SOURCES: Mapping[str, Source] = {
    "3.1": Source(("facts",), semantic.bytes_a_token),
    "3.2": Source(("kv_bytes",), semantic.savings),
    "3.4": Source(("peaks",), semantic.peaks),
    "4.4": Source(("scenarios",), semantic.scenarios),
    "5.2": Source(("path",), semantic.loads),
    "5.3": Source(("path",), semantic.cold_turns),
    "5.4": Source(("three_turns",), semantic.turns, (2000,)),
    "5.4 prefix": Source(("prefix",), semantic.turns, (1000,)),
    "5.5": Source(("path",), semantic.first_tokens),
    "5.5 end to end": Source(("path",), semantic.ends),
    "5.6": Source(("over_http",), semantic.modes),
    "5.7": Source(("pairs",), semantic.pairs),
    "5.7 staggered": Source(("staggered",), semantic.staggered),
    "5.8": Source(("facts", "peaks"), semantic.capacity, (4096,)),
    "5.9": Source(("servers",), semantic.servers, (2000,), "another system; LM Studio: --http URL"),
    "5.10": Source(("matching",), semantic.matching),
    "6.6 perplexity": Source(("quality",), semantic.perplexity),
    "6.6 retrieval": Source(("scenarios",), semantic.retrieval),
    "001 attention": Source(("attention",), others.attention),
    "001 open loop": Source(("open_loop",), others.open_loop),
    "002 backends": Source(("weights", "peer"), others.backends, (512,), "other weights, or not MLX"),
    "002 decoding": Source(("peer",), others.decoding, (512,), _WEDLM),
    "002 GSM8K": _not_built("not built: GSM8K"),
    "002 cacheability": _not_built(_WEDLM),
    "002 KV": Source(("kv_bytes",), iter),
    "002 latency": Source(("parts",), others.parts, (512,)),
    "002 selective": _not_built("not built: weights quantized by layer"),
    "002 operations": _not_built("not built: a profile by operations"),
    "003 loading": Source(("weights",), iter),
    "003 KV": Source(("growth",), others.growth, (512, 1024, 2048, 4096, 8192)),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table as its paper has it. `figures` are rows by the model that was measured, in the order of the columns, some
    with a note behind them.
    """

    number: str
    paper: str
    title: str
    keys: tuple[str, ...]  # the columns that name a row
    values: tuple[str, ...]
    figures: Mapping[str, list[list[Any]]]
    note: str = ""

    @property
    def source(self) -> Source:
        return SOURCES[self.number]

    @property
    def published(self) -> list[dict[str, Any]]:
        """Rows by column, `by` whom, and with a `note`."""
        columns = (*self.keys, *self.values)
        return [
            {
                "by": by,
                **dict(zip(columns, row, strict=False)),
                "note": row[len(columns)] if row[len(columns) :] else "",
            }
            for by, rows in self.figures.items()
            for row in rows
        ]

    @property
    def contexts(self) -> list[int]:
        """The contexts that are wanted."""
        of_rows = [row["context_tokens"] for row in self.published if row.get("context_tokens")]
        return sorted({*(self.source.lengths or of_rows)})

    def is_called(self, name: str) -> bool:
        """By its number, or by a paper's or a section's number before it."""
        return name in (self.number, self.number.split()[0], self.paper)


@cache
def papers() -> Mapping[str, str]:
    """The papers by their numbers."""
    found: dict[str, str] = _file()["papers"]
    return found


@cache
def tables() -> tuple[Table, ...]:
    """All of them, in the papers' order."""
    lists = ("keys", "values")
    return tuple(Table(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in _file()["tables"])


def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    return found
