"""The store on a disk that writes down all that it is asked, so that a power cut can be played when it was killed.

What is there at its start counts as durable. See `tests.cachestore.core.survival.power_loss` for the model.
"""

import base64
import dataclasses
import json
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cachestore_svc import __main__ as program
from tests.cachestore.core.survival.power_loss import DATABASE_FILES, Crash, Effect, Fate, RecordingDisk
from tests.cachestore.service.running import StoreHome

_EFFECTS, _COPIES = "effects", "copies"
# A commit's copy may be cut by the kill; the one before it is whole.
_COPIES_KEPT = 2


class _Written(list[Effect]):
    """Effects that outlive the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, effect: Effect) -> None:
        super().append(effect)
        facts = dataclasses.asdict(effect) | {"data": base64.b64encode(effect.data).decode()}
        self._file.write(json.dumps(facts, default=str).encode() + b"\n")


class WritingDisk(RecordingDisk):
    """A recording disk of many threads. An effect is written down after it happened, and one at a time."""

    def __init__(self, root: Path) -> None:
        self.lock = threading.RLock()
        super().__init__(root, root.with_name(_COPIES), _Written(root.with_name(_EFFECTS)))
        if self.root.exists():
            self._remember(self.root)
        if all((self.root / name).exists() for name in DATABASE_FILES):
            self.reached("index: after commit")

    def reached(self, point: str) -> None:
        super().reached(point)
        shutil.rmtree(self.copies / str(self.commits - _COPIES_KEPT), ignore_errors=True)

    def _remember(self, directory: Path) -> None:
        for path in sorted(directory.iterdir()):
            number = self.number(path.stat(), is_new=True)
            self.log.append(Effect("directory" if path.is_dir() else "name", path, file=number))
            if path.is_dir():
                self._remember(path)
            elif path.name not in DATABASE_FILES:
                self.log.append(Effect("write", file=number, data=path.read_bytes()))
                self.log.append(Effect("fsync", file=number))
        self.log.append(Effect("fsync", file=self.number(directory.stat())))


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    def alone(disk: WritingDisk, *arguments: Any) -> Any:
        with disk.lock:
            return method(disk, *arguments)

    return alone


for _name in ("open_append", "write", "truncate", "fsync", "add_directory", "rename", "remove", "reached"):
    setattr(WritingDisk, _name, _one_at_a_time(getattr(WritingDisk, _name)))


def main() -> int:
    """As `cachestore_svc.__main__.main`."""
    root = Path(sys.argv[sys.argv.index("--data-dir") + 1])
    root.mkdir(mode=0o700, exist_ok=True)
    disk = WritingDisk(root)
    setattr(program, "_MEANS", dataclasses.replace(program._MEANS, disk=disk))  # noqa: B010
    return program.main()


def cut_power(home: StoreHome, fate: Fate, chance: random.Random) -> bool:
    """The store was killed; let its directory be what a loss of power at that moment may leave. False when it had not
    even a database yet."""
    effects, copies, left = (home.root / name for name in (_EFFECTS, _COPIES, "left"))
    crash = Crash(home.data_dir, list(_read(effects)))
    if had_database := crash.leave(left, copies, fate, chance):
        shutil.rmtree(home.data_dir)
        left.rename(home.data_dir)
        home.data_dir.chmod(0o700)
    effects.unlink()
    shutil.rmtree(copies, ignore_errors=True)  # it may die before its first commit
    return had_database


def _read(path: Path) -> Iterator[Effect]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        facts = json.loads(line)
        paths = {name: Path(facts[name]) for name in ("path", "target")}
        yield Effect(**{**facts, **paths, "data": base64.b64decode(facts["data"])})
