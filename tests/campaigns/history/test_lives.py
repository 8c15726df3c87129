"""A life hides no fault: not where it ends unclear, nor behind an act that deletes nothing, nor as a proxy's."""

import asyncio
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1.manifest_pb2 import Digest, Message
from kvasir.clients import Choice, Reply
from kvasir.errors import KvasirError, NotFound, Unavailable
from kvasir.inference.v1 import inference_pb2

from tests.campaigns.history.lives import Life, Lives, _tokenizer, _UnclearError
from tests.campaigns.history.oracle import Said
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tools.kvasir_tiny.words import Dice


class _Breaks:
    """A client whose every turn ends as one does behind a proxy that ends it."""

    async def reply(self, **_: Any) -> Reply:
        raise KvasirError("Stream removed", reason="")


class _Answers:
    """A client whose turns have prompts with the words of these turns; and the store, whose versions have those."""

    def __init__(self, turns: list[tuple[str, str]]) -> None:
        self._turns, self._stored = iter(turns), ""

    async def reply(self, **_: Any) -> Reply:
        prompt, self._stored = next(self._turns)
        state = inference_pb2.SNAPSHOT_STATE_COMMITTED if self._stored else inference_pb2.SNAPSHOT_STATE_NONE
        finished = inference_pb2.Finished(snapshot=inference_pb2.SnapshotOutcome(state=state, version=1))
        ids = _tokenizer().encode("".join(map(_rendered, prompt.split()))).ids
        return Reply(inference_pb2.Started(prompt_token_ids=ids), [Choice(finished=finished)])

    async def get_snapshot(self, *_: object, **__: object) -> tuple[pb.SnapshotVersion, bytes]:
        made = SyntheticAgent(SMALL, 1).turn(30).manifest
        made.messages.extend(Message(role="user", content=f"m{turn}. door") for turn in self._stored.split())
        return pb.SnapshotVersion(version=1), made.SerializeToString()


def _rendered(turn: str) -> str:
    return f"<|im_start|>user\nm{turn}. door<|im_end|>\n<|im_start|>assistant\nI am m9.<|im_end|>\n"


class _Unclear(Life):
    """Its turn is wrong and its rollback unclear, which is known first."""

    async def _say(self, acknowledged: int | None) -> tuple[Said | None, Reply]:
        await asyncio.sleep(0.2)
        self.history.problems.append("wrong")
        return None, Reply()

    async def _rolled_back(self) -> tuple[int, int | None] | None:
        raise _UnclearError

    async def live(self) -> None:
        self.history.acknowledged = 1
        await self.two_at_once()


class _OneVersion(Life):
    async def _some_version(self) -> pb.SnapshotVersion | None:
        return pb.SnapshotVersion(version=1, manifest=Digest(hash="first"))


def _lives(*clients: Any, doors: Any = ()) -> Lives:
    return Lives(clients, (), 1, doors=doors)


