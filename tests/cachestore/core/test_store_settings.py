"""Every setting of the store itself can be set from outside, and arrives."""

from pathlib import Path

import pytest

from cachestore_svc.config import ConfigError, read_settings

SET: dict[str, tuple[str, object]] = {
    "data_dir": ("/somewhere", Path("/somewhere")),
    "last_runs_dir": ("/noted", Path("/noted")),
    "accept_older": ("true", True),
    "quota_bytes": ("5000", 5000),
    "namespace_quota_bytes": ('{"theirs": 10, "ours": null}', {"theirs": 10, "ours": None}),
    "evict_heads": ("true", True),
    "free_disk_reserve_bytes": ("1", 1),
    "grace_period_s": ("3.5", 3.5),
    "max_blob_bytes": ("4", 4),
    "retained_versions": ("6", 6),
    "write_budget_bytes": ("8", 8),
    "write_budget_over": ("refuse", "refuse"),
    "expires_after_s": ("86400", 86400.0),
    "namespace_expires_after_s": ('{"theirs": 60, "ours": null}', {"theirs": 60.0, "ours": None}),
}


def test_a_store_is_opened_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, _) in SET.items():
        monkeypatch.setenv(f"KVASIR_STORE_{name.upper()}", text)
    config = read_settings({}).store_config()
    expected = {name: value for name, (_, value) in SET.items()}
    expected["sealed_namespaces"] = ()  # of --sealed-file: tests/cachestore/sealing/test_sealed_downgrade.py
    expected |= {"ballast_bytes": 16 << 20, "event_history": 10_000}  # no options
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.quota_of("theirs"), config.quota_of("ours"), config.quota_of("others")) == (10, None, 5000)


@pytest.mark.parametrize("quotas", ['{"theirs": 0}', '{"theirs": "all"}', "[]"])
def test_a_quota_that_is_none_is_refused_by_name(quotas: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_STORE_NAMESPACE_QUOTA_BYTES", quotas)
    with pytest.raises(ConfigError, match="KVASIR_STORE_NAMESPACE_QUOTA_BYTES: "):
        read_settings({"data_dir": "/somewhere"})
