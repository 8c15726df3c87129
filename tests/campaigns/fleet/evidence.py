"""What is left of a fleet one of whose parts could not be repaired: logs, and what each thread does."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.running.forked_children import TELLS_STACKS
from tools.fleet.fleet import Member

_TELLS_S = 2.0


def leave_evidence(root: Path, members: Sequence[Member], into: Path | None) -> None:
    """Into a directory, once. Stacks are in the logs of those whose they are."""
    if into is None or into.exists():
        return
    for member in members:
        supervisor = member.part.process
        for pid in (member.pid, supervisor.pid if supervisor and member.part.is_running else 0):
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, TELLS_STACKS)
                    os.kill(pid, signal.SIGCONT)
    time.sleep(_TELLS_S)
    shutil.copytree(root / "logs", into)
    for member in members:
        with suppress(FileNotFoundError):
            shutil.copytree(member.home.logs, into / member.name)
