"""The second demo, with few instructions: the claims that hang on no time hold."""

import tempfile
from io import StringIO
from pathlib import Path

import pytest
from kvasir.cli.demo import coding_agent
from kvasir.cli.demo.mac import macs
from kvasir.cli.demo.run import Claims
from rich.console import Console


@pytest.mark.long(8)
def test_a_coding_agent_goes_on_from_the_store_after_a_kill_in_its_turn() -> None:
    told: list[str] = []
    claims = Claims(Console(file=StringIO()))
    with tempfile.TemporaryDirectory(prefix="kv") as root, macs(Path(root)) as make:
        coding_agent.play(told.append, claims, make, Path(root), tokens=600)
    *of_memory, _of_time = claims.made
    assert [claim.holds for claim in of_memory] == [True, True], of_memory
    assert any("tokens reused" in line for line in told)
