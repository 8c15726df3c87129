"""kill -9 at every fsync, rename, write and commit: what was acknowledged is there, whole, and unmixed.

A child opens the store and plays engines on two threads while a third collects garbage without any grace. It tells a
pipe what it is about to do and what was acknowledged, and dies: at a chosen effect of the disk, or, to hit SQLite in
the middle of a commit, at a moment that the parent chooses. The parent opens the same directory and compares it with
what it was told. `python -m tests.cachestore.core.survival.kill_campaign --kills 2000` is the long form.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import FailedPrecondition, KvasirError, NotFound

from cachestore_svc.blobs.known_manifests import KnownManifests
from cachestore_svc.index.sqlite import versions
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, hand_all, publish, snapshot_digests
from tests.cachestore.core.survival.dying_disk import DyingDisk
from tests.cachestore.sealing.canaries import files_with
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent

RETAINED = 3
OTHER_NS = "other"
AGENTS = ((NS, "huginn"), (OTHER_NS, "huginn"))
# In every plain index, journal and tensor file.
CANARIES = (b"huginn", b"__metadata__")
SETTINGS = {"retained_versions": RETAINED, "grace_period_s": 0.0}
_TURNS_PER_LIFE = 4


@dataclass
class Told:
    """What the child acknowledged, per namespace and agent: version -> manifest hash. And what it began."""

    acknowledged: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    began: dict[tuple[str, str], str] = field(default_factory=dict)

    def keys_of(self, namespace: str) -> list[tuple[str, str]]:
        return sorted(key for key in {*self.acknowledged, *self.began} if key[0] == namespace)

    def hear(self, line: str) -> None:
        say, namespace, agent, *rest = json.loads(line)
        key = (namespace, agent)
        if say == "begin":
            self.began[key] = rest[0]
            return
        self.began.pop(key, None)
        if say == "deleted":
            self.acknowledged.pop(key, None)
        else:
            self.acknowledged.setdefault(key, {})[rest[0]] = rest[1]


@dataclass
class Report:
    """What a campaign saw."""

    kills: int = 0
    ended_alive: int = 0
    acknowledged: int = 0
    effects_per_life: int = 0
    differences_per_life: int = 0  # commits that looked up new blobs alone
    problems: list[str] = field(default_factory=list)


class Engine:
    """One engine of the child: goes on with its agent, forks it, rolls it back, forgets the fork."""

    def __init__(self, lab: Lab, store: Store, say: int, namespace: str, name: str, seed: int) -> None:
        self._lab, self._store, self._say, self._namespace, self._name = lab, store, say, namespace, name
        self._chance = random.Random(seed)

    def live(self) -> None:
        """A store that fails on this thread fails the child."""
        try:
            self._live()
        except BaseException:  # noqa: BLE001  whatever it is, the child has failed
            traceback.print_exc()
            os._exit(1)

    def _live(self) -> None:
        fork = f"{self._name}-fork"
        for _ in range(_TURNS_PER_LIFE):
            self._turn(self._name)
        with contextlib.suppress(NotFound):
            self._tell("begin", fork, "delete")
            self._store.agents.delete(self._namespace, fork)
            self._tell("deleted", fork)
        self._tell("begin", fork, "fork")
        made = self._store.agents.fork(self._namespace, self._name, fork).lines[0]
        self._tell("kept", fork, made.version, made.manifest.hash)
        self._turn(fork)
        self._tell("begin", self._name, "rollback")
        head = self._store.snapshots.get(self._namespace, self._name).version
        back = self._store.agents.roll_back(self._namespace, self._name, head - 1)
        self._tell("kept", self._name, back.version, back.manifest.hash)

    def _turn(self, name: str) -> None:
        version, agent = self._recall(name)
        if len(agent.token_ids) > 1500:
            agent.trim(256 * self._chance.randrange(4) + 30)
        snapshot = agent.turn(self._chance.randrange(20, 400))
        self._tell("begin", name, "turn")
        while True:
            try:
                if self._chance.random() < 0.5:  # as files, and the manifest with them; the rest is sent
                    hand_all(self._lab, self._store, snapshot, self._namespace)
                done = publish(self._store, name, snapshot, version, self._namespace)
            except FailedPrecondition as error:
                # Collected before it was committed: a clean failure, and the next try writes what is gone.
                if error.reason != "BLOB_MISSING":
                    raise
            else:
                break
        self._tell("kept", name, done.version, done.manifest.hash)

    def _recall(self, name: str) -> tuple[int, SyntheticAgent]:
        try:
            head = self._store.snapshots.get(self._namespace, name)
        except NotFound:
            identity = MIXED if self._chance.random() < 0.5 else SMALL
            return 0, SyntheticAgent(identity, self._chance.randrange(1 << 30))
        data = self._store.blobs.read(self._namespace, head.manifest)
        manifest = manifest_pb2.Manifest.FromString(bytes(data))
        agent = SyntheticAgent.remember(manifest, self._chance.randrange(1 << 30), head.version)
        agent.parent_manifest = head.manifest.hash
        return head.version, agent

    def _tell(self, *words: object) -> None:
        # Shorter than PIPE_BUF, so lines of two threads never mix.
        os.write(self._say, json.dumps([words[0], self._namespace, *words[1:]]).encode() + b"\n")


def live(lab: Lab, say: int, disk: DyingDisk, seed: int) -> int:
    """The child's life: open, work on two threads, collect on a third, close. Its commits by difference."""
    known_part, found = versions.known_part, list[versions.KnownPart]()

    def noted(*about: Any) -> versions.KnownPart:
        found.append(known_part(*about))
        return found[-1]

    versions.known_part = noted
    with lab.open(disk, **SETTINGS) as store:
        store.snapshots._manifests = KnownManifests(0)  # else it knows long ones alone
        engines = [
            Engine(lab, store, say, namespace, name, seed + index) for index, (namespace, name) in enumerate(AGENTS)
        ]
        threads = [threading.Thread(target=engine.live) for engine in engines]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            store.care.collect_garbage()
            time.sleep(0.005)
    return sum(each.length > 0 for each in found)


