"""Opens a data directory: locks it, checks it, counts what is stored, removes what a crash left. Closes it, too."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
from kvasir.credentials import check_own_directory
from kvasir.errors import FailedPrecondition, KvasirError, NotFound, Unavailable

from cachestore_svc.blobs.backend import BlobBackend, Damaged
from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.blob_writer import Writers
from cachestore_svc.blobs.bucket.bucket_blobs import BucketBlobs
from cachestore_svc.blobs.bucket.owning import BucketOwner
from cachestore_svc.blobs.disk import NO_FILE, Disk, is_no_room, refusal
from cachestore_svc.blobs.space import Space
from cachestore_svc.core.core import Core
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.index.catalog import (
    HOUSE,
    BucketCatalog,
    Catalog,
    CatalogChange,
    LeaseEnds,
    SqliteCatalog,
)
from cachestore_svc.index.refusals import reading_damage
from cachestore_svc.index.sqlite.database.copying import copy_database
from cachestore_svc.index.values import INCARNATION, ReadManifest, Unheld
from cachestore_svc.index.write_budget import WriteBudget
from cachestore_svc.journal import journal, journal_lines
from cachestore_svc.journal.journal import Journal
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Change, Namespace, State
from cachestore_svc.recovery import asides, looking, on_server
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.medium import BUCKET_NOTE, blobs_of, in_bucket
from cachestore_svc.recovery.older_copy import check_newest, note_commits
from cachestore_svc.recovery.salvage import Found, list_again, manifest_reader
from cachestore_svc.sealing.key_files import KeyFiles
from cachestore_svc.sealing.keys import MasterKey
from cachestore_svc.sealing.sealed_blobs import SealedBackend
from cachestore_svc.sealing.seals import Seals

DATABASE = "kvasir.sqlite3"
_SEALED = "sealed_places"


@dataclass(frozen=True)
class Opened:
    core: Core
    blobs: BlobBackend  # as they lie there
    lock: int  # descriptor whose lock shows that the directory is ours

    def close(self) -> None:
        """Finish what the index has, note what it then is, and unlock. A second time does nothing."""
        core = self.core
        if core.catalog.close():
            if core.journal is not None:
                core.journal.close()
                looking.note_closed(core.config.data_dir / DATABASE, self.blobs, core.disk)
            os.close(self.lock)


def open_directory(
    config: StoreConfig, means: Means, blobs: BlobBackend | None, masters: Sequence[MasterKey], *, sweeps: bool
) -> Opened:
    disk = means.disk
    with locked(config, disk) as lock:
        if in_bucket(config):
            on_server.check_no_index(config.data_dir, DATABASE)
        files = KeyFiles(config.data_dir, disk)
        records = files.read()
        if sweeps and (repaired := files.repair(records)):
            structlog.get_logger("cachestore").warning("keys.mended", namespaces=repaired)
        seals = Seals(records, masters, config.sealed_namespaces)
        plain = blobs or blobs_of(config, disk, only_looks=not sweeps)
        sealed = SealedBackend(plain, seals, means.random_bytes)
        started = config if sweeps else replace(config, last_runs_dir=None)  # A look at an older copy is no start of it
        core = _Opening(started, means, sealed).core(plain if in_bucket(config) else None, only_looks=not sweeps)
        try:
            if sweeps:
                if config.accept_older:
                    core.catalog.write(HOUSE, lambda change: change.leave_objects(means.now_unix_ms()))
                asides.sweep_at_start(core)
            core.ballast.fill(config.free_disk_reserve_bytes)
        except BaseException:
            core.catalog.close()
            if core.journal is not None:
                core.journal.close()
            raise
        return Opened(core, plain, os.dup(lock))


def holds_store(data_dir: Path) -> bool:
    """Whether a store was ever made here: its index, its journal or its blobs are. Makes nothing."""
    return any((data_dir / name).exists() for name in (DATABASE, journal.NAME, on_server.NAME, "namespaces"))


@contextlib.contextmanager
def locked(config: StoreConfig, disk: Disk) -> Iterator[int]:
    """Make and lock the data directory, until the end or for a copied descriptor. Raises words of the store."""
    try:
        disk.make_directory(config.data_dir)
        check_own_directory(config.data_dir)
        lock = _lock(config.data_dir / "lock")
    except OSError as error:
        raise refusal(error, f"the data directory {config.data_dir}") from error
    try:
        with reading_damage(config.catalog):
            yield lock
    except OSError as error:
        raise refusal(error, f"the data directory {config.data_dir}") from error
    finally:
        os.close(lock)


class _Opening:
    def __init__(self, config: StoreConfig, means: Means, blobs: SealedBackend) -> None:
        self._config = config
        self._means = means
        self._blobs = blobs
        self._ballast = Ballast(config.data_dir / "ballast", config.ballast_bytes, means.disk)
        self._path = config.data_dir / DATABASE

    def core(self, bucket: BlobBackend | None, *, only_looks: bool) -> Core:
        """`bucket`: the blobs whose bucket has the index, too."""
        if not self._config.catalog:
            return self._on_file()
        means = self._means
        if isinstance(bucket, BucketBlobs) and isinstance(bucket.owner, BucketOwner):
            parts = bucket.bucket, bucket.owner, means.disk, means.now_unix_ms
            older = self._config.accept_older
            return self._elsewhere(lambda: BucketCatalog(*parts, only_looks=only_looks, accepts_older=older))
        return self._elsewhere(lambda: on_server.open_catalog(self._config, self._path, self._blobs, means))

    def _elsewhere(self, open_catalog: Callable[[], Catalog]) -> Core:
        catalog = open_catalog()
        try:
            return self._opened(catalog, None)
        except BaseException:
            catalog.close()
            raise

    def _on_file(self) -> Core:
        config, disk, now = self._config, self._means.disk, self._means.now_unix_ms
        on_server.check_on_file(config.data_dir)
        seen = looking.look(self._path, self._blobs.sealed, disk)
        reached = seen.journal or seen
        if reached.position is not None:
            check_newest(config, reached.store, reached.position, disk)
        catalog = SqliteCatalog(self._path, disk, self._ballast, now)
        try:
            log = self._follow(catalog, seen)
            try:
                note_commits(config, log, now)
                return self._opened(catalog, log)
            except BaseException:
                log.close()
                raise
        except BaseException:
            catalog.close()
            raise

    def _opened(self, catalog: Catalog, log: Journal | None) -> Core:
        config, means, blobs, seals = self._config, self._means, self._blobs, self._blobs.seals
        now = means.now_unix_ms
        _remember_seals(catalog, seals)
        # Engines of a copy's earlier life call the store that it was copied from. In a bucket both are one store's.
        is_alone = log is not None and not (config.data_dir / BUCKET_NOTE).exists()
        leases = catalog.lease_ends(means.steady)
        # A server's standby or backup may lack the newest leases, which engines still count on.
        begins = _end_leases if is_alone and config.accept_older else partial(_bar, leases) if log is None else None
        begin = _begin_history(catalog, means, begins)
        stored_of = partial(_counted_bytes, catalog) if catalog.is_shared else None
        stored = {} if stored_of else catalog.read(HOUSE, lambda view: view.stored_bytes())
        space = Space(config, means.disk, self._ballast, stored, stored_of)
        if leases.in_ram:  # how long each had still to go is not known, so each has its whole time
            for each in catalog.read(HOUSE, lambda view: view.unreleased_leases()):
                agent_id = seals.plain(each.line.namespace, each.line.agent_id)
                leases.in_ram.grant(each.line._replace(agent_id=agent_id), each.token, each.ttl_ms / 1000)
        catalog.seal(seals.names_of)
        budget = WriteBudget(catalog, now, config.write_budget_bytes, refuses=config.write_budget_over == "refuse")
        parts = means.disk, self._ballast, catalog, blobs, seals, space, Writers(blobs, space, now)
        core = Core(config, *parts, log, now, leases, budget)
        catalog.attend(begin, core.watchers.wake)
        return core

    def _follow(self, catalog: SqliteCatalog, seen: looking.Look) -> Journal:
        """Bring index and journal to one position, and from now on record each commit in the journal."""
        log, blobs, found = structlog.get_logger("cachestore"), self._blobs, seen.journal
        if found is None:
            store = seen.store or self._means.token_hex(8)
            position = seen.position or journal_lines.begin(store)
            if seen.why_again:
                log.warning("journal.written_anew", why=seen.why_again, sequence=position.sequence)
            opened = self._begun(store, position, catalog.read(HOUSE, lambda view: view.state()))
        else:
            store, position = found.store, found.position
            if found.damaged_lines or found.torn_bytes:
                log.warning("journal.end_cut", sequence=position.sequence, bytes=found.torn_bytes)
            if seen.has_wrong_indexes:
                log.warning("index.indexes_rebuilt")
                catalog.rebuild_indexes()
            if seen.forward:
                log.warning("index.rolled_forward", sequence=position.sequence)
                self._roll_forward(catalog, seen.forward, store, position)
            if catalog.is_migrated:
                # A step of the database's form may change what is recorded. Of damaged rows the journal is right.
                right = {name: found.state.get(name, Namespace()) for name in seen.damage}
                opened = self._begun(store, position, catalog.read(HOUSE, lambda view: view.state()) | right)
            else:
                path, disk = self._path.with_name(journal.NAME), self._means.disk
                opened = Journal(path, disk, store, position, found.base_bytes, found.whole_bytes)
        if not seen.forward and (seen.store, seen.position) != (store, position):
            catalog.write(HOUSE, lambda change: change.set_journal_position(store, position))
        catalog.record_with(opened)
        for namespace, damage in seen.damage.items():
            log.error("index.damaged", namespace=namespace, agents=len(damage))
        words = {name: blobs.seals.plain(name, looking.words_of(damage)) for name, damage in seen.damage.items()}
        catalog.keep_out(words)
        return opened

    def _roll_forward(self, catalog: Catalog, changes: Iterable[Change], store: str, position: Position) -> None:
        read, now = manifest_reader(self._blobs, self._blobs.seals), self._means.now_unix_ms()

        def found(namespace: str) -> Found:
            return Found(self._blobs.of(namespace), self._blobs.seals.names_of(namespace))

        lists = partial(list_again, found=found, read=read, changes=changes, now_unix_ms=now)
        catalog.write(HOUSE, lambda change: roll_forward(change, read, lists, changes, store, position))

    def _begun(self, store: str, position: Position, state: State) -> Journal:
        path, disk = self._path.with_name(journal.NAME), self._means.disk
        try:
            return Journal.begin(path, disk, store, position, state)
        except OSError as error:
            if is_no_room(error) and self._ballast.give_up():
                return Journal.begin(path, disk, store, position, state)
            raise


def _counted_bytes(catalog: Catalog, namespace: str) -> int:
    return catalog.read(namespace, lambda view: view.counted_bytes())


def _remember_seals(catalog: Catalog, seals: Seals) -> None:
    """Note which namespaces are sealed; shut those that were, and lost record and mark, so that none is kept plain."""
    noted = set((catalog.read(HOUSE, lambda view: view.fact(_SEALED)) or "").split())
    seals.lose(noted)
    if new := seals.recorded - noted:
        text = " ".join(sorted(noted | new))
        catalog.write(HOUSE, lambda change: change.set_fact(_SEALED, text), frees_space=True)
    for refusal_ in seals.refusals():
        structlog.get_logger("cachestore").error("namespace.shut", why=refusal_.message)


def _lock(path: Path) -> int:
    """Take the directory for this process. The lock ends with the process, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(NO_FILE, "the lock is no regular file")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "another process"
        os.close(descriptor)
        raise Unavailable(
            f"the data directory {path.parent} is in use by process {holder}", reason="LOCKED", metadata={"pid": holder}
        ) from None
    except OSError:  # of a file system that has no locks
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _begin_history(
    catalog: Catalog, means: Means, begins_elsewhere: Callable[[CatalogChange], None] | None
) -> Callable[[CatalogChange], None]:
    """Give the history of events a name, once in each place: a database copied back lies in another inode, and its
    history went on without it. `begins_elsewhere`: done with the first start in another place. Returns what to do where
    the database may be in another place now.
    """

    def begin(change: CatalogChange) -> None:
        if change.fact(INODE) == catalog.place:
            return
        if change.fact(INODE):  # it went on elsewhere
            change.leave_objects(means.now_unix_ms())
            if begins_elsewhere:
                begins_elsewhere(change)
        change.set_fact(INCARNATION, means.token_hex(8))
        change.set_fact(INODE, catalog.place)

    if catalog.read(HOUSE, lambda view: view.fact(INODE)) != catalog.place:
        catalog.write(HOUSE, begin)
    return begin


