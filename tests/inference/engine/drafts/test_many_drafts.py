"""Many turns at once with drafts that are right, wrong or both: each is as without, and so is what all of them draw."""

import json
from pathlib import Path

import pytest

from tests.inference.engine.drafts import many_drafts
from tests.inference.engine.drafts.many_drafts import MOST_SURPRISE, REPLIES, UNITS, surprises
from tests.inference.engine.drafts.planted_drafts import Told
from tests.inference.engine.driving import Driver
from tests.made_models.sampling import sampled

GROUPS, DRAWS = ([number for kind, number in UNITS if kind == each] for each in ("turns", "draws"))


@pytest.mark.long(3)
@pytest.mark.batch_as_alone
@pytest.mark.parametrize("number", GROUPS[: sampled(2, of=len(GROUPS))])
def test_many_turns_at_once_equal_turns_without_drafts(driver: Driver, told: type[Told], number: int) -> None:
    found = many_drafts.turns(driver, told, number)
    assert found["drafted"]
    assert found["differ"] == []


@pytest.mark.long(3)
def test_sampled_replies_are_distributed_as_without_drafts(driver: Driver, told: type[Told]) -> None:
    found = [many_drafts.draws(driver, told, number) for number in DRAWS[: sampled(1, of=len(DRAWS))]]
    assert sum(each["right"] for each in found) > len(found) * REPLIES / 20
    assert max(surprises(found)) < MOST_SURPRISE


def test_a_campaign_in_shards_is_kept_once_all_is_done_and_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve turns each, and draws that are equal on both sides; then one turn that differs, and one place's draws."""
    draws = {"plain": [{"7": 30, "9": 30}] * 8, "ahead": [{"7": 30, "9": 30}] * 8, "right": 9}
    turns = {"turns": 12, "drafted": 5, "right": 3, "differ": []}
    lines = [
        json.dumps({"kind": kind, "number": number, **(turns if kind == "turns" else draws)}) for kind, number in UNITS
    ]

    def verdict(*lines: str) -> tuple[int, str]:
        (tmp_path / "0-of-2.jsonl").write_text("\n".join(lines[::2]))
        (tmp_path / "1-of-2.jsonl").write_text("\n".join(lines[1::2]) + '\n{"kind": "tur')
        return many_drafts.report(many_drafts.done(tmp_path)), capsys.readouterr().out

    code, out = verdict(*lines)
    assert (code, "10008 turns" in out, "100320 tokens" in out) == (0, True, True)
    assert verdict(*lines[1:])[0] == 1
    assert verdict(*lines[:-1])[0] == 1
    assert verdict(json.dumps({**json.loads(lines[0]), "differ": ["turn 3, reply"]}), *lines[1:])[0] == 1
    other = {**json.loads(lines[-1]), "ahead": [{"7": 30, "9": 30}] * 7 + [{"7": 2000, "9": 30}]}
    assert verdict(*lines[:-1], json.dumps(other))[0] == 1