def one_life(lab: Lab, told: Told, seed: int, death: int, kill_after_s: float | None) -> tuple[tuple[int, int], bool]:
    """Fork a child and let it die. Its effects and commits by difference, if it told; whether it ended by itself."""
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(hear)
            disk = DyingDisk(death)
            differences = live(lab, say, disk, seed)
            os.write(say, json.dumps(["effects", disk.effects, differences]).encode() + b"\n")
            code = 0
        finally:
            os._exit(code)
    os.close(say)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    effects = differences = 0
    with os.fdopen(hear) as lines:
        for line in lines:
            if line.startswith('["effects"'):
                _, effects, differences = json.loads(line)
            elif line.endswith("\n"):
                told.hear(line)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the child failed by itself, as {os.waitstatus_to_exitcode(status)}; see above")
    return (effects, differences), os.WIFEXITED(status)


def compare(lab: Lab, told: Told) -> Iterator[str]:
    """What is wrong with the directory, given what the child told. Afterwards `told` is what is there."""
    if lab.sealed:
        yield from (f"{name} holds plain bytes" for name in files_with(lab.root, CANARIES))
    with lab.open(**SETTINGS) as store:
        for finding in store.care.check().findings:
            yield f"check: {finding}"
        for progress in store.care.scrub():
            yield from (f"scrub: {digest} is damaged" for digest in progress.damaged)
        for namespace in (NS, OTHER_NS):
            for key in told.keys_of(namespace):
                yield from _compare_agent(store, told, key)
            there = {agent.agent_id for agent in store.agents.page(namespace).agents}
            known = {name for space, name in told.acknowledged if space == namespace}
            if there != known:
                yield f"agents of {namespace}: {there} are there, {known} were told"
    told.began.clear()


def _compare_agent(store: Store, told: Told, key: tuple[str, str]) -> Iterator[str]:
    namespace, name = key
    expected, began = told.acknowledged.get(key, {}), told.began.get(key)
    try:
        page = store.snapshots.page(namespace, name)
    except NotFound:
        if expected and began != "delete":
            yield f"{key}: versions {sorted(expected)} were acknowledged, the agent is gone"
        told.acknowledged.pop(key, None)
        return
    found = {snapshot.version: snapshot for snapshot in page.snapshots}
    head, told_head = max(found), max(expected, default=0)
    if head not in ((told_head, told_head + 1) if began else (told_head,)):
        yield f"{key}: head is {head}, {told_head} was acknowledged, {began} had begun"
    if sorted(found) != list(range(max(1, head - RETAINED + 1), head + 1)):
        yield f"{key}: versions {sorted(found)} are kept of {head}"
    for version, manifest in expected.items():
        if version in found and found[version].manifest.hash != manifest:
            yield f"{key}: version {version} is another"
    for snapshot in found.values():
        try:
            store.blobs.read(namespace, snapshot.manifest)
            kv_hash = snapshot.kv_identity_hash
            for digest in snapshot_digests(store, namespace, name, kv_hash, snapshot.version):
                store.blobs.read(namespace, digest)
        except KvasirError as error:
            yield f"{key}: version {snapshot.version} cannot be read: {error}"
    told.acknowledged[key] = {version: snapshot.manifest.hash for version, snapshot in found.items()}


def campaign(root: Path, kills: int, seed: int = 0, *, is_sealed: bool = False) -> Report:
    """Kill so many times on one directory. Every other round dies at the next effect in turn, every fourth at a random
    effect, every fourth at a random moment."""
    lab, told, report, chance = Lab(root), Told(), Report(), random.Random(seed)
    if is_sealed:
        lab.seal(NS, OTHER_NS)
    for _ in range(2):  # the first makes the store's directories, which no later one does
        began = time.monotonic()
        (report.effects_per_life, report.differences_per_life), _ = one_life(lab, told, seed, 0, None)
        life_s = time.monotonic() - began
        report.problems += compare(lab, told)
    turn = 0
    while report.kills < kills and not report.problems:
        turn += 1
        death, kill_after_s = chance.randrange(1, report.effects_per_life), None
        if turn % 4 == 0:
            death, kill_after_s = 0, chance.random() * life_s
        elif turn % 2:
            # A step that shares no factor with the number of effects visits each of them.
            death = turn // 2 * 37 % report.effects_per_life + 1
        before = {key: max(versions) for key, versions in told.acknowledged.items()}
        _, is_alive = one_life(lab, told, seed + 1000 * turn, death, kill_after_s)
        report.ended_alive += is_alive
        report.kills += not is_alive
        report.acknowledged += sum(
            max(versions) - before.get(key, 0) for key, versions in told.acknowledged.items() if versions
        )
        report.problems += [f"life {turn} (death {death}, {kill_after_s}): {problem}" for problem in compare(lab, told)]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sealed", action="store_true", help="both namespaces are sealed")
    parser.add_argument("--directory", help="where to do it; a kill shows the same in memory (/dev/shm)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        began = time.monotonic()
        report = campaign(Path(root) / "data", arguments.kills, arguments.seed, is_sealed=arguments.sealed)
    print(f"{report} in {time.monotonic() - began:.0f} s")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
