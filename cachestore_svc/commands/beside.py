"""What can be done beside a store that runs: its index is copied, and checked with the files as they are."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvasir.errors import NotFound

from cachestore_svc.facts.records import CheckReport, StoreConfig
from cachestore_svc.index.sqlite.database.copying import copy_database
from cachestore_svc.recovery.opening import DATABASE
from cachestore_svc.store.store import Store


def copy_index(data_dir: Path, into: Path, clock: Callable[[], float]) -> None:
    """Write the index as of a commit to a new file. Raises NotFound, and what `copy_database` raises."""
    if not (data_dir / DATABASE).is_file():
        raise NotFound(f"no index in {data_dir}", reason="NO_STORE")
    copy_database(data_dir / DATABASE, into, clock)


def check_beside(
    config: StoreConfig, open_copy: Callable[[StoreConfig], Store], clock: Callable[[], float]
) -> CheckReport:
    """A check that writes nothing in the data directory. What changed meanwhile is no finding: findings count if a
    second copy has them, too."""
    first = _checked(config, open_copy, clock)
    if not first.findings:
        return first
    second = _checked(config, open_copy, clock)
    return replace(second, findings=tuple(each for each in second.findings if each in first.findings))


def _checked(config: StoreConfig, open_copy: Callable[[StoreConfig], Store], clock: Callable[[], float]) -> CheckReport:
    with tempfile.TemporaryDirectory(prefix="kvasir-check-") as folder:
        copy = Path(folder)
        copy_index(config.data_dir, copy / DATABASE, clock)
        for name in ("namespaces", "keys"):
            (copy / name).symlink_to(config.data_dir.absolute() / name)
        with open_copy(replace(config, data_dir=copy, ballast_bytes=0, last_runs_dir=None)) as store:
            return store.care.check(repair=False)
