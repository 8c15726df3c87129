"""Conversations of agent clients, as recorded (`recordings/README.md`): from the second turn on nothing is computed
twice, there is one memory, none for a side call, and nothing that they send by default is refused."""

import json
import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.agents.__main__ import long_model
from tests.gateway.agents.clients import CLIENTS, LOOK
from tests.gateway.agents.recorder import computed_twice, goes_on
from tests.gateway.agents.replay import Replay, share
from tests.gateway.conftest import Front, running_front
from tests.made_models.sampling import first_and_in_turn

RECORDINGS = sorted((Path(__file__).parents[1] / "recordings").glob("*.jsonl"))
SMALLEST = Path(__file__).parents[1] / "recordings" / "pi.jsonl"
OTHERS = [path for path in RECORDINGS if path != SMALLEST]
TURNS = 200
LONG_S = 1800  # 3,200 turns of sixteen sessions take longer than other tests may


@pytest.fixture(scope="module")
def agents_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    root = tmp_path_factory.mktemp("agents")
    model = long_model(root / "kvasir-tiny")
    options = ("--memory-gib", "1")
    with running_front(root / "front", model=model, engine="scripted_engine", engine_options=options) as front:
        yield front


def play(talk: Replay, number: int) -> None:
    """What is done with a memory is what was done when it was recorded; nothing that is known is computed again."""
    line, exchange = talk.lines[number], talk.play(number)
    same = {"rewound": "extended"}  # what of a reply comes back is the client's choice
    done = exchange.headers.get("x-agent-memory", "")
    assert same.get(done, done) == same.get(line["memory"], line["memory"]), number
    assert exchange.headers.get("x-kvasir-side-call", "") == line["side_call"]
    agent = talk.agents.setdefault(exchange.headers.get("x-agent-id", ""), line["agent"])
    assert agent == line["agent"], "one memory for each conversation"
    assert number not in computed_twice(talk.exchanges)


def played(front: Front, recording: Path, killed_before: str) -> Replay:
    talk = Replay(front, recording)
    talk.decide()
    for number, line in enumerate(talk.lines):
        if killed_before and killed_before in str(line["body"]):
            front.house.restart()
            killed_before = ""
        if line["memory"] == "replaced":
            front.gateway.kill()  # between a compaction and the turn that goes on from it
            front.gateway.start()
        play(talk, number)
    return talk


@pytest.mark.long(5)
def test_a_recorded_conversation_computes_nothing_twice_also_after_a_kill(agents_front: Front) -> None:
    talk = played(agents_front, SMALLEST, LOOK)
    assert {line["side_call"] for line in talk.lines} == {"", "summary"}


@pytest.mark.long(14)
@pytest.mark.parametrize("recording", OTHERS, ids=lambda path: path.stem)
def test_each_clients_conversation_computes_nothing_twice_also_after_a_kill(
    agents_front: Front, recording: Path
) -> None:
    played(agents_front, recording, LOOK)


DEFAULT = "billing-line"
TIMES = f"{DEFAULT},system-clock,system-date"
TIMES_RULES = {"system-clock", "system-date"}


def late(number: int) -> str:
    """Each request's minute: the third comes after midnight."""
    moment = datetime(2026, 11, 25, 23, 58, 7, tzinfo=UTC) + timedelta(minutes=number)
    return f"Today is {moment:%Y-%m-%d}, and it is {moment:%H:%M:%S}."


def played_over_midnight(front: Front, recording: Path, volatile: str) -> None:
    """With the rules nothing is computed twice; without them each miss names the rule that helps. The memory is one."""
    talk = Replay(front, recording, session=f"at {volatile}")
    talk.volatile, talk.clock = volatile, late
    talk.decide()
    ends = [number for number, line in enumerate(talk.lines) if LOOK in str(line["body"]) or line["side_call"]]
    for number in range(ends[0] if ends[0] else ends[1]):
        if volatile == TIMES:
            play(talk, number)
        else:
            talk.play(number)
        headers = talk.exchanges[-1].headers
        helps = TIMES_RULES & set(json.loads(headers.get("x-kvasir-miss", "{}")).get("rules", ()))
        applied = [rule for rule in TIMES_RULES if rule in headers.get("x-kvasir-volatile", "")]
        if goes_on(talk.exchanges[-1]):
            assert (bool(applied), bool(helps)) == (volatile == TIMES, volatile != TIMES), headers
    assert len({each.headers["x-agent-id"] for each in talk.exchanges if "x-agent-id" in each.headers}) == 1


