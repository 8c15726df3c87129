"""`kvasir bench memory`: intervals, facts, leaks and claims by themselves, and a small campaign in real services."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.errors import DataLoss
from kvasir_bench.arithmetic import wilson
from kvasir_bench.scenarios import kept
from kvasir_bench.scenarios.accounting import Batch, Checked, Playthrough, age_of, leaks
from kvasir_bench.scenarios.campaign import Places, PlayScope, measure
from kvasir_bench.scenarios.claims import KILLED, KV, MOVED, PREFILL, WAYS, ages, claims, rows, wanted
from kvasir_bench.scenarios.gate import PhaseGate
from kvasir_bench.scenarios.retrieval import prompt_of
from kvasir_orchestrator import Scenario

from tests.cli.running import in_process
from tests.running.system_fixtures import House, running_house

GOSSIP = Scenario.shipped("gossip")


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_interval_is_wilsons() -> None:
    assert wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(4, 4)[1] == 1.0
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_fact_is_as_old_as_the_turns_since_it_was_first_told() -> None:
    found = {}
    for outcome in GOSSIP.outcomes:
        turn = GOSSIP.plan.find(outcome.phase, outcome.agent, outcome.round)
        assert turn is not None
        found[outcome.label] = age_of(GOSSIP, outcome, turn)
    assert found["Alice has heard from Bob what Eve fears"] == 3, "Bob was told in turn 1, Alice is asked in turn 4"
    assert found["Alice knows from Eve what Bob's secret word is"] == 8
    assert found["Bob does not learn that his word is known"] is None


def test_a_drawn_word_that_its_speaker_was_never_shown_is_a_leak() -> None:
    said = {turn.index: "I was not told." for turn in GOSSIP.plan.turns}
    assert list(leaks(GOSSIP, said)) == []
    bobs_last = GOSSIP.plan.of_agent("bob")[-1].index
    [leak] = leaks(GOSSIP, said | {bobs_last: "Bob's secret word is tavelo."})
    assert leak == f"gossip, turn {bobs_last}: bob was never shown word"
    assert list(leaks(GOSSIP, said | {bobs_last: "Eve fears owls. Otavelos."})) == [], "he was; and a part of a word"


def test_retrieval_gives_the_messages_that_fit_in_the_order_in_which_they_were_said() -> None:
    past = [
        message("system", "You are Bob."),
        message("user", "Eve fears owls."),
        message("assistant", "Noted."),
        message("user", "Lena lives in Oslo."),
    ]
    asked = [message("user", "What does Eve fear? Where does Lena live?")]
    assert prompt_of(past, asked, 1) in ([past[0], past[1], *asked], [past[0], past[3], *asked])
    lena = [message("user", "Lena lives in which town, Eve?")]
    assert prompt_of(past, lena, 1) == [past[0], past[3], *lena]
    assert prompt_of(past, lena, 2) == [past[0], past[1], past[3], *lena]
    assert prompt_of(past, asked, None) == [*past, *asked]
    assert prompt_of(past, [message("user", "Goodbye!")], 1) == [past[0], past[3], message("user", "Goodbye!")]


def of_way(way: str, right: int, prefilled: int) -> Playthrough:
    checked = [Checked(3, n < right) for n in range(100)]
    said = {0: ("Eve fears owls.", 6)}
    return Playthrough("prisoners-dilemma", 1, way, said, 1000, prefilled, [0.1], checked)


def test_claims_hold_only_of_what_was_found() -> None:
    good = [of_way(KV, 98, 150), of_way(PREFILL, 97, 1000), of_way("bm25-1", 50, 300), of_way("bm25-all", 97, 1000)]
    good += [of_way(KILLED, 98, 150), of_way(MOVED, 98, 150)]
    found = claims(good)
    assert [claim["is_met"] for claim in found] == [True] * 6
    assert [claim["is_exact"] for claim in found] == [False, False, True, True, True, True]
    assert [row["age"] for row in ages(good)] == ["0-4"] * 6
    batch = Batch("prisoners-dilemma", KV, 2, 1.0, 200, 100)
    row = rows(good, [batch])[0]
    assert (row["share_of_prefill"], row["hot_bytes"], row["stored_bytes"]) == (0.15, 100, 50)
    assert (row["conversations"], row["distinct"]) == (1, 1)
    assert wanted(good) == {**wanted(good), "is_met": True}  # type: ignore[dict-item]
    spoilt = {0: of_way(KV, 80, 1000), 2: of_way("bm25-1", 96, 300)}
    for place, played in spoilt.items():
        bad = [spoilt[place] if n == place else each for n, each in enumerate(good)]
        assert not all(claim["is_met"] for claim in claims(bad)), played.way
    other = dataclasses.replace(good[4], said={0: ("Eve fears owls.", 7)})
    assert "1 turns differ" in [claim["found"] for claim in claims([*good[:4], other]) if not claim["is_met"]]
    assert [claim["what"] for claim in claims(good[4:])] == ["no agent says what it was never shown"]
    leaking = dataclasses.replace(good[5], leaks=["gossip, turn 1: bob was never shown word"])
    assert "1 leaks" in [claim["found"] for claim in claims([*good[:5], leaking]) if not claim["is_met"]]


def test_parts_of_a_campaign_add_up_and_what_was_cut_short_does_not_count(tmp_path: Path) -> None:
    def part(name: str, variant: int, ways: tuple[str, ...]) -> Path:
        for way in ways:
            played = dataclasses.replace(of_way(way, 98, 100), variant=variant)
            kept.append(tmp_path / name, Batch("prisoners-dilemma", way, 1, 1.0, 200, 100), [played])
        return tmp_path / name

    one, two = part("one", 1, WAYS), part("two", 2, WAYS)
    part("two", 3, WAYS[:-1])
    assert kept.read([part("killed", 4, (KILLED,)), part("rest", 4, tuple(set(WAYS) - {KILLED}))], WAYS)[0]
    two.write_bytes(two.read_bytes() + b'[{"scenario": "cut')
    played, batches = kept.read([one, two], WAYS)
    assert sorted({each.variant for each in played}) == [1, 2]
    assert played[0] == of_way(KV, 98, 100)
    assert len(batches) == len(played) == 2 * len(WAYS)
    ended = in_process("bench", "memory", "--results", one, "--results", two, "--json")
    [row] = [row for row in ended.value["rows"] if (row["scenario"], row["way"]) == ("all", KV)]
    settings = ended.value["settings"]
    assert (settings["variants"], settings["together_least"], settings["together"], row["facts"]) == (2, 1, 1, 200)
    assert (row["conversations"], row["distinct"]) == (2, 1), "both say the same words: one is no more evidence"
    refused = in_process("bench", "memory", "--way", "bm25-3", "--json")
    assert "expected one of kv, prefill, bm25-1" in refused.value["error"]["message"]
    with pytest.raises(DataLoss, match="variant 1, was played twice"):
        kept.read([one, one], WAYS)
    one.write_text("{}\n")
    with pytest.raises(DataLoss, match="expected lines of"):
        kept.read([one], WAYS)


def test_of_a_batch_that_is_not_whole_counts_what_was_played_under_every_way(tmp_path: Path) -> None:
    """However the variants were divided into batches, each way has the same conversations, on the same engine."""

    def part(name: str, way: str, variants: tuple[int, ...], engine: str = "cpu, float32") -> None:
        played = [dataclasses.replace(of_way(way, 98, 100), variant=variant) for variant in variants]
        batch = Batch("prisoners-dilemma", way, len(variants), 1.0 * len(variants), 200, 100, engine)
        kept.append(tmp_path / name, batch, played)

    for way in WAYS:
        for variants in ((1,), (2, 3)) if way in (KV, KILLED) else ((1,), (2,)):
            part("parts", way, variants)
    played, batches = kept.read([tmp_path / "parts"], WAYS)
    for way in WAYS:
        assert sorted(each.variant for each in played if each.way == way) == [1, 2]
    assert [(each.conversations, each.wall_s, each.hot_bytes) for each in batches if each.way == KV] == [
        (1, 1.0, 200),
        (1, 1.0, 100),
    ]
    for way in WAYS:
        part("mixed", way, (7,), "gpu, bfloat16" if way == KILLED else "cpu, float32")
    with pytest.raises(DataLoss, match="variant 7: expected one engine, got cpu, float32 and gpu, bfloat16"):
        kept.read([tmp_path / "mixed"], WAYS)


def test_at_a_gate_something_happens_once_while_no_turn_is_in_flight() -> None:
    happened: list[str] = []

    async def conversation(gate: PhaseGate, number: int) -> None:
        for phase in range(3):
            await asyncio.gather(turn(gate, number, phase), turn(gate, number, min(phase + 1, 2)))
        gate.end(number)

    async def turn(gate: PhaseGate, number: int, phase: int) -> None:
        async with gate.turn(number, phase):
            happened.append(f"{phase} begins")
            await asyncio.sleep(0.002 * (number + 1))
            happened.append(f"{phase} ends")

    async def both() -> None:
        async def act() -> None:
            happened.append("act begins")
            await asyncio.sleep(0.005)
            happened.append("act ends")

        gate = PhaseGate(2, (1, 2), act)
        await asyncio.gather(conversation(gate, 0), conversation(gate, 1))

    asyncio.run(asyncio.wait_for(both(), 10))
    first, second = [place for place, what in enumerate(happened) if what == "act begins"]
    for phase, act in ((0, first), (1, second)):
        assert happened[act + 1] == "act ends"
        assert sum(what.endswith("begins") for what in happened[:act]) == sum("ends" in what for what in happened[:act])
        assert f"{phase + 1} begins" not in happened[:act]


async def test_what_breaks_at_a_gate_is_raised_by_all_who_wait_and_by_those_who_come() -> None:
    async with asyncio.timeout(10):

        async def act() -> None:
            raise RuntimeError("no store")

        gate = PhaseGate(1, (0,), act)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no store"):
                async with gate.turn(0, 0):
                    pass


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("measured")) as house:
        yield house


def played_by(house: House, second: House, ways: tuple[str, ...]) -> list[Playthrough]:
    scope = PlayScope(["code-review"], ways, variants=2, together=1, kills_once=True, time_limit_s=0.0, warms_up=True)
    places = Places(house.engine.address, second.engine.address, house.restart)
    said: list[str] = []
    played, batches = asyncio.run(measure(scope, places, said.append))
    assert said[:2] == ["warming up: code-review"] * 2
    assert {each.variant for each in played} == {1}, "what warmed the engines up does not count"
    assert [each.way for each in played] == [each.way for each in batches]
    assert sorted(each.way for each in played) == sorted(ways)
    with house.client() as client:
        assert not client.list_agents().agents, "agents of a way are gone before the next one"
    assert batches[-1].stored_bytes > 0
    assert batches[0].engine == "cpu, float32"
    return played


@pytest.mark.long(16)
def test_memory_says_what_a_full_prefill_says_also_after_a_kill(house: House) -> None:
    played = played_by(house, house, (KV, PREFILL, "bm25-1", KILLED))
    found = {claim["what"].split(" (")[0]: claim["is_met"] for claim in claims(played)}
    assert found["no agent says what it was never shown"]
    assert found["kv prefills fewer tokens than prefill"]
    assert found["killed says what kv says, word for word and in as many tokens"]
    assert found["kv is as accurate as prefill"]
    prefill, _, kv, _ = played
    assert (prefill.way, kv.way) == (PREFILL, KV), "nothing of kv's is in the store before a full prefill"
    assert all(check.is_met for check in kv.checked)
    assert prefill.prefilled_tokens == prefill.prompt_tokens, "nothing is reused without a memory"


@pytest.mark.campaign
def test_memory_says_the_same_in_another_store_and_engine(house: House, tmp_path: Path) -> None:
    with running_house(tmp_path / "second") as second:
        played = played_by(house, second, (KV, MOVED))
        assert next(claim for claim in claims(played) if "moved" in claim["what"])["is_met"]
        with second.client() as client:
            assert not client.list_agents().agents
