"""Two engines on one store do the measured turns, all of which are stored, on cores of their own."""

import os
from pathlib import Path

import pytest

from tests.campaigns.sizes.two_engines import measured


@pytest.mark.long(5)
@pytest.mark.timeout(300)
def test_two_engines_have_their_turns_alone_and_beside_each_other(tmp_path: Path) -> None:
    found = measured(tmp_path, agents=2, turns=2, repeats=1, is_local=True)
    assert found["not_stored"] == []
    assert [len(found["alone_s"][name]) for name in ("first", "second")] == [1, 1]
    assert all(share > 0 for share in found["speed_beside_the_other"].values())
    cores = len(os.sched_getaffinity(0))
    assert found["cores_of_each_engine"] == (2 if cores >= 8 else int(cores > 2))
