"""The finished steps of a proof that is not complete, each in a file of its own: a kill loses one step at most."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.credentials import replace_private_text
from kvasir.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """Records of steps in `directory`, which count only for the versions and the scope that `made_with` names."""

    directory: Path
    made_with: Mapping[str, Any]

    def read(self, name: str) -> dict[str, Any] | None:
        """The step's record; None if there is none, or one that was made with something else."""
        try:
            found = json.loads(self._file(name).read_text("utf-8"))
            return found["record"] if found["made_with"] == self.made_with else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def keep(self, name: str, record: Mapping[str, Any]) -> None:
        """On return the record survives a loss of power."""
        text = json.dumps({"made_with": self.made_with, "record": record})
        replace_private_text(self._file(name), text)

    def clear(self) -> None:
        for file in self.directory.glob("*.json"):
            file.unlink()

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.json"


@contextlib.contextmanager
def only_proof(directory: Path) -> Iterator[None]:
    """Raises FailedPrecondition while another process is inside for the same home."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise FailedPrecondition("a `kvasir prove` is already running in this home", reason="ALREADY_RUNNING") from None
    finally:
        os.close(descriptor)
