"""What a home knows of its last backup: where it lies, when it ended, and whether all files were whole."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvasir.cli.running.home import Home
from kvasir.credentials import replace_private_text
from kvasir.errors import NotFound

FILE = "backup.json"
_NAMES = ("folder", "ended_at", "files", "bytes", "copied_bytes", "damaged")


def note_last(home: Home, value: dict[str, Any]) -> None:
    """Keep what `kvasir backup` answered, with the time of its end."""
    told = {**value, "ended_at": datetime.now(UTC).isoformat(timespec="seconds")}
    replace_private_text(home.root / FILE, json.dumps({name: told[name] for name in _NAMES}))


def last_backup(home: Home) -> dict[str, Any] | None:
    """folder, ended_at (ISO 8601), files, bytes, copied_bytes, damaged (paths); None if there was none."""
    try:
        found = json.loads((home.root / FILE).read_text())
        return {name: found[name] for name in _NAMES}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def last_folder(home: Home) -> Path:
    """Where the last backup lies. Raises NotFound if there was none."""
    if (last := last_backup(home)) is None:
        raise NotFound.of("DIR", f"{home.root} has no backup yet: name a folder for it", reason="NO_BACKUP")
    return Path(last["folder"])
