"""Whatever happens to the store, or on the way to it: the tokens are the same, and the time lost is the budget's."""

import asyncio
from pathlib import Path

import pytest

from tests.campaigns.faults.campaign import BUDGET_S, KINDS, Findings, open_campaign

# The engine counts until its event loop comes back to it; what arrives in time earns more: 30 ms for such a memory.
SLACK_S = 0.15


def run(directory: Path, trials: int, seed: int) -> Findings:
    async def all_trials() -> Findings:
        async with open_campaign(directory, seed) as campaign:
            return await campaign.run(trials)

    findings = asyncio.run(all_trials())
    print(findings.summary())
    return findings


def check(findings: Findings) -> None:
    assert findings.problems == []
    assert findings.unlike_undisturbed == 0
    lost = sorted(findings.lost_s)
    assert lost[int(0.98 * (len(lost) - 1))] < BUDGET_S + SLACK_S


@pytest.mark.long(17)
@pytest.mark.timeout(300)
def test_faults_of_the_store_change_no_token_and_cost_at_most_the_budget(tmp_path: Path) -> None:
    findings = run(tmp_path, 8, seed=5)
    check(findings)
    assert sum(findings.counts[kind] > 0 for kind in KINDS) > len(KINDS) / 2


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_1000_outages_hangs_and_corruptions_change_no_token_and_cost_at_most_the_budget(tmp_path: Path) -> None:
    findings = run(tmp_path, 1000, seed=6)
    check(findings)
    assert findings.trials >= 1000
    assert [kind for kind in KINDS if not findings.counts[kind]] == []
