"""Opens a catalog on a PostgreSQL server. Where the blobs lie in the data directory, that is the only one: each knows
the other by a name that both hold. Where they lie in a bucket, any directory will do, and several processes may have
the database: they are replicas of one store.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from kvasir.credentials import replace_private_text
from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.backend import BlobBackend, has_any
from cachestore_svc.blobs.bucket.bucket_blobs import BucketBlobs
from cachestore_svc.blobs.bucket.catalogs_bucket import CatalogOwner, Home
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.index.catalog import HOUSE, Catalog, CatalogChange, open_postgres
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.medium import BUCKET_NOTE
from cachestore_svc.sealing.sealed_blobs import SealedBackend
from cachestore_svc.sealing.seals import Seals

NAME = "catalog"  # the file, and the database's fact
_BUCKET = "bucket"  # the database's fact: the bucket with the blobs that it lists, and the store's name there
_PROOF = "bucket_proof"  # the database's fact: a word that no older copy of it has


def open_catalog(config: StoreConfig, database: Path, blobs: SealedBackend, means: Means) -> Catalog:
    """`database`: where a directory without a server has its index. Raises FailedPrecondition (INDEX_FOREIGN: the
    server's is of another directory; REPLICA_UNLIKE, BUCKET_TAKEN), InvalidArgument (no URL of PostgreSQL), and what a
    catalog raises.
    """
    if database.exists():
        raise _foreign(f"the index of {config.data_dir} is the file {database.name}: begin without --catalog")
    owner = blobs.sealed.owner if isinstance(blobs.sealed, BucketBlobs) else None
    is_shared = isinstance(owner, CatalogOwner)
    alike = {"shared_as": alike_in(config, blobs)} if is_shared else {}
    catalog = open_postgres(config.catalog, means.disk, means.now_unix_ms, **alike)
    try:
        _check_same(config.data_dir, catalog, blobs.sealed, means, is_shared=is_shared)
        if isinstance(owner, CatalogOwner):
            _take_bucket(config, catalog, owner, means)
    except BaseException:
        catalog.close()
        raise
    return catalog


def alike_in(config: StoreConfig, blobs: SealedBackend) -> dict[str, str]:
    """What all replicas have in common; secrets are hashed."""
    return {"blobs": blobs.where, "grace-period-s": f"{config.grace_period_s:g}", "keys": _hash_of(blobs.seals)}


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


def _hash_of(seals: Seals) -> str:
    """Of the sealed namespaces, and of their keys where these are known: no key can be found from it."""
    words = [f"{name} {seals.names_of(name).keyed(NAME)} {seals.refusal(name) is None}" for name in seals.namespaces]
    return blake3("\n".join([*words, *sorted(seals.recorded)]).encode()).hexdigest()[:32]


def _check_same(data_dir: Path, catalog: Catalog, blobs: BlobBackend, means: Means, *, is_shared: bool) -> None:
    """See that the directory is the database's, or may become one of its directories."""
    here, there = _name_of(data_dir), _listed_name(catalog)
    if there is None:
        is_used = has_any(blobs) or bool(catalog.read(HOUSE, lambda view: view.namespaces()))
        if is_used and _listed_name(catalog) is None:  # a replica that began meanwhile notes the name first
            raise _foreign(f"the database is new, but {data_dir} holds blobs: name the database that lists them")
        name = here or means.token_hex(16)
        if not here and not is_shared:
            replace_private_text(data_dir / NAME, here := name)  # before the database holds it
        there = catalog.write(HOUSE, lambda change: _name(change, name))
    if here != there and (here or not is_shared):
        raise _foreign(f"the database lists the blobs of another directory than {data_dir}: name one of its own")


def _name_of(data_dir: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (data_dir / NAME).read_text()
    return ""


def _listed_name(catalog: Catalog) -> str | None:
    return catalog.read(HOUSE, lambda view: view.fact(NAME))


def _name(change: CatalogChange, name: str) -> str:
    """Name the database, unless another replica did. Its name."""
    found = change.fact(NAME)
    if found is None:
        change.set_fact(NAME, name)
    return found or name


class DatabaseOfCatalog:
    """Implements `Database` of the bucket's owner. The proof is a fact; behind it, for a moment, the next one."""

    def __init__(self, catalog: Catalog, new_proof: Callable[[], str]) -> None:
        self._catalog, self._new_proof = catalog, new_proof

    def home(self) -> Home:
        return Home(*self._catalog.home)

    def look(self) -> Home:
        self._catalog.write(HOUSE, lambda _: None)
        return self.home()

    def proofs(self) -> tuple[str, ...]:
        return tuple((self._catalog.read(HOUSE, lambda view: view.fact(_PROOF)) or "").split())

    def next_proof(self) -> str:
        def noted(change: CatalogChange) -> str:
            last, *following = (change.fact(_PROOF) or "-").split()
            if not following:
                following = [self._new_proof()]
                change.set_fact(_PROOF, f"{last} {following[0]}")
            return following[0]

        return self._catalog.write(HOUSE, noted)

    def keep_proof(self, proof: str) -> None:
        def kept(change: CatalogChange) -> None:
            if (change.fact(_PROOF) or "").endswith(f" {proof}"):  # no other process has begun the next one
                change.set_fact(_PROOF, proof)

        self._catalog.write(HOUSE, kept)


def _take_bucket(config: StoreConfig, catalog: Catalog, owner: CatalogOwner, means: Means) -> None:
    listed = catalog.read(HOUSE, lambda view: view.fact(_BUCKET)) or ""
    note, database = config.data_dir / BUCKET_NOTE, DatabaseOfCatalog(catalog, lambda: means.token_hex(16))
    taken = owner.take(note, listed, database, means.token_hex(16), takes_from_copy=config.accept_older)
    if taken != listed:
        catalog.write(HOUSE, lambda change: change.set_fact(_BUCKET, taken))
    if not _name_of(config.data_dir):
        replace_private_text(config.data_dir / NAME, _listed_name(catalog) or "")


def _foreign(words: str) -> FailedPrecondition:
    return FailedPrecondition(words, reason="INDEX_FOREIGN")
