"""Copies the index of a store that may run."""

from pathlib import Path

from kvasir.errors import NotFound

from cachestore_svc.index.sqlite.database.copying import copy_database
from cachestore_svc.recovery.opening import DATABASE


def copy_index(data_dir: Path, into: Path) -> None:
    """Write the index as of a commit to a new file. Raises NotFound, and what `copy_database` raises."""
    if not (data_dir / DATABASE).is_file():
        raise NotFound(f"no index in {data_dir}")
    copy_database(data_dir / DATABASE, into)
