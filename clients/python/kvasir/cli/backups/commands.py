"""`kvasir backup` and `kvasir restore`: a home as of a moment, whether it runs or not, and a new home made of that."""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kvasir.cli.backups.folder import LIST, LOCK, BackupFolder, Files, Kept
from kvasir.cli.backups.last import FILE, last_folder, note_last
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS
from kvasir.cli.rows import counted, size
from kvasir.cli.running.checks import check_installed
from kvasir.cli.running.home import Home
from kvasir.cli.running.program import done
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.reported import Progress, ProgressOption
from kvasir.errors import DataLoss, FailedPrecondition, NotFound, Unavailable
from kvasir.syncing import Scratch, sync_directory, sync_disk_of

# Of a home: what only a running group needs, what was logged, where backups lie, and what opens sealed namespaces; and
# the engine's name for leases, which no copy may have, and this machine's speed.
_OF_THIS_ENGINE = ("engine/lease-owner", "engine/restore-costs.json", "engine/restore-costs.json.new")
_LEFT_OUT = ("run", "logs", "audit", "prove", "store", "seal.key", *_OF_THIS_ENGINE, FILE, f"{FILE}.new")
# A private file that a kill left before it had its name: the master key, too, begins so.
_NAMELESS = re.compile(r"(.*/)?\.[^/]+\.new")
# Of the store: its blobs, whose names never change their bytes; the records of keys; the marks of sealed namespaces.
_BLOB = re.compile(r"store/namespaces/[0-9a-f]{32}/blobs/[0-9a-f]{2}/([0-9a-f]{64})")
_OF_STORE = re.compile(rf"{_BLOB.pattern}|store/keys/[0-9a-f]{{32}}(\.copy)?|store/namespaces/[0-9a-f]{{32}}/sealed")
_INDEX = "store/kvasir.sqlite3"
# What makes a home the one that its peers know.
_KEY, _PEERS = _IDENTITY = ("identity.pem", "peers.toml")
_TRIES = 5
_RESTORING = ".restoring-"  # behind the name of a home that is not whole yet


def backup(
    caller: Caller,
    folder: Annotated[
        Path | None, argument("The backup's folder. Default: the folder of the last backup.", "DIR")
    ] = None,
    progress: ProgressOption = False,
) -> None:
    """Back up this home into a folder, while it runs or not: all stored memories, tokens, peers, settings.

    The next backup into the same folder copies only new files; `kvasir status` names the last backup. Keep it as secret
    as the home. It lacks the master key of sealed namespaces (seal.key), which stay sealed; logs and audits; and turns
    that are not stored yet (`kvasir status`). Ends with 1 if files of the store are damaged: it leaves them out, and
    `kvasir store scrub` reports them. It copies files of sealed namespaces without a check."""
    check_installed("store")
    home = caller.home
    folder = (folder or last_folder(home)).expanduser().absolute()
    if (home.store_data / "catalog").exists():
        text = "the index of this store is in PostgreSQL: copy the database by pg_dump, and then the data directory"
        raise FailedPrecondition(text, reason="BACKUP_REFUSED")
    if (home.store_data / "bucket").exists():
        text = "the blobs of this store lie in a bucket, and would not be in the backup: run kvasir agents export"
        raise FailedPrecondition(text, reason="BACKUP_REFUSED")
    if not (home.root / _INDEX).is_file():
        raise NotFound(f"no store in {home.store_data}", reason="NO_STORE")
    if folder.resolve().is_relative_to(home.root.resolve()):
        raise FailedPrecondition(f"{folder}: expected a folder outside {home.root}", reason="BACKUP_REFUSED")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}  # .DS_Store
    strange = names - {f"{LIST}.new", LOCK, "objects"}
    if strange and LIST not in strange:
        text = f"{folder}: expected an empty folder or a backup, found {min(strange)}"
        raise FailedPrecondition(text, reason="BACKUP_REFUSED")
    with BackupFolder.open(folder) as target, caller.busy("copying"):
        run = _Run(home, target, *target.newest(), Progress(caller if progress else None))
        files = run.files()
        removed_bytes = target.finish(files)
    all_bytes = sum({kept.hash: kept.size_bytes for kept in files.values()}.values())
    value = {"folder": str(folder), "files": len(files), "bytes": all_bytes, "copied_bytes": run.copied_bytes}
    value |= {"removed_bytes": removed_bytes, "damaged": sorted(run.damaged), "links": (links := run.links())}
    with contextlib.suppress(OSError):  # a full disk: the backup is whole
        note_last(home, value)
    text = f"{folder}: {counted(len(files), 'file')}, {size(all_bytes)}; {size(run.copied_bytes)} copied now"
    text += f"; left out: {counted(len(run.damaged), 'damaged file')}" if run.damaged else ""
    text += f"; links are left out: {', '.join(links)}" if links else ""
    caller.result(value, text)
    if (home.sealed_file).exists():
        caller.say(f"Sealed namespaces stay sealed: keep a copy of the master key elsewhere ({home.seal_key_file}).")
    if run.damaged:
        raise typer.Exit(PROBLEMS)


