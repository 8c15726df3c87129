"""Two honest stores and a peer that lies: no memory and no owner changes but by what an owner began or allowed."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.cachestore.rights.walk import walk_on, walks


def test_a_word_of_a_lying_peer_has_the_effects_that_the_table_allows_and_each_refusal_is_audited(
    tmp_path: Path,
) -> None:
    counts = Counter[str]()
    asyncio.run(walks(tmp_path / "w", range(6), counts))
    assert counts["walks"] == 6
    assert counts["lies about owners"] > 0 < counts["lies about newer owners"]
    assert counts["FENCE PEER_MAY_NOT"] > 0 < sum(counts[name] for name in counts if name.endswith("took effect"))


@pytest.mark.campaign
@pytest.mark.timeout(2 * 3600)
def test_ten_thousand_walks_with_a_lying_peer(tmp_path: Path) -> None:
    counts = walk_on(tmp_path, 0, 10_000)
    verbs = ("OFFER", "HAND_OVER", "UNDO", "FENCE", "COPY", "MOVE")
    assert all(counts[f"{verb} took effect"] > 100 for verb in verbs), counts
