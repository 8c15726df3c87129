"""A disk that remembers what it was asked, and the directories that a loss of power could leave of it.

kill -9 keeps the page cache; a loss of power does not. The model is the weakest that a file system may be: bytes are
durable only after fsync of their file, names only after fsync of their directory, and of what was not synced any
subset may have happened. SQLite's own commits are taken as durable: each is copied when it returns.
"""

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvasir.formats.blob_place import HANDED

from cachestore_svc.blobs.disk import Disk, StrPath

DATABASE_FILES = ("kvasir.sqlite3", "kvasir.sqlite3-wal")
ROOT = 1
Fate = Literal["lost", "kept", "mixed"]


@dataclass(frozen=True)
class Effect:
    """One thing that happened. `file` is a file's or directory's own number, or a commit's."""

    what: str
    path: Path = Path()
    target: Path = Path()
    file: int = 0
    data: bytes = b""
    size: int = 0


@dataclass
class RecordingDisk(Disk):
    """The real disk under `root`, with a log of effects."""

    root: Path
    copies: Path
    log: list[Effect] = field(default_factory=list)
    commits: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)  # inode -> number of the file that has it now

    def __post_init__(self) -> None:
        self._numbers[self.root.stat().st_ino] = ROOT

    def number(self, status: os.stat_result, *, is_new: bool = False) -> int:
        # A file system uses inodes again; numbers are never.
        if is_new:
            self._numbers[status.st_ino] = len(self.log) + ROOT + 1
        return self._numbers[status.st_ino]

    def open_append(self, path: StrPath) -> int:
        is_new = not Path(path).exists()
        descriptor = super().open_append(path)
        number = self.number(os.fstat(descriptor), is_new=is_new)
        if is_new:
            self.log.append(Effect("name", Path(path), file=number))
        return descriptor

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        super().write(descriptor, data)
        self.log.append(Effect("write", file=self.number(os.fstat(descriptor)), data=bytes(data)))

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        super().truncate(descriptor, size_bytes)
        self.log.append(Effect("truncate", file=self.number(os.fstat(descriptor)), size=size_bytes))

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        status = os.fstat(descriptor)
        # What lies above the root is no part of the model.
        if status.st_ino != self.root.parent.stat().st_ino:
            self.log.append(Effect("fsync", file=self.number(status)))

    def add_directory(self, path: Path) -> None:
        super().add_directory(path)
        self.log.append(Effect("directory", path, file=self.number(path.stat(), is_new=True)))

    def rename(self, from_: StrPath, to: StrPath) -> None:
        source, target = Path(from_), Path(to)
        if source.parent.name == HANDED:  # written by another process, of which nothing was synced
            number = self.number(source.stat(), is_new=True)
            self.log.append(Effect("name", source, file=number))
            self.log.append(Effect("write", file=number, data=source.read_bytes()))
        super().rename(source, target)
        self.log.append(Effect("rename", source, target))

    def remove(self, path: StrPath) -> None:
        is_there = Path(path).exists()
        super().remove(path)
        if is_there:
            self.log.append(Effect("remove", Path(path)))

    def reached(self, point: str) -> None:
        if point == "index: after commit":
            self.commits += 1
            copy = self.copies / str(self.commits)
            copy.mkdir(parents=True)
            for name in DATABASE_FILES:
                shutil.copy(self.root / name, copy / name)
            self.log.append(Effect("commit", file=self.commits))


@dataclass
class _File:
    durable: bytes = b""
    volatile: list[Effect] = field(default_factory=list)

    def after(self, fate: Fate, chance: random.Random) -> bytes:
        """Its bytes after the loss: of what was not synced nothing, all, or some first writes, the last one torn."""
        kept = {"lost": 0, "kept": len(self.volatile), "mixed": chance.randint(0, len(self.volatile))}[fate]
        data = _applied(self.durable, self.volatile[:kept])
        is_torn = fate == "mixed" and kept > 0 and len(data) > len(self.durable)
        return data[: chance.randint(len(self.durable), len(data))] if is_torn else data


