"""Two honest sides and a peer that lies to their stores and engines: what an owner has is changed by him alone.

A side is a store and its engine; no memory and no owner changes but by what an owner began or allowed.
"""

import asyncio
import math
import os
from collections import Counter
from pathlib import Path

import pytest
from kvasir.errors import KvasirError

from tests.cachestore.core.lab import NS
from tests.cachestore.rights.judging import LIAR
from tests.cachestore.rights.peered import macs
from tests.cachestore.rights.walks import walk_on, walks
from tests.made_models.synthetic import SMALL, SyntheticAgent


async def test_a_peer_that_may_only_read_is_refused_all_else_and_each_refusal_is_audited(tmp_path: Path) -> None:
    async with macs("ada", LIAR, root=tmp_path / "stores") as (ada, _):
        ada.allow(LIAR, gives="read", takes="nothing")
        await ada.publish("work", SyntheticAgent(SMALL, 1).turn(300), 0)
        before = ada.store.owners.of(NS, "work"), ada.store.snapshots.page(NS, "work")
        async with ada.as_peer(LIAR) as liar:
            for lie in (
                liar.fence_agent("work", 5),
                liar.offer_agent("work", "0" * 16, 0),
                liar.hand_over_agent("work", "0" * 16, 1),
            ):
                with pytest.raises(KvasirError) as refused:
                    await lie
                assert refused.value.reason in ("PEER_MAY_NOT", "MOVE_UNKNOWN")
        assert before == (ada.store.owners.of(NS, "work"), ada.store.snapshots.page(NS, "work"))
        for _ in range(500):  # a stream's line is written when its caller may have been answered already
            if len(audited := [line["outcome"] for line in ada.audit.of(LIAR)]) == 3:
                break
            await asyncio.sleep(0.01)
        assert audited == ["refused"] * 3


@pytest.mark.long(14)
def test_a_word_of_a_lying_peer_has_the_effects_that_the_table_allows_and_each_refusal_is_audited(
    tmp_path: Path,
) -> None:
    counts = Counter[str]()
    # Among them: a turn whose agent comes by another move, and turns that begin after their agent has come.
    asyncio.run(walks(tmp_path / "w", (0, 11, 17, 18), counts))
    assert counts["walks"] == 4
    assert counts["lies about owners"] > 0 < counts["lies about newer owners"]
    assert counts["FENCE PEER_MAY_NOT"] > 0 < sum(counts[name] for name in counts if name.endswith("took effect"))
    assert counts["TURN with its agent HANDOVER_NOT_MOVED"] > 0 < counts["TURN after its agent HANDOVER_NOT_MOVED"]


@pytest.mark.campaign
@pytest.mark.timeout(2 * 3600)
def test_ten_thousand_walks_with_a_lying_peer(tmp_path: Path) -> None:
    counts, problems = walk_on(tmp_path, range(10_000), processes=os.cpu_count() or 1, within_s=math.inf)
    assert problems == []
    assert counts["walks"] == 10_000
    verbs = ("OFFER", "HAND_OVER", "UNDO", "FENCE", "COPY", "MOVE", "TURN")
    assert all(counts[f"{verb} took effect"] > 100 for verb in verbs), counts
    assert counts["turns handed over between the honest"] > 100
