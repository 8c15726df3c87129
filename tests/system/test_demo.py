"""`make demo` in short: the same steps with shorter lives, and every claim true."""

import re
from pathlib import Path

import pytest

from tests.cli.running import Cli


@pytest.mark.long(17)
def test_the_demo_makes_no_claim_that_is_not_true(tmp_path: Path) -> None:
    shown = Cli(tmp_path / "home")("demo", "--quick", "--out", tmp_path, timeout_s=240)
    assert shown.code == 0, shown.out + shown.err
    assert "NOT TRUE" not in shown.out
    assert len(re.findall("✓", shown.out)) >= 18
    assert "was not told" in shown.out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "kept in" not in shown.err
