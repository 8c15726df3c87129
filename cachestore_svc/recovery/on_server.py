"""Opens a catalog on a PostgreSQL server, for the one data directory whose blobs it lists. Each knows the other by a
name that both hold: the blobs of another directory are not here, and its leases are not known here.
"""

import contextlib
from pathlib import Path

from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.backend import BlobBackend, has_any
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.index.catalog import HOUSE, Catalog, open_postgres
from cachestore_svc.recovery.means import Means

NAME = "catalog"  # the file, and the database's fact


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


def _named(path: Path, means: Means) -> str:
    """Give the directory a name, before the database holds it."""
    name = means.token_hex(16)
    descriptor = means.disk.open_append(path)
    try:
        means.disk.write(descriptor, name.encode())
        means.disk.fsync(descriptor)
    finally:
        means.disk.close(descriptor)
    means.disk.fsync_directory(path.parent)
    return name


def _foreign(words: str) -> FailedPrecondition:
    return FailedPrecondition(words, reason="INDEX_FOREIGN")
