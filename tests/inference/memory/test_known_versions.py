"""What an engine knows of an agent's versions: a store that lacks the newest one is found out, and an agent that is
gone, or another one of its name, is believed."""

from typing import Any

import pytest
from kvasir.formats.digest import Digest

from inference_svc.memory.lines import lines
from inference_svc.memory.lines.known_versions import KnownVersions
from inference_svc.memory.outcomes import SnapshotOutcome, SnapshotState
from inference_svc.memory.store.answers import AgentGone, AgentHeads, Head, HeadMoved
from tests.inference.memory.lease_lab import Lab

NONE = AgentHeads()


def answer(number: int, made_unix_ms: int = 5, manifest: bytes = b"") -> AgentHeads:
    return AgentHeads(Head(number, Digest.of(manifest or bytes([number])), number - 1), made_unix_ms=made_unix_ms)


def committed(number: int) -> SnapshotOutcome:
    return SnapshotOutcome(SnapshotState.COMMITTED, number, "", Digest.of(bytes([number])))


@pytest.fixture(params=["read", "committed"])
def known(request: pytest.FixtureRequest) -> KnownVersions:
    """Of version 3."""
    made = KnownVersions()
    made.found(answer(2), made.now)
    if request.param == "read":
        made.found(answer(3), made.now)
    else:
        made.committed(committed(3), made.now)
    return made


@pytest.mark.parametrize(
    ("heads", "is_ahead", "then"),
    [
        (answer(2), True, 3),
        (NONE, True, 3),
        (answer(3, manifest=b"another"), True, 3),
        (answer(3), False, 3),
        (answer(3, made_unix_ms=4), False, 3),  # an index that was made again may have lost the agent's age
        (answer(4), False, 4),
        (answer(1, made_unix_ms=6), False, 1),  # of a later agent of that name
        (answer(2, made_unix_ms=4), True, 3),
        (answer(9, made_unix_ms=4), True, 3),  # of an agent before the one of that name
    ],
)
def test_a_store_that_lacks_a_known_version_is_found_out(
    known: KnownVersions, heads: AgentHeads, is_ahead: bool, then: int
) -> None:
    assert known.now.is_ahead_of(heads) == is_ahead
    known.found(heads, known.now)
    assert known.now.newest is not None
    assert known.now.newest.number == then


def test_an_answer_about_an_agent_that_is_gone_since_is_not_kept(known: KnownVersions) -> None:
    """Its event overtook the answer: kept, it would make each later agent of that name one that went back."""
    before = known.now
    known.gone()
    known.found(answer(4), before)
    known.committed(committed(4), before)
    assert not known.now.is_ahead_of(NONE)
    assert Digest.of(bytes([4])) in known.own
    known.found(answer(1), known.now)
    assert known.now.is_ahead_of(NONE)


def test_a_late_answer_to_a_commit_makes_no_engine_forget_a_newer_version_that_it_read(known: KnownVersions) -> None:
    before = known.now
    known.found(answer(5), before)
    known.committed(committed(4), before)
    assert known.now.newest == answer(5).newest.identity
    assert Digest.of(bytes([4])) in known.own


def test_a_commit_behind_an_older_copy_is_known(known: KnownVersions) -> None:
    """Its caller chose that: the version has a lower number than the one that was known."""
    known.committed(committed(2), known.now)
    assert known.now.newest == answer(2).newest.identity


@pytest.mark.parametrize(
    ("to", "stays"),
    [
        (answer(3), True),  # it was read before its event came
        (answer(4), True),
        (answer(3, manifest=b"another"), False),
        (answer(1), False),
    ],
)
def test_a_version_that_no_turn_made_takes_newer_ones_back(
    known: KnownVersions, to: AgentHeads, *, stays: bool
) -> None:
    known.moved(to.newest.identity)
    assert (known.now.newest is not None) == stays


async def test_events_reach_agents_that_left_and_those_whose_lines_are_used_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "_MOST_AGENTS", 2)
    lab = Lab()
    lab.remember("a")  # its line stays
    used: Any = lab.line("a")
    for agent in ("a", "b", "c"):
        known = lab.line(agent).known
        known.found(answer(3), known.now)
    await lab.lines.beat()
    assert lab.line("a") is used
    assert lab.line("c").known.now.newest == answer(3).newest.identity
    assert lab.line("b").known.now.newest is None
    for event in (AgentGone("a"), HeadMoved("c", Head(1, Digest.of(b"1"), 0, is_of_turn=False))):
        lab.lines._happened(event)
    for agent in ("a", "c"):
        assert lab.line(agent).known.now.newest is None
