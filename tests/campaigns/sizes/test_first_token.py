"""The measurement of a first token waits for memories that really come from a disk and from a bucket."""

from pathlib import Path

import certifi
import pytest

from tests.campaigns.sizes.first_token import measured
from tests.campaigns.sizes.test_far import pytestmark  # noqa: F401  it wants the same server


@pytest.mark.timeout(300)
def test_a_far_memory_is_read_and_gives_a_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    found = measured(tmp_path, gbit=1, tokens=1024, repeats=1, is_cold=True)
    assert found["first_token_from_bucket_s"] > found["link_s"] > 0.1
    assert found["first_token_from_disk_s"] > 0
