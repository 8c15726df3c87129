"""The names in the JSON of `kvasir bench engine` and their meanings. They do not change, because scripts read them."""

import json
from collections.abc import Mapping
from pathlib import Path

_MEANINGS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
TOP: Mapping[str, str] = _MEANINGS["TOP"]
CASES: Mapping[str, Mapping[str, str]] = _MEANINGS["CASES"]
SPREAD = "…_spread: (largest − smallest) / median over the repeats"


def help_text() -> str:
    """All names, a paragraph for each case."""
    paragraphs = [_paragraph("JSON", TOP), *(_paragraph(case, keys) for case, keys in CASES.items()), SPREAD]
    return "\n\n".join(paragraphs)


def _paragraph(name: str, keys: Mapping[str, str]) -> str:
    meanings = "; ".join(f"{key}: {meaning}" for key, meaning in keys.items() if meaning)
    return f"{name}: {meanings}."