def restore(
    caller: Caller,
    folder: Annotated[Path, argument("The backup's folder.", "DIR")],
    partial: Annotated[bool, option("Leave out damaged files, restore the rest, and end with 1.", "--partial")] = False,
    new_identity: Annotated[
        bool,
        option(
            "Give this home an identity of its own, paired with no Mac: for when the old home continues.",
            "--new-identity",
        ),
    ] = False,
) -> None:
    """Make a new home from a backup: `kvasir --home NEW restore DIR`. Every file is checked before the home appears.

    Agents continue from the time of the backup. An agent that moved to another Mac after that exists twice: delete it
    here or there. Peers take the new home for the old one, unless --new-identity is given."""
    check_installed("store")
    home, folder = caller.home, folder.expanduser().absolute()
    if home.root.is_symlink() or (home.root.exists() and (not home.root.is_dir() or any(home.root.iterdir()))):
        text = f"{home.root} is there already: name a new home, `kvasir --home NEW restore …`, or move that one away"
        raise FailedPrecondition(text, reason="HOME_REFUSED")
    home.root.parent.mkdir(parents=True, exist_ok=True)
    # Beside the home that it becomes. The rest of a killed restore goes: it is as secret as the home, and as large.
    with Scratch(f".{home.root.name}{_RESTORING}", home.root.parent) as new:
        with BackupFolder.open(folder) as source, caller.busy("copying"):
            files = {name: kept for name, kept in source.files().items() if not (new_identity and name in _IDENTITY)}
            missing = _write(source, files, new, partial)
        if _KEY in missing and _PEERS in files.keys() - missing:  # with peers and no key no store would start
            del files[_PEERS]
            (new / _PEERS).unlink()
        sync_disk_of(new)
        new.rename(home.root)
    sync_directory(home.root.parent)
    report = _adopted(home) if _INDEX not in missing else None
    value = {"home": str(home.root), "files": len(files) - len(missing), "missing": sorted(missing), "store": report}
    caller.result(value, _restored_words(value))
    _print_next_step(caller, files, missing)
    if missing or report is None or report["findings"]:
        raise typer.Exit(PROBLEMS)


def _restored_words(value: dict[str, Any]) -> str:
    report, missing = value["store"], value["missing"]
    words = f"{value['home']}: {counted(value['files'], 'file')}"
    if report is not None:
        found = (counted(report["snapshots"], "version"), counted(report["blobs"], "blob"))
        words += f"; the store has {', '.join(found)}, {counted(len(report['findings']), 'finding')}"
    return "\n".join([words, *(f"  missing, as it is damaged in the backup: {name}" for name in missing)])


def _print_next_step(caller: Caller, files: Files, missing: Collection[str]) -> None:
    home = caller.home
    if _INDEX in missing:
        caller.say(f"The store's index is missing: `{home.command('store recover')}` makes it of the files.")
    if _KEY in missing:
        caller.say("It is another Mac to its peers, as its key is missing: pair it again.")
    elif _KEY in files:
        caller.say(
            "It has the identity of the home that was backed up, and its peers take it for that one. If that home goes "
            "on, remove this one, and restore with --new-identity."
        )
    if home.sealed_file.exists():
        caller.say(f"Its sealed namespaces need the master key: put it at {home.seal_key_file} (0600).")
    if _INDEX not in missing:
        caller.say(f"`{home.command('up -d')}` starts it.")


