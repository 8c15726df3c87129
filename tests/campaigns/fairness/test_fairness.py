"""The fairness campaign measures what it says: a sample of its rows, and its verdicts. Times gate nothing here."""

import asyncio
import math
from pathlib import Path

import pytest
from kvasir.errors import InvalidArgument, ResourceExhausted

from tests.campaigns.fairness.attacker import Attacker
from tests.campaigns.fairness.campaign import FLOORS_S, Verdict, try_row
from tests.campaigns.fairness.rows import ROWS
from tests.campaigns.fairness.worker import GIVES_UP_S, Worked

WORK = {"http", "health", "page", "look", "read", "ask", "write", "fork", "turn", "formed", "delete", "gap"}


def row(name: str) -> Verdict:
    [found] = [each for each in ROWS if each.name == name]
    return Verdict(found)


def worked(**seconds: float) -> Worked:
    return Worked({what: [each] * 100 for what, each in seconds.items()})


@pytest.mark.long(14)
@pytest.mark.parametrize("name", ["counting", "nested-json"])
def test_a_row_measures_all_that_b_does_alone_and_beside_the_attack(name: str, tmp_path: Path) -> None:
    verdict = asyncio.run(try_row(row(name).row, tmp_path, seconds=1.0, rounds=1))
    print(verdict.line())
    assert verdict.trouble == ""
    assert set(verdict.alone.seconds) == set(verdict.attacked.seconds) == WORK
    assert verdict.alone.failures == {}
    assert min(verdict.memory.most.values()) > 0


@pytest.mark.parametrize(("refused", "ends"), [("", True), ("INVALID_FIELD", False)])
def test_an_attack_whose_calls_are_wrong_ends_instead_of_attacking_nothing(refused: str, ends: bool) -> None:
    """A row holds beside any attack that the services refuse at once."""

    async def call(_: int) -> None:
        await asyncio.sleep(0)
        raise InvalidArgument("no such field", reason="INVALID_FIELD")

    async def scene() -> None:
        me = Attacker("unix:a", "unix:b", "http://c", ["token"])
        me.flood(2, call, refused)
        await asyncio.wait_for(me.go_on(), 0.2)

    with pytest.raises(InvalidArgument if ends else TimeoutError):
        asyncio.run(scene())


def test_rows_have_names_of_their_own_and_report_what_they_do() -> None:
    assert len({each.name for each in ROWS}) == len(ROWS)
    assert [each.name for each in ROWS if not each.attack.__doc__] == []


def test_a_row_holds_up_to_three_times_alone_and_not_beyond() -> None:
    verdict = row("stats")
    verdict.alone, verdict.attacked = worked(look=0.1, turn=1.0), worked(look=0.3, turn=3.0)
    assert verdict.problems == []
    verdict.attacked = worked(look=0.31, turn=3.1)
    assert len(verdict.problems) == 2


def test_what_is_below_its_floor_is_not_held_against_a_row() -> None:
    verdict = row("stats")
    verdict.alone, verdict.attacked = worked(look=0.001, gap=0.001), worked(look=0.09, gap=FLOORS_S["gap"])
    assert verdict.problems == []


def test_one_slow_call_in_fifty_is_seen() -> None:
    verdict = row("stats")
    verdict.alone = worked(look=0.01)
    verdict.attacked = Worked({"look": [0.01] * 49 + [5.0]})
    assert verdict.problems == ["look 5.00 s, alone 0.010 s"]


def test_misses_refusals_and_memory_are_reported() -> None:
    verdict = row("stats")
    with verdict.attacked.timed("turn"):
        raise ResourceExhausted("full", reason="QUEUE_FULL")
    verdict.attacked.misses["STORE_TIMEOUT"] += 2
    verdict.memory.most = {"store": verdict.row.store_mib + 1, "engine": 10}
    told = "; ".join(verdict.problems)
    assert all(part in told for part in ("1 x turn: QUEUE_FULL", "2 misses STORE_TIMEOUT", "store"))
    assert verdict.attacked.percentile("turn", 0.5) >= GIVES_UP_S
    assert math.isnan(verdict.alone.percentile("turn", 0.5))
