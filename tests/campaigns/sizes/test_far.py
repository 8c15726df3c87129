"""The measurement of a far memory reads all of it, through a link that holds its pace."""

import asyncio
import shutil
from pathlib import Path

import certifi
import pytest

from tests.campaigns.sizes.far import measured

_HERE = shutil.which("versitygw") or Path("~/.cache/kvasir-lab/versitygw").expanduser()
pytestmark = [
    pytest.mark.skipif(not Path(_HERE).exists(), reason="no versitygw here: see tests/cachestore/bucket/test_over_s3"),
    pytest.mark.long(8),
]


def test_a_memory_comes_from_a_bucket_no_faster_than_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    found = asyncio.run(measured(tmp_path, gbit=0.32, blocks=4, repeats=1))
    assert 0 < found["plain_mb_per_s"] <= found["link_mb_per_s"] * 1.1
    assert 0 < found["share_of_link"] <= 1.1
    assert found["disk_mb_per_s"] > 0
    spent = found["processor_s_per_gb"]
    assert min(spent["bucket"]["reader"], spent["bucket"]["far store"]) > 0
    assert spent["disk"].get("far store", 0) < spent["disk"]["near store"]