@pytest.mark.parametrize("volatile", first_and_in_turn([TIMES, DEFAULT], seconds=2), ids=["with the rules", "without"])
def test_a_recorded_conversation_with_a_clock_goes_on_over_midnight(agents_front: Front, volatile: str) -> None:
    played_over_midnight(agents_front, SMALLEST, volatile)


@pytest.mark.long(13)
@pytest.mark.parametrize("volatile", [TIMES, DEFAULT], ids=["with the rules", "without"])
@pytest.mark.parametrize("recording", OTHERS, ids=lambda path: path.stem)
def test_each_clients_conversation_with_a_clock_goes_on_over_midnight(
    agents_front: Front, recording: Path, volatile: str
) -> None:
    played_over_midnight(agents_front, recording, volatile)


def varied(talk: Replay, turn: int, random_of: random.Random) -> Any:
    """What changes from request to request and means nothing: billing lines, the order of tools and of their keys."""

    def change(body: dict[str, Any]) -> dict[str, Any]:
        body = {**body, "tools": random_of.sample(body["tools"], len(body["tools"]))} if body.get("tools") else body
        if isinstance(body.get("system"), list):
            lines = [{**block} for block in body["system"]]
            lines[0]["text"] = f"x-anthropic-billing-header: cc_version=2; cch={random_of.getrandbits(20):05x};"
            body = {**body, "system": lines}
        return body

    return change


def long_talk(front: Front, recording: Path, session: str, kills: Any = None, *, is_timed: bool = False) -> Replay:
    """The recording up to its compaction, then questions up to 200 turns, with side calls between. Texts are as long as
    the client's own: in shorter prompts what is new would be a larger share than it is.
    """
    talk, random_of = Replay(front, recording, session, shorter=1), random.Random(session)
    if is_timed:
        talk.volatile, talk.clock = f"{TIMES},tools-order", late
    asides = [number for number, line in enumerate(talk.lines) if line["side_call"] == "title"]
    first = next(line["agent"] for line in talk.lines if not line["side_call"])
    ended = [line["memory"] == "replaced" or line["side_call"] == "summary" for line in talk.lines]
    until = ended.index(True) if True in ended else len(ended)
    last = max(number for number in range(until) if talk.lines[number]["agent"] == first)
    for number in range(last + 1):
        talk.play(number)
    for turn in range(last + 1, TURNS):
        if kills is not None:
            kills(turn, random_of)
        if asides and turn % 20 == 0:
            aside = talk.aside(random_of.choice(asides))
            assert aside.headers["x-kvasir-side-call"] == "title"
        talk.more(turn, varied(talk, turn, random_of))
    return talk


def check(talk: Replay) -> None:
    shares = [share(each) for each in talk.exchanges if goes_on(each)]
    assert statistics.median(shares) >= 0.98, statistics.median(shares)
    assert min(shares) >= 0.9, min(shares)


@pytest.mark.campaign
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("is_timed", [False, True], ids=["", "with a clock over midnight"])
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_200_turns_compute_nothing_twice_with_kills_between_any_two(
    agents_front: Front, recording: Path, is_timed: bool
) -> None:
    def kill(_turn: int, random_of: random.Random) -> None:
        if random_of.random() < 0.05:
            agents_front.house.restart()

    Replay(agents_front, recording).decide()
    talk = long_talk(agents_front, recording, f"alone {is_timed}", kill, is_timed=is_timed)
    check(talk)
    assert len({each.headers["x-agent-id"] for each in talk.exchanges[-100:] if goes_on(each)}) == 1


@pytest.mark.campaign
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_sixteen_sessions_at_once_each_have_one_memory(agents_front: Front, recording: Path) -> None:
    Replay(agents_front, recording).decide()
    with ThreadPoolExecutor(16) as threads:
        talks = list(threads.map(lambda number: long_talk(agents_front, recording, str(number)), range(16)))
    main = [talk.exchanges[-1].headers["x-agent-id"] for talk in talks]
    assert len(set(main)) == 16
    for talk in talks:
        check(talk)


def test_each_client_has_a_recording() -> None:
    assert {path.stem for path in RECORDINGS} == set(CLIENTS)
