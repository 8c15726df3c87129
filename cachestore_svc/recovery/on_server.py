"""Opens a catalog on a PostgreSQL server, for the one data directory whose blobs it lists. Each knows the other by a
name that both hold: the blobs of another directory are not here, and its leases are not known here. A directory that
is gone has a successor where its blobs lie in a bucket.
"""

import contextlib
from pathlib import Path

import structlog
from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.backend import BlobBackend, has_any
from cachestore_svc.blobs.bucket.owning import note_owner, noted_owner
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.index.catalog import HOUSE, Catalog, open_postgres
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.medium import BUCKET_NOTE

NAME = "catalog"  # the file, and the database's fact
_BUCKET = "bucket"  # the database's fact: the bucket with the blobs that it lists, and the store's name there


def open_catalog(config: StoreConfig, database: Path, blobs: BlobBackend, means: Means) -> Catalog:
    """`database`: where a directory without a server has its index. Raises FailedPrecondition (INDEX_FOREIGN: the
    server's is of another directory), InvalidArgument (no URL of PostgreSQL), and what a catalog raises.
    """
    if database.exists():
        raise _foreign(f"the index of {config.data_dir} is the file {database.name}: begin without --catalog")
    catalog = open_postgres(config.catalog, means.disk, means.now_unix_ms)
    try:
        _check_same(config.data_dir, catalog, blobs, means)
    except BaseException:
        catalog.close()
        raise
    return catalog


def succeed(config: StoreConfig, means: Means) -> None:
    """Where older data are accepted: make a directory without data that of the store which a database lists, and whose
    blobs lie in a bucket. The store goes on here with all that was acknowledged. Raises what a catalog raises.
    """
    if not (config.catalog and config.accept_older):
        return
    catalog = open_postgres(config.catalog, means.disk, means.now_unix_ms)
    try:
        name, bucket = catalog.read(HOUSE, lambda view: (view.fact(NAME), view.fact(_BUCKET)))
    finally:
        catalog.close()
    if name and bucket:
        note_owner(config.data_dir / BUCKET_NOTE, bucket)
        _write(config.data_dir / NAME, name, means)  # last: it makes the directory that store's
        structlog.get_logger("cachestore").warning("store.succeeded", bucket=bucket.split()[0])


def check_no_index(data_dir: Path, database: str) -> None:
    """Raises FailedPrecondition (INDEX_FOREIGN) where a directory has an index of its own, or one on a server."""
    check_on_file(data_dir)
    if (data_dir / database).exists():
        raise _foreign(f"the index of {data_dir} is the file {database}: begin without --catalog")


def check_not_in_bucket(catalog: str, command: str) -> None:
    """Raises FailedPrecondition (INDEX_FOREIGN) for a command about an index that is a file."""
    if catalog.startswith("s3://"):
        step = "a start brings back all that it holds" if command == "recover" else "copy the bucket itself"
        raise _foreign(f"{command}: the index lies in {catalog}, and each start reads it there; {step}")


def check_on_file(data_dir: Path, advice: str = "name its database by --catalog") -> None:
    """Raises FailedPrecondition (INDEX_FOREIGN) where the index of a directory is on a server."""
    if (data_dir / NAME).exists():
        raise _foreign(f"the index of {data_dir} is in PostgreSQL: {advice}")


def _check_same(data_dir: Path, catalog: Catalog, blobs: BlobBackend, means: Means) -> None:
    here, there = "", catalog.read(HOUSE, lambda view: view.fact(NAME))
    with contextlib.suppress(FileNotFoundError):
        here = (data_dir / NAME).read_text()
    if there is None and (has_any(blobs) or catalog.read(HOUSE, lambda view: view.namespaces())):
        raise _foreign(f"the database is new, but {data_dir} holds blobs: name the database that lists them")
    if there is None:
        here = here or _named(data_dir / NAME, means)
        catalog.write(HOUSE, lambda change: change.set_fact(NAME, here))
    elif here != there:
        raise _foreign(f"the database lists the blobs of another directory than {data_dir}: name one of its own")
    bucket = noted_owner(data_dir / BUCKET_NOTE)
    if bucket and catalog.read(HOUSE, lambda view: view.fact(_BUCKET)) != bucket:
        catalog.write(HOUSE, lambda change: change.set_fact(_BUCKET, bucket))


def _named(path: Path, means: Means) -> str:
    """Give the directory a name, before the database holds it."""
    name = means.token_hex(16)
    _write(path, name, means)
    return name


def _write(path: Path, name: str, means: Means) -> None:
    """Whole or not at all: an empty file would make the directory that of no store, at every start."""
    new = path.with_name(path.name + ".new")
    means.disk.remove(new)  # of a start that was cut
    descriptor = means.disk.open_append(new)
    try:
        means.disk.write(descriptor, name.encode())
        means.disk.fsync(descriptor)
    finally:
        means.disk.close(descriptor)
    means.disk.rename(new, path)
    means.disk.fsync_directory(path.parent)


def _foreign(words: str) -> FailedPrecondition:
    return FailedPrecondition(words, reason="INDEX_FOREIGN")
