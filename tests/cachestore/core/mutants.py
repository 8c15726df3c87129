"""Breaks the store once per row, in a copy, and sees which test notices: `python -m tests.cachestore.core.mutants`.

Writes tests/cachestore/MUTANTS.md. A mutant that no test notices is a test that is missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cachestore.core.journal_mutants import JOURNAL_MUTANTS

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests/cachestore/MUTANTS.md"
_COPIED = ("cachestore_svc", "clients", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests to ask first."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "a blob's bytes are not synced before the rename",
        "blob_writer.py",
        "        self._disk.fsync(self._descriptor)\n",
        "",
        "power_loss",
    ),
    Mutant(
        "the directory is not synced after the rename",
        "blob_files.py",
        "        self._disk.fsync_directory(path.parent)\n",
        "",
        "power_loss",
    ),
    Mutant(
        "a new directory's own name is not synced",
        "disk.py",
        "        self.add_directory(path)\n        self.fsync_directory(path.parent)\n",
        "        self.add_directory(path)\n",
        "power_loss",
    ),
    Mutant(
        "no rename: a blob is written under its final name",
        "blob_files.py",
        "return path.with_name(path.name + PART_SUFFIX)",
        "return path",
        "blobs",
    ),
    Mutant(
        "the rename is left out",
        "blob_files.py",
        "        self._disk.rename(self.part_path(namespace, hash_), path)\n",
        "",
        "blobs",
    ),
    Mutant(
        "the row is written before the rename",
        "blob_writer.py",
        "            self._files.publish(self.namespace, self.digest.hash)\n            try:\n"
        "                is_new = self._catalog.add(self.namespace, self.digest, facts)\n",
        "            is_new = self._catalog.add(self.namespace, self.digest, facts)\n            try:\n"
        "                self._files.publish(self.namespace, self.digest.hash)\n",
        "kill power_loss",
    ),
    Mutant(
        "a sweep removes bytes before it removes rows",
        "collecting.py",
        "        garbage.remove_rows(rows, [blob_id for blob_id, _ in batch])\n",
        "        [core.files.remove(namespace, digest.hash) for _, digest in batch]\n"
        "        garbage.remove_rows(rows, [blob_id for blob_id, _ in batch])\n",
        "kill power_loss",
    ),
    Mutant(
        "callers hear of success before COMMIT",
        "index.py",
        '            self._disk.reached("index: before commit")\n',
        "            [answer() for answer in answers]\n            answers = []\n"
        '            self._disk.reached("index: before commit")\n',
        "kill",
    ),
    Mutant(
        "SQLite does not sync its commits",
        "index.py",
        '"synchronous=FULL"',
        '"synchronous=OFF"',
        "care",
    ),
    Mutant(
        "a look-up by digest forgets the namespace",
        "blob_rows.py",
        "WHERE namespace_id = ? AND hash IN",
        "WHERE ? IS NOT NULL AND hash IN",
        "isolation",
    ),
    Mutant(
        "a look-up by block hash forgets the namespace",
        "committing.py",
        "WHERE prefixes.namespace_id = ? AND",
        "WHERE ? IS NOT NULL AND",
        "isolation",
    ),
    Mutant(
        "a look-up of an agent forgets the namespace",
        "agents.py",
        "FROM agents WHERE namespace_id = ? AND name = ?",
        "FROM agents WHERE ? IS NOT NULL AND name = ?",
        "isolation",
    ),
    Mutant(
        "compare-and-swap is left out",
        "committing.py",
        "    if head != asked.parent_version or",
        "    if",
        "commits",
    ),
    Mutant(
        "a repeated commit is not recognised",
        "committing.py",
        "    if line and (repeated :=",
        "    if line and False and (repeated :=",
        "commits",
    ),
    Mutant(
        "a fenced lease still commits",
        "committing.py",
        "    if asked.lease is not None:\n",
        "    if False:\n",
        "commits",
    ),
    Mutant(
        "a generation is not raised when a lease changes hands",
        "leases.py",
        "(is_others or found.is_released or begins_anew)",
        "(found.is_released or begins_anew)",
        "leases",
    ),
    Mutant(
        "what takes a memory back does not fence",
        "leases.py",
        "LeaseToken(found.token.owner, found.token.generation + 1)",
        "found.token",
        "leases",
    ),
    Mutant(
        "what takes a memory back does not wait",
        "leases.py",
        "            raise held_by(found.token.owner, left_s)\n        fenced",
        "            pass\n        fenced",
        "leases",
    ),
    Mutant(
        "leases go by the clock that can be set",
        "opening.py",
        "LiveLeases(steady)",
        "LiveLeases(clock)",
        "leases",
    ),
    Mutant(
        "a lease that ended is prolonged",
        "live_leases.py",
        "found.is_taken_back or found.ends <= self._steady()",
        "found.is_taken_back",
        "leases",
    ),
    Mutant(
        "a lease that is taken back is prolonged",
        "live_leases.py",
        "found.is_taken_back or found.ends <= self._steady()",
        "found.ends <= self._steady()",
        "leases",
    ),
    Mutant(
        "after a start no lease is known",
        "opening.py",
        "index.read(HOUSE, lambda rows: leases.load(rows, live))",
        "pass",
        "leases",
    ),
    Mutant(
        "a commit compares the number of its parent alone",
        "committing.py",
        " or not _is_parent(rows, line, asked)",
        "",
        "leases",
    ),
    Mutant(
        "the chain of a blob is not compared",
        "manifests.py",
        '("kind", "start", "tokens", "chain")',
        '("kind", "start", "tokens")',
        "commits",
    ),
    Mutant(
        "the KV identity of a blob is not compared",
        "manifests.py",
        "    if found.kv_identity_hash != facts.kv_identity_hash:\n",
        "    if False:\n",
        "commits",
    ),
    Mutant(
        "the tensors of a blob are not compared with the layout",
        "manifests.py",
        'return None if is_right else "tensors: not those of the layout"',
        "return None",
        "commits",
    ),
    Mutant(
        "the tensors of a state are not compared with the layout",
        "manifests.py",
        'return None if is_right else f"tensors: not those of a state',
        'return None if self else f"tensors: not those of a state',
        "commits",
    ),
    Mutant(
        "generated blocks are shared, too",
        "store.py",
        "facts.token_ids[: facts.shareable_blocks * BLOCK_TOKENS]",
        "facts.token_ids",
        "commits",
    ),
    Mutant(
        "FindMissing does not extend lifetimes",
        "core.py",
        "            blob_rows.promise(rows, [blob.id for blob in found], now)\n",
        "",
        "garbage",
    ),
    Mutant(
        "a commit does not clear the marks of its blobs",
        "versions.py",
        '    rows.many("UPDATE blobs SET marked_unix_ms = NULL',
        '    rows.many("UPDATE blobs SET marked_unix_ms = marked_unix_ms',
        "garbage",
    ),
    Mutant(
        "a collection sweeps what it has just marked",
        "garbage.py",
        "    return Deadlines(now_unix_ms - grace_ms,",
        "    return Deadlines(now_unix_ms,",
        "garbage",
    ),
    Mutant(
        "a sweep and a writer of the same blob are not kept apart",
        "blob_files.py",
        "        return self._locks[directory][int(hash_[:2], 16) % _LOCKS]\n",
        "        return threading.Lock()\n",
        "garbage kill",
    ),
    Mutant(
        "bytes are not reserved before they are written",
        "space.py",
        "            self._reserved[namespace] += size_bytes\n",
        "            self._reserved[namespace] += 0\n",
        "garbage",
    ),
    Mutant(
        "the quota does not count what is reserved",
        "space.py",
        "self._stored[namespace] + self._reserved[namespace] + size_bytes - quota",
        "self._stored[namespace] + size_bytes - quota",
        "garbage",
    ),
    Mutant(
        "an operation that failed leaves half of its rows",
        "index.py",
        '            connection.execute("ROLLBACK TO operation")\n',
        "",
        "garbage",
    ),
    Mutant(
        "eviction may take the head of an unpinned line unasked",
        "eviction.py",
        "    return evict_heads and not",
        "    return not",
        "eviction garbage",
    ),
    Mutant(
        "a tensor header is checked only at the end",
        "blob_checks.py",
        "if len(self._start) >= 8 and len",
        "if len(self._start) >= self._size_bytes and len",
        "blobs",
    ),
    Mutant(
        "a digest is not verified when a blob is written",
        "blob_writer.py",
        "        if found != self.digest:\n",
        "        if False:\n",
        "blobs",
    ),
    Mutant(
        "a digest is not verified when a blob is read",
        "blob_files.py",
        "        if blake3(data).hexdigest() != digest.hash:\n",
        "        if False:\n",
        "flips blobs",
    ),
    Mutant(
        "a damaged blob is not remembered as damaged",
        "blob_rows.py",
        '"UPDATE blobs SET is_damaged = ? WHERE namespace_id',
        '"UPDATE blobs SET is_damaged = is_damaged + 0 * ? WHERE namespace_id',
        "blobs",
    ),
    Mutant(
        "a write that ran out of room is not cut back",
        "blob_writer.py",
        "                self._disk.truncate(self._descriptor, self.received_bytes)\n",
        "                pass\n",
        "full_disk",
    ),
    Mutant(
        "a writer that could not list its blob removes the file of one who did",
        "blob_writer.py",
        "                if not self._catalog.has(self.namespace, self.digest):\n",
        "                if True:\n",
        "full_disk",
    ),
    Mutant(
        "the ballast is never given up",
        "index.py",
        "and self._ballast.give_up()",
        "and False",
        "full_disk",
    ),
    Mutant(
        "blobs may take the room that the ballast gave up",
        "space.py",
        " + self._ballast.missing_bytes()",
        "",
        "full_disk",
    ),
    Mutant(
        "two stores may open one directory",
        "opening.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        "care",
    ),
    Mutant(
        "retention drops versions of a pinned agent",
        "committing.py",
        "    if not agent.is_pinned:\n",
        "    if True:\n",
        "commits",
    ),
    Mutant(
        "lost events are not told",
        "events.py",
        "return EventBatch((), now, is_lost=True)",
        "return EventBatch((), now)",
        "care",
    ),
    *(Mutant(*row) for row in JOURNAL_MUTANTS),
)


def file_of(mutant: Mutant, root: Path) -> Path:
    """The file that the mutant changes. Raises LookupError unless one file has that name and, once, that code."""
    found = sorted((root / "cachestore_svc").rglob(mutant.file))
    counts = [path.read_text().count(mutant.old) for path in found]
    if counts != [1]:
        raise LookupError(f"{mutant.what}: {mutant.file} is {len(found)} files with {counts} times the code to change")
    return found[0]


def caught_by(mutant: Mutant, copy: Path) -> str:
    """The first test that fails with the mutant; "" when none does."""
    path = file_of(mutant, copy)
    source = path.read_text()
    environment = {**os.environ, "KVASIR_KILLS": "200"}
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        for name in mutant.tests.split():
            pattern = f"tests/cachestore/core/test_*{name}*.py"
            files = sorted(str(each) for each in copy.glob(pattern))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=120", "--no-header", *files]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 1 and (failed := re.search(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)):
                return failed[1]
            if done.returncode:
                return f"(the tests ended with {done.returncode}: {done.stdout[-300:]})"
    finally:
        path.write_text(source)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words of the mutant")
    arguments = parser.parse_args()
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in _COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            (shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy))
        for mutant in MUTANTS:
            if arguments.only in mutant.what:
                test = caught_by(mutant, copy)
                missed += not test or test.startswith("(")
                rows.append(f"| {mutant.what} | `{mutant.file}` | {(test and f'`{test}`') or '**nothing**'} |")
                print(rows[-1], flush=True)
    if not arguments.only:
        head = (
            "# Mutants of the cache store\n\nEach was put into a copy of the code; the test is the first that failed.\n"
        )
        how = "Written by `python -m tests.cachestore.core.mutants`.\n"
        table = ["| what was broken | where | which test noticed |", "|---|---|---|", *rows]
        TABLE.write_text("\n".join([head, how, *table]) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
