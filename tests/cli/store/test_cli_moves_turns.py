"""`kvasir agents move --to` with a turn that runs: handed over, tried again, or waited for."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cli import moving
from kvasir.errors import FailedPrecondition, KvasirError, NotFound, Unavailable

LATE = Unavailable("its store is late", reason="MEMORY_UNREADABLE", retry_after_s=1.0)
AWAY = Unavailable("the engine of peer studio does not answer", reason="PEER_UNAVAILABLE", retry_after_s=5.0)
UNLIKE = FailedPrecondition("other weights", reason="HANDOVER_NOT_ALIKE")
OVER = NotFound("no such turn", reason="TURN_NOT_FOUND")


@pytest.mark.parametrize(
    ("answers", "expected", "pauses"),
    [
        ([None], "handed_over", []),
        ([OVER], None, []),
        ([LATE, AWAY, None], "handed_over", [1.0, 2.0]),
        ([LATE, OVER], "waited_for", [1.0]),
        ([LATE, LATE, LATE], "waited_for", [1.0, 1.0]),
        ([UNLIKE], "waited_for", []),
        ([LATE, UNLIKE], "waited_for", [1.0]),
    ],
)
def test_a_turn_that_is_refused_for_now_is_handed_over_a_little_later(
    answers: Sequence[KvasirError | None], expected: str | None, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, said, paused = list(answers), list[str](), list[float]()

    def hand_over(peer: str, agent_id: str) -> None:
        assert (peer, agent_id) == ("studio", "ada")
        if (answer := left.pop(0)) is not None:
            raise answer

    @contextlib.contextmanager
    def engine_client(_: object) -> Iterator[Any]:
        yield SimpleNamespace(hand_over=hand_over, list_turns=list)

    monkeypatch.setattr(moving, "engine_client", engine_client)
    monkeypatch.setattr(moving.time, "sleep", paused.append)
    caller: Any = SimpleNamespace(is_engine_of_store=True, say=said.append)
    client: Any = SimpleNamespace(
        get_capabilities=lambda: SimpleNamespace(peers=["studio"]), get_agent=lambda _: "its record"
    )
    assert moving._turn_handed_over(caller, client, "ada", "studio") == expected
    assert (left, paused) == ([], pauses)
    refused = [f"ada's turn is not handed over: {each.message}" for each in answers if each not in (None, OVER)]
    assert [each for each in said if each != "its end is waited for"] == refused
