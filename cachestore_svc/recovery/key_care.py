"""Looks after the keys of sealed namespaces while the store does not run: new, rotated, destroyed, listed."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvasir.errors import FailedPrecondition, NotFound
from kvasir.formats.blob_place import namespace_place
from kvasir.names import check_namespace

from cachestore_svc.blobs.backend import BlobBackend, NamespaceBlobs
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.index.catalog import HOUSE, open_postgres
from cachestore_svc.index.refusals import reading_damage
from cachestore_svc.index.sqlite.database.looking import looking_at
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.medium import blobs_of, in_bucket
from cachestore_svc.recovery.on_server import check_on_file
from cachestore_svc.recovery.opening import DATABASE, locked
from cachestore_svc.sealing.key_files import KeyFiles
from cachestore_svc.sealing.keys import KeyRecord, MasterKey, new_record
from cachestore_svc.sealing.seals import Seals


@dataclass(frozen=True)
class SealedNamespace:
    namespace: str
    created_unix_ms: int
    master_ids: tuple[str, ...]  # of the master keys that open it
    erased_unix_ms: int  # when its key was destroyed; 0: it was not
    files: int
    bytes: int  # as they lie there


class KeyCare:
    """Changes of key records in one data directory. Each locks it. Raises Unavailable (LOCKED) while a store runs, but
    for `records`."""

    def __init__(self, config: StoreConfig, means: Means) -> None:
        self._config = config
        self._means = means
        self._disk = means.disk
        self._files = KeyFiles(config.data_dir, means.disk)

    def records(self) -> list[SealedNamespace]:
        """All namespaces that are sealed, by name. Raises FailedPrecondition (NAMESPACE_SEALED) for a lost record."""
        if not self._config.data_dir.exists() and not self._config.sealed_namespaces:
            return []
        with reading_damage():
            return [self._seen(record) for record in self._records()]

    def seal(self, namespace: str, master: MasterKey) -> SealedNamespace:
        """Seal a namespace that holds nothing yet. Raises FailedPrecondition (NAMESPACE_IN_USE) for any other."""
        check_namespace(namespace)
        with locked(self._config, self._disk):
            self._check_unused(namespace)
            record = new_record(namespace, master, self._means.random_bytes, self._means.now_unix_ms())
            self._files.begin(record)
            return self._seen(record)

    def rotate(self, masters: Sequence[MasterKey], new: MasterKey) -> list[SealedNamespace]:
        """Wrap every key with a new master key alone; may be repeated. Raises FailedPrecondition (NAMESPACE_SEALED)."""
        with locked(self._config, self._disk):
            keys = [(record, record.open([*masters, new])) for record in self._records() if not record.erased_unix_ms]
            for record, _ in keys:
                self._files.write(record)  # both copies are whole before one is written over
            both = [record.wrapped_by(new, key, self._means.random_bytes) for record, key in keys]
            for record in both:
                self._files.write(record)
            alone = [record.only_by(new) for record in both]
            for record in alone:
                self._files.write(record)
            return [self._seen(record) for record in alone]

    def erase(self, namespace: str) -> SealedNamespace:
        """Destroy a namespace's key, durably: what it sealed can never be read again. Raises NotFound."""
        with locked(self._config, self._disk):
            record = self._files.read().get(namespace_place(namespace))
            if record is None:
                raise NotFound(f"no key of a namespace {namespace!r} is here", reason="NAMESPACE_UNKNOWN")
            if not record.erased_unix_ms:
                record = record.erased(max(1, self._means.now_unix_ms()))
            self._files.write(record)
            return self._seen(record)

    def _records(self) -> list[KeyRecord]:
        found = self._files.read()
        if lost := Seals(found, (), self._config.sealed_namespaces).lost():
            raise lost[0]
        return sorted((record for record in found.values() if record), key=lambda record: record.namespace)

    def _check_unused(self, namespace: str) -> None:
        # A mark alone is what a crash left of the first try.
        has_record = self._files.read().get(namespace_place(namespace)) is not None
        is_known = has_record or self._blobs_of(namespace).exists()
        if is_known or namespace in self._listed():
            raise FailedPrecondition(
                f"namespace {namespace!r} is in use, or sealed already: seal a new one, and bring its agents there "
                "with kvasir agents export and import",
                reason="NAMESPACE_IN_USE",
            )

    def _listed(self) -> list[str]:
        """Namespaces that the index has."""
        config, disk, database = self._config, self._disk, self._config.data_dir / DATABASE
        if in_bucket(config):
            return []  # its blobs lie beside the index, and are looked for anyway
        if config.catalog:
            with contextlib.closing(open_postgres(config.catalog, disk, self._means.now_unix_ms)) as catalog:
                return catalog.read(HOUSE, lambda view: view.namespaces())
        check_on_file(config.data_dir)
        if not disk.size_bytes(database):
            return []
        with looking_at(database, disk) as view:
            return view.namespaces_anyway()

    def _seen(self, record: KeyRecord) -> SealedNamespace:
        blobs = self._blobs_of(record.namespace)
        hashes = blobs.list().blobs
        return SealedNamespace(
            record.namespace,
            record.created_unix_ms,
            tuple(wrapped.master_id for wrapped in record.wrapped),
            record.erased_unix_ms,
            len(hashes),
            sum(blobs.size_bytes(hash_) or 0 for hash_ in hashes),
        )

    @cached_property
    def _blobs(self) -> BlobBackend:
        return blobs_of(self._config, self._disk, only_looks=True)

    def _blobs_of(self, namespace: str) -> NamespaceBlobs:
        return self._blobs.of(namespace)
