"""A proof as one self-contained HTML page: claims, tables and pictures. Nothing is fetched, and no script runs."""

import base64
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvasir_bench.pictures import Plots
from kvasir_bench.prove.figures import figures
from kvasir_bench.prove.result import broken_claims, claims
from kvasir_bench.prove.steps import shown


def page(result: Mapping[str, Any]) -> str:
    """All of a result. Pictures are left out where matplotlib is not installed."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # every command imports this module

    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    return pages.get_template("page.html").render(
        result=result,
        claims=claims(result),
        broken=[(text, False) for text in broken_claims(result)],
        figures=[("", "found"), *figures(result).items()],
        made_with=[("", ""), *_flat(result["made_with"])],
        steps=[_step(record) for record in result["steps"]],
    )


def _step(record: Mapping[str, Any]) -> dict[str, Any]:
    if "failed" in record:
        return dict(record)
    found = [(row["what"], row["is_met"]) for row in record["value"].get("claims", ())]
    tables, plots = shown(record)
    return {**record, "claims": found, "tables": tables, "images": _images(plots) if plots else ()}


def _flat(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, found in value.items():
        if isinstance(found, Mapping):
            yield from _flat(found)
        else:
            yield key.replace("_", " "), str(found) or "–"


def _images(plots: Plots) -> list[tuple[str, str]]:
    """Each picture's name, and its PNG in base64."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return [(file.stem, base64.b64encode(file.read_bytes()).decode()) for file in plots.write(Path(folder))]
        except ImportError:
            return []
