"""Damaged stores: whatever a file of the data directory suffers, no acknowledged version is lost without a word.

Young stores (the whole index in the log), old ones (most of it in the database) and closed ones suffer bit flips,
cuts, swaps with another store's file, deletions, and things that are no files, in database, log, journal, blobs, lock,
ballast and note. Then the store starts, or refuses; each version that was acknowledged is served whole or told as
damaged, also after collections without any grace; and `recover` brings back each whose manifest is there, after which
`check` is clean.
`python -m tests.cachestore.core.survival.damage_campaign --stores 500` is the long form.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import DataLoss, KvasirError, NotFound
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import Origin, RecoverReport, SnapshotVersion
from cachestore_svc.recovery.recovering import recover
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Chance, Lab, publish, upload
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent

OTHER_NS = "other"
DATABASE, LOG, JOURNAL, CLOSED = "kvasir.sqlite3", "kvasir.sqlite3-wal", "journal", "closed"
_FILES = (DATABASE, DATABASE, DATABASE, LOG, LOG, LOG, JOURNAL, JOURNAL, "blob", "blob", "lock", "ballast", CLOSED)
_SAY_RECOVER = ("INDEX_MISSING", "INDEX_BEHIND", "INDEX_FOREIGN", "INDEX_DAMAGED")


@dataclass(frozen=True)
class Template:
    """A store that was killed or closed, and all that it had acknowledged."""

    kind: str
    root: Path
    versions: dict[tuple[str, str, str, int], SnapshotVersion]
    labels: dict[tuple[str, str], dict[str, str]]


@dataclass
class Report:
    """What a campaign saw."""

    stores: int = 0
    started: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    told: int = 0  # versions answered with DATA_LOSS, or named by a recovery
    recovered: int = 0
    problems: list[str] = field(default_factory=list)


def make(root: Path, kind: str, seed: int) -> Template:
    """Turns of several agents in two namespaces, with all that else changes an index."""
    lab, chance = Lab(root / f"{kind}-{seed}-alive", chance=Chance(1000 * seed)), random.Random(seed)
    target = root / f"{kind}-{seed}"
    agents = {(NS, "ada"): MIXED, (NS, "bob"): SMALL, (OTHER_NS, "ada"): SMALL, (OTHER_NS, "eve"): SMALL}
    engines = {key: SyntheticAgent(identity, seed + n) for n, (key, identity) in enumerate(agents.items())}
    for _ in range(2 if kind == "young" else 3):
        with lab.open() as store:
            for _ in range(chance.randrange(2, 5)):
                for (namespace, name), engine in engines.items():
                    _turn(store, namespace, name, engine, chance)
            store.agents.roll_back(NS, "bob", store.snapshots.get(NS, "bob").version - 1)
            engines[NS, "bob"] = _recalled(store, "bob", seed)
            _forget_and_fork(store)
            store.agents.update(OTHER_NS, "eve", labels={f"l{chance.randrange(3)}": str(chance.random())})
            upload(store, SyntheticAgent(SMALL, 90 + chance.randrange(5)).turn(300))
            if kind != "closed":
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(lab.root, target)
            versions, labels = _acknowledged(store)
        if kind == "young":
            break
    if kind == "closed":
        shutil.copytree(lab.root, target)
    return Template(kind, target, versions, labels)


def _turn(store: Store, namespace: str, name: str, engine: SyntheticAgent, chance: random.Random) -> None:
    try:
        head = store.snapshots.get(namespace, name).version
    except NotFound:
        head = 0
    origin = Origin.IMPORT if name == "eve" and not head else Origin.TURN
    publish(store, name, engine.turn(chance.randrange(20, 400)), head, namespace, bind_shared=True, origin=origin)


def _recalled(store: Store, name: str, seed: int) -> SyntheticAgent:
    head = store.snapshots.get(NS, name)
    manifest = manifest_pb2.Manifest.FromString(bytes(store.blobs.read(NS, head.manifest)))
    return SyntheticAgent.remember(manifest, seed, head.version)


def _forget_and_fork(store: Store) -> None:
    for fork in ("fork", "gone"):
        with contextlib.suppress(NotFound):
            store.agents.delete(NS, fork)
        store.agents.fork(NS, "ada", fork)
    store.agents.delete(NS, "gone")


def _acknowledged(
    store: Store,
) -> tuple[dict[tuple[str, str, str, int], SnapshotVersion], dict[tuple[str, str], dict[str, str]]]:
    versions, labels = {}, {}
    for namespace in (NS, OTHER_NS):
        for agent in store.agents.page(namespace).agents:
            labels[namespace, agent.agent_id] = dict(agent.labels)
            for each in store.snapshots.page(namespace, agent.agent_id, page_size=1000).snapshots:
                versions[namespace, each.agent_id, each.kv_identity_hash, each.version] = each
    return versions, labels


# --- harms ---


def harm(root: Path, other: Path, chance: random.Random) -> tuple[str, Path]:
    """Do one thing to one file; what, and to which."""
    name = chance.choice(_FILES)
    paths = sorted(root.glob("namespaces/*/blobs/*/*")) if name == "blob" else [root / name]
    path = chance.choice([each for each in paths if each.exists()] or [root / DATABASE])
    how = chance.choice(_HOW)
    theirs = other / path.relative_to(root)
    if name == "blob":
        theirs = chance.choice(sorted(other.glob("namespaces/*/blobs/*/*")))
    how(path, theirs, chance)
    if path.name == DATABASE and how in (_remove, _swap) and chance.random() < 0.5:
        # The whole database, with its log.
        how(root / LOG, other / LOG, chance)
    return how.__name__, path


def _flip(path: Path, _: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _bit in range(chance.choice((1, 1, 1, 8)) if data else 0):
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _cut(path: Path, _: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


def _swap(path: Path, theirs: Path, _: random.Random) -> None:
    path.unlink(missing_ok=True)
    if theirs.is_file():
        shutil.copy(theirs, path)


def _remove(path: Path, _: Path, __: random.Random) -> None:
    path.unlink(missing_ok=True)


def _pipe(path: Path, _: Path, __: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path, _: Path, __: random.Random) -> None:
    path.unlink()
    path.mkdir()


_HOW: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    *(_flip, _flip, _flip, _cut, _cut, _swap, _swap, _remove, _pipe, _directory),
)


# --- what then ---


class Damaged:
    """One damaged copy of a template, and what came of it."""

    def __init__(self, template: Template, root: Path, what: str, path: Path, report: Report) -> None:
        self.template = template
        self.lab = Lab(root, chance=Chance(random.Random(str(root)).randrange(1 << 30)))
        self.is_blob = "namespaces" in path.parts
        self.harmed = {path.name} if self.is_blob else set[str]()
        self.path = path
        self.what = f"{template.kind}: {what} of {path.name}"
        self.report = report

    def run(self, recovers: bool) -> Iterator[str]:
        """Problems, in words."""
        is_sound = False
        try:
            with self.lab.open(grace_period_s=0.0) as store:
                self.report.started += 1
                is_sound = True
                for step in ("at start", "after collection"):
                    for problem, is_told in self._compare(store, set()):
                        is_sound &= not is_told or self.is_blob
                        if problem:
                            yield f"{step}: {problem}"
                    store.care.collect_garbage()
                if is_sound and (found := list(self._check(store))):
                    # Rows that hold no memory (schemas, block hashes) are looked at by `check` alone, which tells them.
                    is_sound = False
                    if not self.path.name.startswith(DATABASE):
                        yield from found
        except KvasirError as refused:
            self.report.refused[refused.reason] += 1
            if refused.reason in _SAY_RECOVER and "kvasir store recover" not in refused.message:
                yield f"a refusal that does not say what to do: {refused.message}"
        if self.path.name == "lock" and not self.path.is_file() and self.path.exists():
            _sweep_away(self.path)
        if recovers or not is_sound:
            yield from self._recover()

    def _recover(self) -> Iterator[str]:
        report = recover(self.lab.config(), self.lab.means(), [OTHER_NS], lambda *_: None)
        self.report.recovered += 1
        lost = set(self._lost(report))
        for key in lost:
            manifest = self.template.versions.get(key)
            if manifest is None or manifest.manifest.hash not in self.harmed:
                yield f"recover lost {key}, whose manifest is there"
        with self.lab.open(grace_period_s=0.0) as store:
            for step in ("after recovery", "and a collection"):
                for problem, _ in self._compare(store, lost):
                    if problem:
                        yield f"{step}: {problem}"
                store.care.collect_garbage()
            yield from self._check(store)

    def _lost(self, report: RecoverReport) -> Iterator[tuple[str, str, str, int]]:
        for space in report.namespaces:
            for each in space.lost:
                self.report.told += 1
                yield space.namespace, each.agent_id, each.kv_identity_hash, each.version

    def _check(self, store: Store) -> Iterator[str]:
        for finding in store.care.check().findings:
            if finding.detail[:64] not in self.harmed:
                yield f"check: {finding}"

    def _compare(self, store: Store, lost: set[tuple[str, str, str, int]]) -> Iterator[tuple[str, bool]]:
        """What is wrong ("" if nothing), and whether damage was told, for each version and agent."""
        for key, expected in self.template.versions.items():
            if key in lost:
                continue
            try:
                yield self._read(store, key[0], expected), False
            except DataLoss as told:
                self.report.told += 1
                digest = told.metadata.get("digest")
                is_theirs = digest is None or digest in self.harmed
                yield ("" if is_theirs else f"{key}: {told.message}, and nobody harmed that"), True
            except KvasirError as error:
                yield f"{key}: {error.reason} {error.message}", False
        for (namespace, name), labels in self.template.labels.items():
            try:
                if dict(store.agents.get(namespace, name).labels) != labels:
                    yield f"{name} of {namespace}: its labels are others", False
            except DataLoss:
                yield "", True
            except NotFound:
                if not any(key[:2] == (namespace, name) for key in lost):
                    yield f"{name} of {namespace} is gone", False
        yield from self._compare_names(store)

    def _compare_names(self, store: Store) -> Iterator[tuple[str, bool]]:
        for namespace in (NS, OTHER_NS):
            try:
                names = {agent.agent_id for agent in store.agents.page(namespace).agents}
            except DataLoss:
                continue
            if strange := {name for name in names if (namespace, name) not in self.template.labels}:
                yield f"agents of {namespace} that were never made: {strange}", False

    def _read(self, store: Store, namespace: str, expected: SnapshotVersion) -> str:
        name, kv_hash, version = expected.agent_id, expected.kv_identity_hash, expected.version
        found = store.snapshots.get(namespace, name, kv_hash, version)
        if found != expected:
            return f"version {version} of {name} is another: {found}, not {expected}"
        manifest = manifest_pb2.Manifest.FromString(bytes(store.blobs.read(namespace, found.manifest)))
        named = [*manifest.blocks, *([manifest.tail] if manifest.HasField("tail") else [])]
        for digest in [*named, *(state.digest for state in manifest.states)]:
            store.blobs.read(namespace, Digest.from_proto(digest))
        return ""


def _sweep_away(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()


def campaign(root: Path, stores: int, seed: int = 0, of_each_kind: int = 2) -> Report:
    """Damage so many stores, each in one way; copies of so many young, old and closed ones."""
    root.mkdir(parents=True, exist_ok=True)
    chance, report = random.Random(seed), Report()
    # A seed of its own for each: two stores never have one name.
    kinds = enumerate(("young", "old", "closed") * of_each_kind)
    templates = [make(root, kind, seed * 10 + number) for number, kind in kinds]
    for number in range(stores):
        template = templates[number % len(templates)]
        other = chance.choice([each for each in templates if each is not template])
        target = root / f"damaged-{number}"
        shutil.copytree(template.root, target)
        what, path = harm(target, other.root, chance)
        case = Damaged(template, target, what, path, report)
        try:
            report.problems += [f"{number} {case.what}: {problem}" for problem in case.run(chance.random() < 0.3)]
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
            report.problems.append(f"{number} {case.what}: {type(error).__name__}: {error}")
        report.stores += 1
        shutil.rmtree(target)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="where to do it; memory (/dev/shm) shows the same")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        began = time.monotonic()
        report = campaign(Path(directory) / "stores", arguments.stores, arguments.seed)
    print(f"{report} in {time.monotonic() - began:.0f} s")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