@dataclass
class _Run:
    home: Home
    target: BackupFolder
    known: Files  # of the backup before
    known_ns: int  # when that was made
    progress: Progress
    copied: dict[str, Kept] = field(default_factory=dict)  # blobs
    copied_bytes: int = 0
    damaged: set[str] = field(default_factory=set)

    def files(self) -> Files:
        """All files, copied. Raises Unavailable if the store goes on removing what is to be copied."""
        others = {}
        self.progress.total = sum(map(self._size, (*self._others(), *self._of_store(), _INDEX)))
        for name in self._others():
            with contextlib.suppress(FileNotFoundError):  # replaced, removed
                others[name] = self._add(self.home.root / name)
        for _ in range(_TRIES):
            try:
                return {**others, **self._store()}
            except FileNotFoundError:  # collected, replaced: the next copy of the index does not name it
                continue
        raise Unavailable("the store removes files faster than they are copied; try again", reason="STORE_BUSY")

    def _store(self) -> dict[str, Kept]:
        """The index as of a commit, and all blobs that were there before and after it was copied."""
        before = set(self._of_store())
        with Scratch("kvasir-index-") as scratch:
            index = scratch / "index"
            ended = done(
                "cachestore_svc", ["copy-index", "--data-dir", str(self.home.store_data), "--into", str(index)]
            )
            if ended.code:
                raise FailedPrecondition(ended.why, reason="CANNOT_COPY_INDEX")
            found = {_INDEX: self._add(index)}
        for name in sorted(before | set(self._of_store())):
            kept = self._kept(name)
            if self._is_whole(name, kept):
                found[name] = kept
            else:
                self.damaged.add(name)
        return found

    def _kept(self, name: str) -> Kept:
        """A blob that an earlier backup has is not read again, unless it was written again since, as after damage."""
        known, source = self.known.get(name), self.home.root / name
        if _BLOB.fullmatch(name) is None:
            return self._add(source)
        if known is not None and self.target.has(known):
            status = source.stat()
            if status.st_size == known.size_bytes and status.st_mtime_ns < self.known_ns:
                self.progress.add(known.size_bytes)
                return known
        if name not in self.copied:  # by an earlier try
            self.copied[name] = self._add(source)
        return self.copied[name]

    def _add(self, source: Path) -> Kept:
        kept = self.target.add(source)
        self.copied_bytes += kept.size_bytes
        self.progress.add(kept.size_bytes)
        return kept

    def _size(self, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.home.root / name).stat().st_size
        return 0

    def _is_whole(self, name: str, kept: Kept) -> bool:
        """Whether a blob's bytes are its name's; those of sealed ones have another digest."""
        blob = _BLOB.fullmatch(name)
        is_sealed = (self.home.root / name).parents[2].joinpath("sealed").exists()
        return blob is None or is_sealed or blob[1] == kept.hash

    def links(self) -> list[str]:
        """Those of the home, which are not followed."""
        return sorted(filter(_is_taken, _names(self.home.root, self.home.root, Path.is_symlink)))

    def _of_store(self) -> Iterator[str]:
        for each in ("namespaces", "keys"):  # either may lie on another disk, behind a link
            yield from filter(_OF_STORE.fullmatch, _names(self.home.root, self.home.store_data / each))

    def _others(self) -> Iterator[str]:
        return filter(_is_taken, _names(self.home.root, self.home.root))


def _is_taken(name: str) -> bool:
    is_left_out = any(name == each or name.startswith(f"{each}/") for each in _LEFT_OUT)
    return not is_left_out and _NAMELESS.fullmatch(name) is None


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _names(root: Path, below: Path, is_wanted: Callable[[Path], bool] = _is_regular) -> Iterator[str]:
    """Paths, relative to `root`. Links are not followed."""
    for folder, folders, names in os.walk(below):
        for path in (Path(folder, name) for name in (*folders, *names)):
            if is_wanted(path):
                yield path.relative_to(root).as_posix()


def _write(source: BackupFolder, files: Files, new: Path, partial: bool) -> list[str]:
    """Returns the files whose objects are damaged, which are left out. Raises DataLoss that names the objects, unless
    a part is enough."""
    problems = {}
    for name, kept in files.items():
        target = new / name
        for folder in reversed(target.relative_to(new).parents):
            (new / folder).mkdir(mode=0o700, exist_ok=True)
        try:
            source.copy(kept, target)
        except DataLoss as error:
            target.unlink()
            problems[name] = error
    if problems and not partial:
        first, *others = problems.values()
        named = {"damaged": "\n".join(error.message for error in problems.values())}
        more = f" (and {counted(len(others), 'more file')})" if others else ""
        text = f"{first.message}{more}; `kvasir restore --partial` restores the rest"
        raise DataLoss(text, reason=first.reason, metadata=named)
    return list(problems)


def _adopted(home: Home) -> dict[str, Any]:
    """The store's own check of what came. What last ran at this place may be newer: it is replaced on purpose, and
    leases of its engines end."""
    words = ["check", "--repair", "--accept-older", "--json", "--data-dir", str(home.store_data)]
    ended = done("cachestore_svc", [*words, *home.seal_options(), *home.sealed_options()])
    if not ended.out:
        raise FailedPrecondition(f"{home.root}: {ended.why}", reason="CANNOT_CHECK")
    found: dict[str, Any] = ended.value
    return found
