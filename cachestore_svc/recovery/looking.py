"""The checks of a start, before it changes anything. The journal is synced before the index commits: so an index one
group behind was killed in between, one further behind has lost acknowledged commits, and one ahead has a journal that
lost some. A start refuses an index that it cannot trust, and leaves it as it is.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvasir.errors import FailedPrecondition, KvasirError

from cachestore_svc.blobs.backend import BlobBackend, has_any
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.index.refusals import index_damaged, reading_damage
from cachestore_svc.index.sqlite.database.looking import looking_at
from cachestore_svc.journal import closed, journal
from cachestore_svc.journal.journal_lines import Parsed, Position
from cachestore_svc.journal.replay import Change, State, differences

RECOVER = "stop the store and run: kvasir store recover"
_HANDFUL = 32  # fewer files than these without rows are what a crash leaves
_NAMED = 10


@dataclass(frozen=True)
class Look:
    journal: Parsed | None = None  # the journal to go on with; None: begin one from the index
    why_again: str = ""  # why the journal that lies there cannot be gone on with; "": there is none
    store: str = ""  # whose index it is; "": it is new, or never had a journal
    position: Position | None = None  # how far the index came
    forward: Sequence[Change] = ()  # of the journal's last group, which the index lacks
    damage: dict[str, dict[str, str]] = field(default_factory=dict)  # see replay.differences
    has_wrong_indexes: bool = False  # SQLite's own, of tables that are whole


def look(database: Path, blobs: BlobBackend, disk: Disk) -> Look:
    """Look, and change nothing. Raises FailedPrecondition or DataLoss, which name the remedy."""
    if unchanged := closed.read(database, disk):
        return Look(unchanged, "", unchanged.store, unchanged.position)
    return _look_closely(database, blobs, disk)


def note_closed(database: Path, blobs: BlobBackend, disk: Disk) -> None:
    """Leave a note of a closed index that agrees with its journal. Of one that was damaged while the store ran there is
    none: the next start is to see that. A close that is killed here costs the next start the comparison."""
    if closed.read(database, disk) or disk.has(Path(f"{database}-wal")):  # its log is left, and may be lost
        return
    with contextlib.suppress(KvasirError, OSError, MemoryError), reading_damage():
        seen = _look_closely(database, blobs, disk)
        found = seen.journal
        is_whole = found is not None and not (found.damaged_lines or found.torn_bytes)
        if found is not None and is_whole and not (seen.forward or seen.damage or seen.has_wrong_indexes):
            closed.write(database, found, disk)


def _look_closely(database: Path, blobs: BlobBackend, disk: Disk) -> Look:
    found = journal.read(database.with_name(journal.NAME), disk)
    if not disk.size_bytes(database):
        if has_any(blobs) or (found and _tells(found)):
            raise _missing(database, blobs)
        return Look()
    with looking_at(database, disk) as view:
        if view.is_too_new():
            # The migrations report that in words of their own.
            return Look()
        return _look_inside(view, database, found, blobs, disk)


def words_of(damage: dict[str, str]) -> str:
    named = [f"{agent!r} {words}" if agent else words for agent, words in sorted(damage.items())]
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return "; ".join(named[:_NAMED]) + more


def check_whole(view: CatalogView) -> None:
    """Raises DataLoss (INDEX_DAMAGED) when the database contradicts itself, and nothing shows which half is right."""
    if view.wrong_indexes():
        raise index_damaged("its tables and their indexes differ")


def _look_inside(view: CatalogView, database: Path, found: Parsed | None, blobs: BlobBackend, disk: Disk) -> Look:
    reached = view.journal_position() if view.has_tables() else None
    if reached is None:
        return _look_at_first(view, found, blobs)
    store, position = reached
    if found is None or not found.is_state_whole:
        check_whole(view)
        _check_names_enough(view, blobs)
        why = "it is missing" if found is None else f"{found.damaged_lines} of its lines are damaged"
        return Look(None, why, store, position)
    if found.store != store:
        check_whole(view)
        return _look_at_foreign(view, found, blobs, store, position)
    if position.sequence > found.position.sequence:
        check_whole(view)
        return Look(None, "it ends before the index does", store, position)
    if position == found.position and found.damaged_lines <= 1:
        # One damaged line behind the index's last: a group that was being written, and was never acknowledged.
        has_wrong_indexes = view.wrong_indexes()
        damage = differences(found.state, view.state_anyway())
        return Look(found, "", store, position, (), damage, has_wrong_indexes)
    if position == found.before_last and not found.damaged_lines:
        check_whole(view)
        before = journal.read(database.with_name(journal.NAME), disk, until=position)
        damage = differences(before.state if before else {}, view.state_anyway())
        return Look(found, "", store, position, found.last, damage)
    behind = found.position.sequence + found.damaged_lines - position.sequence
    if behind > 0 and (position.sequence < found.position.sequence or position == found.position):
        raise FailedPrecondition(
            f"the index {database} is {behind} commits behind its journal: its log was lost, or it is old; {RECOVER}",
            reason="INDEX_BEHIND",
        )
    raise _foreign("its history is another than that of the journal")


def _look_at_first(view: CatalogView, found: Parsed | None, blobs: BlobBackend) -> Look:
    """The index never had a journal: it is new, or of an earlier Kvasir, or all that it had is lost."""
    has_tables = view.has_tables()
    if found is not None and _tells(found):
        if not has_tables or differences(found.state, view.state_anyway()):
            raise FailedPrecondition(
                f"the index knows nothing of its journal: its log was lost, or it is another store's; {RECOVER}",
                reason="INDEX_BEHIND",
            )
        # A crash between making the journal and noting it.
        check_whole(view)
        return Look(None, "", found.store, found.position)
    if has_tables:
        check_whole(view)
        _check_names_enough(view, blobs)
    elif has_any(blobs):
        raise _names_less(0, len(list(_all_hashes(blobs))))
    return Look()


def _look_at_foreign(view: CatalogView, found: Parsed, blobs: BlobBackend, store: str, position: Position) -> Look:
    """Index and journal are of two stores: the files in the directory decide between them."""
    if lies_here(view.state_anyway(), blobs) and not lies_here(found.state, blobs):
        _check_names_enough(view, blobs)
        return Look(None, "it is another store's", store, position)
    raise _foreign("it is another store's than the journal")


def lies_here(state: State, blobs: BlobBackend) -> bool:
    """Whether more than half of the manifests of a state are here, in their places or set aside."""
    there = asked = 0
    for namespace, space in state.items():
        listing = blobs.of(namespace).list()
        names = listing.blobs | {aside.hash for aside in listing.asides}
        manifests = {version.manifest_hash for agent in space.agents.values() for version in agent.versions.values()}
        asked += len(manifests)
        there += len(manifests & names)
    return there * 2 > asked


def _check_names_enough(view: CatalogView, blobs: BlobBackend) -> None:
    """Without a journal an index that names less than half of what lies there may have lost commits, or not."""
    named = view.all_hashes()
    there = list(_all_hashes(blobs))
    unnamed = sum(hash_ not in named for hash_ in there)
    if unnamed > _HANDFUL and unnamed * 2 > len(there):
        raise _names_less(len(there) - unnamed, len(there))


def _all_hashes(blobs: BlobBackend) -> Iterator[str]:
    for each in blobs.all():
        yield from each.list().blobs


def _tells(found: Parsed) -> bool:
    """Whether a journal is proof that there was an index with something in it."""
    return not found.is_readable or found.position.sequence > 0 or bool(found.state) or found.damaged_lines > 0


def _missing(database: Path, blobs: BlobBackend) -> FailedPrecondition:
    return FailedPrecondition(
        f"the database {database} is missing, but {blobs.where} holds blobs: put the database back, or {RECOVER}; "
        f"to begin an empty store, move {database.parent} away",
        reason="INDEX_MISSING",
    )


def _names_less(named: int, there: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"the index names {named} of {there} blob files and has no journal: it lost commits, or is foreign; {RECOVER}",
        reason="INDEX_BEHIND",
    )


def _foreign(words: str) -> FailedPrecondition:
    return FailedPrecondition(f"the index is not this store's: {words}; {RECOVER}", reason="INDEX_FOREIGN")