def _end_leases(change: CatalogChange) -> None:
    """No lease is left of the history before."""
    change.fence_all_leases()


def _bar(leases: LeaseEnds, change: CatalogChange) -> None:
    """No lease is given for as long as one may hold that the index does not have."""
    leases.within(change).bar_all(change.longest_lease_ms() / 1000)


INODE = "inode"  # of the database in which the history of events goes on: in another one it has another name


def roll_forward(
    change: CatalogChange,
    read: ReadManifest,
    lists: Callable[[CatalogChange], None],
    changes: Iterable[Change],
    store: str,
    position: Position,
) -> None:
    """Repeat the journal's last group, under a new name of the event history; `lists` first gives rows to its blobs.
    Raises FailedPrecondition.
    """
    try:
        lists(change)
        change.apply_changes(read, changes)
        change.fence_changes(changes)
    except (Unheld, KvasirError, Damaged, OSError) as error:
        if isinstance(error, FailedPrecondition) and error.reason == "NAMESPACE_SEALED":
            raise
        raise FailedPrecondition(
            f"the last commit of the journal cannot be repeated: {error}; stop the store and run: kvasir store recover",
            reason="INDEX_BEHIND",
        ) from error
    change.set_journal_position(store, position)
    change.set_fact(INODE, "")


def copy_index(data_dir: Path, into: Path) -> None:
    """Write the index as of a commit to a new file. Raises NotFound, and what `copy_database` raises."""
    if not (data_dir / DATABASE).is_file():
        raise NotFound(f"no index in {data_dir}")
    copy_database(data_dir / DATABASE, into)
