"""`python -m inference_svc.describe`, by which `kvasir doctor` looks at a model."""

import sys
import tempfile
from pathlib import Path

import pytest

from inference_svc import describe


def test_the_folder_of_a_killed_description_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvasir-describe-abcdefgh~").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["describe"])
    monkeypatch.setattr(describe.structlog, "configure", lambda **_: None)
    monkeypatch.setattr(describe, "described", lambda *_: {})
    assert describe.main() == 0
    assert not list(tmp_path.iterdir())
