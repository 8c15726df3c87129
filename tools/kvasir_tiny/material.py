"""The word lists and sentences of kvasir-tiny's world, which are in `material.json`."""

import json
from functools import cache
from pathlib import Path
from typing import Any


def material(section: str) -> dict[str, Any]:
    """The lists of one module."""
    found: dict[str, Any] = _all()[section]
    return found


@cache
def _all() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return whole
