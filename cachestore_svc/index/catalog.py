"""The catalog of agents, versions and blobs: the store's one door to `sqlite` and `postgres`. An operation is a
function that the catalog runs in a transaction of one namespace, with a `CatalogView` or a `CatalogChange`: it takes
effect as a whole or not at all.
"""

from collections.abc import Callable, Mapping

from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.postgres.orders import end_order, give_order, has_order
from cachestore_svc.index.sqlite.in_bucket.bucket_catalog import BucketCatalog
from cachestore_svc.index.sqlite.operations import Catalog
from cachestore_svc.index.sqlite.removals import Removal
from cachestore_svc.index.sqlite.rights.lease_ends import Ends, LeaseEnds
from cachestore_svc.index.sqlite.sqlite_catalog import SqliteCatalog
from cachestore_svc.index.sqlite.transaction import CatalogChange, CatalogView
from cachestore_svc.index.values import HOUSE, SLICE

__all__ = (
    "HOUSE",
    "SLICE",
    "BucketCatalog",
    "Catalog",
    "CatalogChange",
    "CatalogView",
    "Ends",
    "LeaseEnds",
    "Removal",
    "SqliteCatalog",
    "end_order",
    "give_order",
    "has_order",
    "open_postgres",
)


def open_postgres(
    url: str, disk: Disk, now_unix_ms: Callable[[], int], shared_as: Mapping[str, str] | None = None
) -> Catalog:
    """The catalog in a database of PostgreSQL. `shared_as`: facts that all stores have in common which may have it at
    the same time. Raises FailedPrecondition where kvasir[fleet] is not installed.
    """
    try:
        from cachestore_svc.index.postgres.postgres_catalog import PostgresCatalog
    except ImportError:
        raise FailedPrecondition("catalog: PostgreSQL needs its driver; run: pip install 'kvasir[fleet]'") from None
    return PostgresCatalog(url, disk, now_unix_ms, shared_as)
