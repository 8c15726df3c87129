"""The catalog of agents, versions and blobs: the store's one door to `sqlite`. An operation is a function that the
catalog runs in a transaction of one namespace, with a `CatalogView` or a `CatalogChange`: it takes effect as a whole or
not at all.
"""

from cachestore_svc.index.sqlite.sqlite_catalog import SqliteCatalog
from cachestore_svc.index.sqlite.transaction import CatalogChange, CatalogView
from cachestore_svc.index.values import HOUSE, SLICE

__all__ = ("HOUSE", "SLICE", "CatalogChange", "CatalogView", "SqliteCatalog")
