"""A proof as one self-contained HTML page: claims, tables and pictures. Nothing is fetched, and no script runs."""

import base64
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvasir_bench.pictures import Plots
from kvasir_bench.prove.figures import figures
from kvasir_bench.prove.result import broken_claims, claims
from kvasir_bench.prove.steps import shown

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>kvasir prove</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1rem; display: block; overflow-x: auto }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #8886 }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; background: #fff }
.no { color: #b3423a; font-weight: bold }
code { overflow-wrap: anywhere }
</style>
"""


def page(result: Mapping[str, Any]) -> str:
    """All of a result. Pictures are left out where matplotlib is not installed."""
    return _HEAD + "\n".join(_body(result)) + "\n</html>\n"


def _body(result: Mapping[str, Any]) -> Iterator[str]:
    broken, every = broken_claims(result), claims(result)
    yield f"<h1>kvasir prove, {escape(result['day'])}</h1>"
    if result["made_with"]["is_quick"]:
        yield "<p>A quick proof: small, measured once. Its times are a first look.</p>"
    met = sum(is_met for _, is_met in every)
    yield f"<p>{met} of {len(every)} claims about exactness are met.</p>"
    yield from _list([(text, False) for text in broken])
    yield from _table("Figures", [("", "found"), *figures(result).items()])
    yield from _table("Made with", [("", ""), *_flat(result["made_with"])])
    for record in result["steps"]:
        yield f"<h2>{escape(record['title'])}</h2><p>{record['seconds']:.0f} s</p>"
        if "failed" in record:
            yield f'<p class="no">failed: {escape(record["failed"])}</p>'
            continue
        yield from _list([(row["what"], row["is_met"]) for row in record["value"].get("claims", ())])
        tables, plots = shown(record)
        for title, rows in tables:
            yield from _table(title, rows)
        yield from _images(plots)
    yield f"<h2>Signature</h2><p>digest <code>{result['digest']}</code>, key <code>{result['public_key']}</code></p>"
    yield "<p>It shows that the JSON was not changed after it was made, and which results come from one home. It does "
    yield "not show that the machine measured truthfully.</p>"


def _flat(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, found in value.items():
        if isinstance(found, Mapping):
            yield from _flat(found)
        else:
            yield key.replace("_", " "), str(found) or "–"


def _list(rows: Sequence[tuple[str, bool]]) -> Iterator[str]:
    if rows:
        items = (f"<li>✓ {escape(text)}" if is_met else f'<li class="no">✗ {escape(text)}' for text, is_met in rows)
        yield f"<ul>{''.join(items)}</ul>"


def _table(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if title:
        yield f"<h3>{escape(title)}</h3>"
    lines = (
        "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row) + "</tr>"
        for kind, row in zip(["th", *["td"] * (len(rows) - 1)], rows, strict=True)
    )
    yield f"<table>{''.join(lines)}</table>"


def _images(plots: Plots | None) -> Iterator[str]:
    if plots is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = plots.write(Path(folder))
        except ImportError:
            return
        for file in files:
            data = base64.b64encode(file.read_bytes()).decode()
            yield f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{data}">'
