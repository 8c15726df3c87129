"""The commands `check`, `scrub`, `gc` and `recover`: their work, their output, and the exit code."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from kvasir.formats.digest import Digest
from kvasir.waits import PROGRESS_S

from cachestore_svc.commands.command_line import FOUND_PROBLEMS, OK
from cachestore_svc.facts.records import CheckReport, RecoverReport
from cachestore_svc.store.store import Store


def show_check(report: CheckReport, as_json: bool) -> int:
    """Print what a walk over index and files found. Exit code 1 when something is wrong and was not repaired."""
    if as_json:
        print(json.dumps(asdict(report) | {"is_clean": report.is_clean}))
    else:
        for finding in report.findings:
            done = " (repaired)" if finding.is_repaired else ""
            print(f"{finding.problem} in {finding.namespace!r}: {finding.detail}{done}")
        counts = {"namespace": report.namespaces, "blob": report.blobs, "snapshot": report.snapshots}
        print(", ".join(_counted(number, noun) for noun, number in counts.items()))
        if report.set_aside:
            print(f"set aside, until collection removes them: {_counted(report.set_aside, 'file')} that nothing names")
    return OK if all(finding.is_repaired for finding in report.findings) else FOUND_PROBLEMS


def scrub(store: Store, as_json: bool) -> int:
    """Hash every blob again. Exit code 1 when any is damaged, or was found so before and not stored again since."""
    checked, damaged = 0, list[Digest]()
    for progress in store.care.scrub():
        damaged += progress.damaged
        checked = max(checked, progress.blobs_checked)
    known = sorted({digest.hash for digest in store.care.known_damage()} - {digest.hash for digest in damaged})
    if as_json:
        print(json.dumps({"blobs_checked": checked, "damaged": [digest.hash for digest in damaged], "known": known}))
    else:
        for digest in damaged:
            print(f"damaged: {digest.hash}")
        for name in known:
            print(f"damaged, as was found before: {name}")
        before = f", {len(known)} known before" if known else ""
        print(f"{_counted(checked, 'blob')}, {len(damaged)} damaged{before}")
    return FOUND_PROBLEMS if damaged or known else OK


def collect(store: Store, dry_run: bool, as_json: bool) -> int:
    report = store.care.collect_garbage(dry_run=dry_run)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        print(f"{report.blobs_marked} marked, {report.blobs_swept} swept, {report.bytes_freed} bytes freed")
    return OK


def show_recovered(report: RecoverReport, as_json: bool) -> int:
    """Show what a recovery brought back. Exit code 1 when something did not come back as it was."""
    if as_json:
        print(json.dumps(asdict(report) | {"is_complete": report.is_complete}))
    else:
        for line in _told(report):
            print(line)
    return OK if report.is_complete else FOUND_PROBLEMS


def _told(report: RecoverReport) -> Iterator[str]:
    yield f"recovered from {report.source}"
    for space in report.namespaces:
        came = f"{_counted(space.versions, 'version')} of {_counted(space.agents, 'agent')}"
        yield f"{space.namespace}: {came} came back"
        for lost in space.lost:
            yield f"{space.namespace}: lost {lost.agent_id!r} version {lost.version}: {lost.why}"
        for agent, version in space.with_damaged_blobs:
            yield f"{space.namespace}: {agent!r} version {version} lacks blobs, which engines compute again"
        for agent in space.named_anew:
            yield f"{space.namespace}: an agent whose name is lost is now {agent!r}"
        if space.unclaimed:
            waiting = f"{_counted(len(space.unclaimed), 'agent')} may have moved before"
            yield f"{space.namespace}: {waiting}; to query the peers, run `kvasir agents claim --recovered`"
    yield f"the old index is kept: {', '.join(report.kept) or 'there was none'}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def progress(clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    """Prints every second or so what is being read. `clock` gives seconds, monotonic."""
    printed = clock()

    def say(what: str, done: int, total: int) -> None:
        nonlocal printed
        if clock() - printed > PROGRESS_S:
            printed = clock()
            print(f"progress: {what}: {done} of {total}", file=sys.stderr, flush=True)

    return say
