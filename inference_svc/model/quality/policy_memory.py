"""The choices of `auto`, kept by weights digest in the state directory, so that only the first start measures.

A small JSON file, and only a shortcut: if it cannot be read, has another format, or has no choice under the same
conditions, the model is measured again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.kv.policy import Rung

# Increased when the judgement or its questions change: older choices are then measured again.
FORMAT = 2
FILE = "kv-policies.json"


@dataclass(frozen=True, slots=True)
class Conditions:
    weights_digest: str
    compute_type: str
    exact_layers: Sequence[int]

    @property
    def key(self) -> str:
        return f"{self.weights_digest}:{self.compute_type}:{','.join(map(str, self.exact_layers))}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A rung, and the reason for it."""

    rung: Rung
    why: str


def remembered(directory: Path, conditions: Conditions) -> Choice | None:
    entry = _choices(directory).get(conditions.key)
    if not isinstance(entry, dict):
        return None
    rung, why = entry.get("rung"), entry.get("why")
    if not isinstance(why, str):
        return None
    return next((Choice(each, why) for each in Rung if each.value == rung), None)


def remember(directory: Path, conditions: Conditions, choice: Choice) -> None:
    """Add a choice; the file is replaced whole. Raises OSError when it cannot be written."""
    choices = _choices(directory) | {conditions.key: {"rung": choice.rung.value, "why": choice.why}}
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = directory / f"{FILE}.part"
    new.write_text(json.dumps({"format": FORMAT, "choices": choices}, indent=1, sort_keys=True))
    new.chmod(0o600)
    new.replace(directory / FILE)


def _choices(directory: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads((directory / FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("choices"), dict):
        return {}
    choices: dict[str, Any] = content["choices"]
    return choices
