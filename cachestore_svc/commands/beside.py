"""Checks the files of a store that may run, with a copy of its index."""

from collections.abc import Callable
from dataclasses import replace

from kvasir.syncing import Scratch

from cachestore_svc.facts.records import CheckReport, StoreConfig
from cachestore_svc.recovery.medium import BUCKET_NOTE
from cachestore_svc.recovery.opening import DATABASE, copy_index
from cachestore_svc.store.store import Store


def check_beside(config: StoreConfig, open_copy: Callable[[StoreConfig], Store]) -> CheckReport:
    """A check that writes nothing in the data directory. What changed meanwhile is no finding: findings count if a
    second copy has them, too."""
    first = _checked(config, open_copy)
    if not first.findings:
        return first
    second = _checked(config, open_copy)
    return replace(second, findings=tuple(each for each in second.findings if each in first.findings))


def _checked(config: StoreConfig, open_copy: Callable[[StoreConfig], Store]) -> CheckReport:
    with Scratch("kvasir-check-") as copy:
        copy_index(config.data_dir, copy / DATABASE)
        is_in_bucket = (config.data_dir / BUCKET_NOTE).exists()
        for name in ("namespaces", "keys", *([BUCKET_NOTE] if is_in_bucket else [])):
            (copy / name).symlink_to(config.data_dir.absolute() / name)
        with open_copy(replace(config, data_dir=copy, ballast_bytes=0, last_runs_dir=None)) as store:
            return store.care.check(repair=False)
