"""What the demo says: each turn asks about what was told by then; one agent alone is told a secret; claims count."""

import io
import socket
from pathlib import Path

import pytest
from kvasir.cli.demo.demo import FULL, QUICK, Size
from kvasir.cli.demo.mac import macs
from kvasir.cli.demo.plot import Timing, plot
from kvasir.cli.demo.run import Claims
from kvasir.cli.demo.script import Story, told_story
from kvasir.cli.talking.turn import Stored, TurnResult
from kvasir.clients.messages import text_of
from rich.console import Console


@pytest.fixture(scope="module", params=[FULL, QUICK], ids=["full", "quick"])
def stories(request: pytest.FixtureRequest) -> list[Story]:
    size: Size = request.param
    return [told_story(*each) for each in zip(size.seeds, size.tokens, size.turns, strict=True)]


def test_each_turn_ends_with_a_question_about_what_was_told_by_then(stories: list[Story]) -> None:
    for story in stories:
        heard = ""
        for turn in story.turns:
            heard += "\n".join(text_of(message) for message in turn.messages[:-1])
            assert text_of(turn.messages[-1]) == turn.question.text
            assert turn.question.value in heard
            assert turn.question.answer not in text_of(turn.messages[-1])


def test_no_question_is_asked_twice(stories: list[Story]) -> None:
    for story in stories:
        asked = [turn.question.text for turn in story.turns] + [question.text for question in story.later[:4]]
        assert len(set(asked)) == len(asked)


def test_the_first_agent_has_a_secret_that_the_second_is_not_told(stories: list[Story]) -> None:
    one, two = stories
    assert one.secret is not None
    assert one.secret.value in one.text
    assert one.secret.value not in two.text
    assert one.agent != two.agent


def test_a_claim_that_is_not_true_is_shown_and_counted() -> None:
    shown = io.StringIO()
    claims = Claims(Console(file=shown, width=200))
    claims.check("water is wet", holds=True, found="measured")
    claims.check("water is dry", holds=False, found="not measured")
    assert [claim.text for claim in claims.broken] == ["water is dry"]
    assert "✗ NOT TRUE: water is dry (not measured)" in shown.getvalue()
    assert "✓ water is wet (measured)" in shown.getvalue()


@pytest.mark.long(2)
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "demo.png"

    def after(tokens: int, seconds: float) -> TurnResult:
        return TurnResult("", (), "", "", tokens, 0, 1, seconds, Stored(1, "committed", ""))

    timings = [Timing(*(after(tokens, tokens * each) for each in (5e-4, 5e-5, 4e-5))) for tokens in (1000, 2000)]
    plot(timings, path, "a test")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_mac_holds_its_port_until_its_store_starts(tmp_path: Path) -> None:
    with macs(tmp_path) as make:
        host, _, port = make("first", is_shared=True).store.address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
    with socket.socket() as other:
        other.bind((host, int(port)))
