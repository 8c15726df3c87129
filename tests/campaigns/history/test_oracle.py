"""The oracle itself: it accepts what may be, and tells each of its two wrongs."""

from tests.campaigns.history.oracle import History, Said


def history(*parents: int | None) -> History:
    """Turns 1, 2, … that extended these, the last of them acknowledged."""
    made = History()
    for number, parent in enumerate(parents, start=1):
        made.judge(Said(number, parent), None, set())
    made.stored(len(parents))
    return made


def judged(made: History, parent: int | None, *, is_whole: bool = False) -> list[str]:
    turn = Said(max(made.turns, default=0) + 1, parent, is_whole=is_whole)
    made.judge(turn, made.acknowledged, set(made.taken_back))
    return made.problems


def test_a_turn_that_extends_the_newest_or_what_was_never_taken_back_is_right() -> None:
    assert judged(history(None, 1), 2) == []
    made = history(None, 1)
    assert judged(made, 2) == []  # not acknowledged, and in the memory all the same
    assert judged(made, 3) == []


def test_a_turn_without_what_was_acknowledged_is_wrong_unless_its_caller_said_all() -> None:
    assert "lacks turn 2" in judged(history(None, 1), 1)[0]
    assert judged(history(None, 1), None, is_whole=True) == []
    made = history(None)
    made.judge_empty(made.acknowledged)
    assert made.problems


def test_a_turn_that_knows_what_was_taken_back_is_wrong_until_it_is_brought_back() -> None:
    made = history(None, 1, 2)
    made.went_back(1)
    assert judged(made, 1) == []
    assert "knows [2, 3]" in judged(made, 3)[0]
    made = history(None, 1, 2)
    made.went_back(1)
    made.went_back(3)
    assert judged(made, 3) == []


def test_a_turn_of_which_nobody_heard_is_judged_when_it_is_found_by_the_state_when_it_began() -> None:
    made = history(None, 1)
    made.went_back(1)
    made.begun(Said(3, 1))
    made.found(3, 1)
    assert made.problems == []
    made.found(3, 2)
    assert "turn 3 knows [2]" in made.problems[0]
    made = history(None, 1)
    made.begun(Said(3, 2))
    made.found(3, 1)
    assert "turn 3 lacks turn 2" in made.problems[0]
    made = history(None, 1)
    made.went_back(1)
    made.begun(Said(3, 1))
    made.went_back(2)  # it may have been served after this
    made.found(3, 2)
    assert made.problems == []


def test_a_turn_beside_a_rollback_is_served_before_or_after_it_and_not_in_between() -> None:
    for parent in (2, 1):
        made = history(None, 1)
        made.judge_beside(Said(3, parent), 2, set(), to=1)
        assert made.problems == []
        made.went_back(1, but=3 if parent == 1 else None)
        assert bool(judged(made, 3)) is (parent == 2)
    made = history(None, 1, 2)
    made.judge_beside(Said(4, 2), 3, set(), to=1)
    assert made.problems