def test_a_life_that_ends_unclear_reports_its_problems_also_beside_the_unclear_act(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.campaigns.history.lives.Life", _Unclear)
    lives = _lives("client")
    asyncio.run(lives._live("ada"))
    assert lives.findings.lives == 0
    assert [problem.split(" [")[0] for problem in lives.findings.problems] == ["ada: wrong"]


def test_an_acknowledged_version_is_looked_for_after_an_unclear_rollback_and_not_after_an_unclear_deletion() -> None:
    class Away:
        async def rollback_agent(self, *_: object) -> None:
            raise Unavailable("away")

        async def delete_agent(self, *_: object) -> None:
            raise Unavailable("away")

    lives = _lives("client")
    lives.store = Away()  # type: ignore[assignment]
    lives.ledger.acknowledged("ada", 1, "hash")
    life = _OneVersion(lives, "ada")
    with pytest.raises(_UnclearError):
        asyncio.run(life.roll_back())
    assert lives.ledger.agents == {"ada": {1: "hash"}}
    with pytest.raises(_UnclearError):
        asyncio.run(life.delete())
    assert lives.ledger.agents == {}


def test_a_rollback_that_brings_back_another_memory_and_one_that_is_lost_are_noticed() -> None:
    class Forgets:
        async def rollback_agent(self, *_: object) -> pb.SnapshotVersion:
            return pb.SnapshotVersion(version=3, manifest=Digest(hash="second"))

        async def get_snapshot(self, *_: object, **__: object) -> tuple[pb.SnapshotVersion, bytes]:
            raise NotFound("no version 3")

    lives = _lives("client")
    lives.store = Forgets()  # type: ignore[assignment]
    life = _OneVersion(lives, "ada")
    with pytest.raises(NotFound):
        asyncio.run(life.roll_back())
    assert life.history.problems == ["a rollback to version 1 brought back another memory"]
    assert lives.ledger.agents == {"ada": {3: "second"}}
    asyncio.run(lives.look_for_all())
    assert lives.findings.problems == ["ada: version 3 was acknowledged: no version 3"]


def test_lives_end_after_the_act_in_which_a_campaign_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    acts = list[str]()

    async def act(life: Life) -> None:
        acts.append(life.name)

    for name in ("turn", "roll_back", "delete", "fork_back", "import_back", "cancelled_turn", "two_at_once"):
        monkeypatch.setattr(Life, name, act)
    asyncio.run(_lives("client").run(100, 1, 60, lambda: len(acts) >= 15))
    assert acts == ["agent 0"] * 12 + ["agent 1"] * 3


@pytest.mark.parametrize(("act", "place", "known"), [("turn", 0, {"ada": {1: "hash"}}), ("delete", 13, {})])
def test_an_act_that_is_broken_off_hides_no_problem_and_no_version_unless_it_may_have_deleted_it(
    monkeypatch: pytest.MonkeyPatch, act: str, place: int, known: dict[str, dict[int, str]]
) -> None:
    async def broken_off(life: Life) -> None:
        life.history.problems.append("found before")
        raise asyncio.CancelledError

    monkeypatch.setattr(Life, act, broken_off)
    monkeypatch.setattr(Dice, "pick", lambda _, among: among[place])
    lives = _lives("client")
    lives.ledger.acknowledged("ada", 1, "hash")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(lives._live("ada"))
    assert lives.ledger.agents == known
    assert lives.findings.problems == ["ada: found before []"]


@pytest.mark.parametrize("is_door", [True, False])
def test_a_stream_that_was_removed_is_excused_behind_a_proxy_alone(is_door: bool) -> None:
    client = _Breaks()
    life = Life(_lives(client, client, doors=[client] if is_door else []), "ada")
    asyncio.run(life.turn())
    assert bool(life.history.problems) is not is_door


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ([("1", "1"), ("1 2", "1 2"), ("1 2 3", "1 2 3")], ""),
        ([("1", "1"), ("1 2", "3 2")], "turn 2: stored {2, 3}, expected {1, 2}"),
        ([("1", "1"), ("1", "1")], "turn 2: its prompt has the words of {1}"),
        ([("1", "1"), ("1 2", "1 2"), ("2 3", "2 3")], "turn 3: its prompt has the words of {2, 3}, 2 knew {1, 2}"),
        ([("1", ""), ("2", "2")], ""),
        ([("1", ""), ("1 2", "1 2")], "turn 2 knows [1], which was taken back before it began"),
    ],
)
async def test_a_turn_is_judged_by_the_words_of_its_prompt(turns: list[tuple[str, str]], problem: str) -> None:
    world = _Answers(turns)
    lives = _lives(world)
    lives.store = world  # type: ignore[assignment]
    life = Life(lives, "ada")
    for _ in turns:
        await life.turn()
    assert (life.history.problems)[:1] == ([problem] if problem else [])