def _applied(data: bytes, effects: list[Effect]) -> bytes:
    for effect in effects:
        data = data[: effect.size] if effect.what == "truncate" else data + effect.data
    return data


class Crash:
    """What the log's first effects left, and what a loss of power may make of it."""

    def __init__(self, root: Path, log: list[Effect]) -> None:
        self._root = root
        self._files: dict[int, _File] = {}
        self._names: dict[Path, dict[str, int]] = {}  # durable names, per directory
        self._pending: dict[Path, list[Effect]] = {}  # names that were not synced
        self._current: dict[Path, int] = {}
        self._directories: dict[int, Path] = {ROOT: root}
        self.commit = 0
        for effect in log:
            self._follow(effect)

    def _follow(self, effect: Effect) -> None:
        match effect.what:
            case "name" | "directory":
                if effect.what == "name":
                    self._files[effect.file] = _File()
                else:
                    self._directories[effect.file] = effect.path
                self._current[effect.path] = effect.file
                self._pending.setdefault(effect.path.parent, []).append(effect)
            case "rename":
                file = self._current.pop(effect.path)
                self._current[effect.target] = file
                if effect.path.parent == effect.target.parent:
                    renamed = Effect("rename", effect.path, effect.target, file)
                    self._pending.setdefault(effect.path.parent, []).append(renamed)
                else:  # each directory keeps its own half, or loses it
                    self._pending.setdefault(effect.path.parent, []).append(Effect("remove", effect.path))
                    self._pending.setdefault(effect.target.parent, []).append(Effect("name", effect.target, file=file))
            case "remove":
                self._current.pop(effect.path, None)
                self._pending.setdefault(effect.path.parent, []).append(effect)
            case "write" | "truncate":
                self._files[effect.file].volatile.append(effect)
            case "fsync":
                self._sync(effect.file)
            case "commit":
                self.commit = effect.file

    def _sync(self, number: int) -> None:
        if number in self._directories:
            directory = self._directories[number]
            names = self._names.setdefault(directory, {})
            for effect in self._pending.pop(directory, []):
                _rename_in(names, effect)
        else:
            file = self._files[number]
            file.durable, file.volatile = _applied(file.durable, file.volatile), []

    def leave(self, target: Path, copies: Path, fate: Fate, chance: random.Random) -> bool:
        """Make the directory as the loss left it. False when not even the database was there yet."""
        if not self.commit:
            return False
        target.mkdir()
        for name in DATABASE_FILES:
            shutil.copy(copies / str(self.commit) / name, target / name)
        self._restore(self._root, target, fate, chance)
        return True

    def _restore(self, directory: Path, target: Path, fate: Fate, chance: random.Random) -> None:
        names = dict(self._names.get(directory, {}))
        for effect in self._pending.get(directory, []):
            if fate == "kept" or (fate == "mixed" and chance.random() < 0.5):
                _rename_in(names, effect)
        for name, number in names.items():
            if number in self._directories:
                (target / name).mkdir()
                self._restore(directory / name, target / name, fate, chance)
            elif name not in DATABASE_FILES:
                (target / name).write_bytes(self._files[number].after(fate, chance))


def _rename_in(names: dict[str, int], effect: Effect) -> None:
    if effect.what in ("name", "directory"):
        names[effect.path.name] = effect.file
    else:
        names.pop(effect.path.name, None)
        if effect.what == "rename":
            names[effect.target.name] = effect.file


def losses(disk: RecordingDisk, moments: list[int], seed: int) -> Iterator[tuple[int, Fate, Path]]:
    """Directories that a loss of power at these moments of the log may leave. Each is removed after its use."""
    chance = random.Random(seed)
    for moment in moments:
        crash = Crash(disk.root, disk.log[:moment])
        for fate in ("lost", "kept", "mixed"):
            target = disk.copies / f"after-{moment}-{fate}"
            if crash.leave(target, disk.copies, fate, chance):
                yield moment, fate, target
                shutil.rmtree(target)
