"""Scenarios run against real services: turns extend memories, runs survive every death, refusals are told."""

import asyncio
import json
import re
import resource
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from kvasir.clients import AioInferenceClient
from kvasir.errors import (
    Cancelled,
    Conflict,
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from kvasir_orchestrator import (
    Answer,
    EngineMemory,
    Event,
    Journal,
    ReplyPiece,
    ReplyRequest,
    Retries,
    RunDone,
    Scenario,
    TurnDone,
    TurnRetried,
    TurnStarted,
    forget,
    run,
    shipped_names,
)
from kvasir_orchestrator.examples import plain_asyncio

from tests.cli.running import in_process
from tests.made_models.sampling import IS_WHOLE
from tests.running.programs import Program
from tests.running.programs import run as run_program
from tests.running.system_fixtures import House, running_house

TEXT = """
name: NAME
sampling: {max_tokens: 24}
agents:
  marco: {persona: You are Marco.}
  lena: {persona: You are Lena.}
  scribe: {persona: You are Nina., lifetime: ephemeral}
phases:
  - name: apart
    agents: [marco, lena]
    together: true
    agent_prompts: {marco: Marco lives in Porto., lena: Lena lives in Oslo.}
    visibility: {whispers: {marco: [], lena: []}}
  - name: yard
    agents: [marco, lena]
    agent_prompts: {marco: "Where does Bob live?", lena: "Where does Lena live?"}
    visibility: {readers: [scribe]}
  - name: verdict
    agents: [scribe]
    prompt: "Notes: ${yard.messages[lena]}"
outcomes:
  - {label: Lena knows her town, phase: yard, agent: lena, contains: Oslo}
  - {label: Lena does not know Marco's, phase: yard, agent: lena, lacks: Porto}
"""


def named(name: str) -> Scenario:
    return Scenario.parse(TEXT.replace("NAME", name))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("scenarios")) as house:
        yield house


def events_of(
    house: House, scenario: Scenario, journal: Journal | None = None, retries: Retries = Retries()
) -> list[Event]:
    async def collect() -> list[Event]:
        async with AioInferenceClient.connect(house.engine.address) as client:
            return [event async for event in run(scenario, EngineMemory(client), journal=journal, retries=retries)]

    return asyncio.run(collect())


def words(events: list[Event]) -> dict[int, str]:
    return {event.turn.index: event.answer.text for event in events if isinstance(event, TurnDone)}


@pytest.fixture(scope="module")
def reference(house: House) -> dict[int, str]:
    """What is said when nothing happens."""
    return words(events_of(house, named("reference")))


@pytest.mark.long(2)
def test_every_turn_but_an_agents_first_extends_its_memory(house: House) -> None:
    scenario = named("extends")
    events = events_of(house, scenario)
    done = [event for event in events if isinstance(event, TurnDone)]
    assert [event.turn.index for event in sorted(done, key=lambda each: each.turn.index)] == [0, 1, 2, 3, 4]
    with house.client() as client:
        for event in done:
            before = scenario.transcript(event.turn.agent, words(events), until=event.turn.index)
            if event.is_first:
                assert event.answer.cached_tokens < 256, "less than a block, which others may share"
            else:
                remembered = client.count_tokens(messages=before)
                assert event.answer.match == "extend"
                assert event.answer.cached_tokens >= remembered - 8, "all but what the template says before a reply"
        last = events[-1]
        assert isinstance(last, RunDone)
        assert (last.outcomes_met, last.outcomes, last.extended, last.later_turns) == (2, 2, 2, 2)
        assert last.prompt_tokens == sum(event.answer.prompt_tokens for event in done)
        assert last.new_tokens == sum(event.answer.new_tokens for event in done)
        left = [agent.agent_id for agent in client.list_agents(name_prefix="extends/").agents]
        assert left == ["extends/lena", "extends/marco"], "the ephemeral scribe is gone"


@pytest.fixture(scope="module")
def small_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("small"), engine_options=("--context-tokens", "320")) as house:
        yield house


def outgrowing(name: str, on_full: str) -> Scenario:
    """One agent is told a fact in each of ten rounds, which a context of 320 tokens does not hold, and asked for it."""
    names = ("Velora", "Tamsik", "Moran", "Delis", "Karu", "Sovi", "Belor", "Ranik", "Omar", "Lena")
    prompts = [f"{each}'s locker number is {1234 + 177 * n}. What is it?" for n, each in enumerate(names)]
    prompts[-1] = "Lena's locker number is 4127."
    return Scenario.parse(
        json.dumps(
            {
                "name": name,
                "sampling": {"max_tokens": 24},
                "agents": {"ada": {"persona": "You are Ada.", "on_full": on_full}},
                "phases": [
                    {"name": "told", "agents": ["ada"], "rounds": len(names), "agent_prompts": {"ada": prompts}},
                    {"name": "asked", "agents": ["ada"], "prompt": "What is Lena's locker number?"},
                ],
                "outcomes": [{"label": "newest", "phase": "asked", "agent": "ada", "contains": "4127"}],
            }
        )
    )


@pytest.mark.long(28)
def test_an_agent_goes_on_beyond_its_context_as_its_on_full_says(small_house: House) -> None:
    events = events_of(small_house, outgrowing("drops", "drop_oldest:0.4"))
    done = [event for event in events if isinstance(event, TurnDone)]
    last = events[-1]
    assert isinstance(last, RunDone)
    assert (len(done), last.outcomes_met) == (11, 1)
    assert [event.answer.left_out for event in done if event.answer.left_out], "something did not fit"
    assert last.extended == last.later_turns, "a shortened memory is extended too, and is hot"
    with pytest.raises(ResourceExhausted) as refused:
        events_of(small_house, outgrowing("refuses", "refuse"))
    assert refused.value.reason == "CONTEXT_EXCEEDED"


@pytest.mark.long(3)
def test_turns_that_hear_nothing_of_each_other_run_beside_each_other(house: House) -> None:
    kinds = [type(event) for event in events_of(house, named("beside")) if isinstance(event, TurnStarted | TurnDone)]
    assert kinds[:2] == [TurnStarted, TurnStarted]


@pytest.mark.long(4)
def test_a_second_run_goes_on_from_what_permanent_agents_remember(house: House) -> None:
    events_of(house, named("again"))
    second = events_of(house, named("again"))
    of_marco = next(event for event in second if isinstance(event, TurnDone) and event.turn.agent == "marco")
    assert of_marco.answer.match == "extend"
    with house.client() as client:
        assert client.get_agent("again/marco").lines[0].version == 4


@pytest.mark.long(3)
def test_a_dry_run_counts_the_tokens_that_turns_will_have(house: House, tmp_path: Path) -> None:
    file, done = tmp_path / "counted.yaml", events_of(house, named("uncounted"))
    file.write_text(TEXT.replace("NAME", "counted"))
    command = ("--engine", house.engine.address, "scenario", "run", file, "--dry-run")
    rows = {row["turn"]: row for row in in_process(*command, "--json").value}
    for event in (event for event in done if isinstance(event, TurnDone)):
        row, answer = rows[event.turn.index], event.answer
        assert (row["reused_tokens"] > 0) == (not event.is_first)
        if event.is_first and not event.turn.heard and event.turn.agent != "scribe":
            assert row["prompt_tokens"] == answer.prompt_tokens
        assert abs(row["prompt_tokens"] - row["reused_tokens"] - answer.prompt_tokens + answer.cached_tokens) < 20
    whole = sum(row["prompt_tokens"] for row in rows.values())
    assert re.search(rf"\n\d+ of {whole} prompt tokens computed, \d", in_process(*command).out)


def killed_and_gone_on_with(house: House, text: str, kills: Iterable[int], tmp_path: Path) -> list[dict[str, Any]]:
    """Run a file, kill everything with -9 whenever so many turns are in the journal; what the last runner printed. Each
    memory must come back from the store once after a kill.
    """
    file, journal = tmp_path / "killed.yaml", tmp_path / "killed.jsonl"
    file.write_text(text)
    known: list[int] = []  # how many turns were noted at each kill
    command = ("--engine", house.engine.address, "scenario", "run", str(file), "--journal", str(journal), "--json")
    for turns in kills:
        runner = Program("kvasir", command, out=tmp_path / f"out{turns}", err=tmp_path / f"err{turns}")
        give_up = time.monotonic() + 300  # a campaign waits its turn on a busy machine
        while not journal.exists() or journal.read_bytes().count(b"\n") <= turns:
            assert time.monotonic() < give_up, (tmp_path / f"err{turns}").read_text()
            time.sleep(0.01)
        runner.kill()
        house.kill()
        runner.wait()
        known.append(len(Journal.read(journal).answers))
        house.start()
    ended = run_program("kvasir", *command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert Journal.read(journal).is_finished
    assert_warm_once(journal, known)
    return [json.loads(line) for line in ended.stdout.splitlines()]


def assert_warm_once(journal: Path, known: list[int]) -> None:
    """An agent's first turn after a kill has its memory from the store; the turns until the next kill find it hot."""
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    done = [line for line in lines if "turn" in line]
    hot: set[str] = set()
    spoken: dict[str, int] = {}  # tokens that an agent remembers
    for number, line in enumerate(done):
        agent, answer = line["agent"], line["answer"]
        if number in known:
            hot.clear()
        if answer["source"] == "replay":  # stored before the kill, and not noted; its memory is not read for that
            assert agent not in hot
            assert any(number >= count for count in known)
        elif agent in spoken:
            assert answer["source"] == ("hot" if agent in hot else "warm"), (number, line)
            assert answer["cached_tokens"] >= spoken[agent] - 1, "but for the token that ended the reply"
        if answer["source"] != "replay":
            hot.add(agent)
        spoken[agent] = answer["prompt_tokens"] + answer["completion_tokens"]
    assert any(line["answer"]["source"] == "warm" for line in done)


def said_in(rows: list[dict[str, Any]]) -> dict[int, str]:
    return {row["turn"]: row["text"] for row in rows if row["event"] == "turn_done"}


@pytest.mark.long(5)
def test_everything_killed_between_turns_and_the_conversation_is_the_same(
    house: House, reference: dict[int, str], tmp_path: Path
) -> None:
    rows = killed_and_gone_on_with(house, TEXT.replace("NAME", "killed"), (2, 3), tmp_path)
    assert said_in(rows) == reference
    assert (rows[-1]["outcomes_met"], rows[-1]["extended"]) == (2, 2)


def test_a_turn_that_was_stored_and_not_noted_is_not_done_twice(house: House, tmp_path: Path) -> None:
    scenario, path = named("noted"), tmp_path / "run.jsonl"
    with Journal.begin(path, scenario, "1") as journal:
        before = words(events_of(house, scenario, journal))
    head, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([head, *(line for line in lines if json.loads(line).get("turn", 9) < 3)]))
    with Journal.resume(path, scenario) as journal:
        assert words(events_of(house, scenario, journal)) == before
        assert journal.answers[3].source == "replay"
    with house.client() as client:
        assert client.get_agent("noted/lena").lines[0].version == 2


@pytest.mark.campaign
@pytest.mark.parametrize("name", shipped_names())
def test_everything_killed_after_every_turn_of_a_shipped_scenario(house: House, name: str, tmp_path: Path) -> None:
    scenario = Scenario.shipped(name)
    alone = Scenario.parse(scenario.text.replace(f"name: {name}", f"name: alone-{name}"))
    rows = killed_and_gone_on_with(house, scenario.text, range(1, len(scenario.plan.turns)), tmp_path)
    assert said_in(rows) == words(events_of(house, alone))
    assert (rows[-1]["outcomes_met"], rows[-1]["extended"]) == (rows[-1]["outcomes"], rows[-1]["later_turns"])


# The page's example below is the third; the campaign's runs, which are killed, are of all.
SOME = ("code-review", "prisoners-dilemma")


@pytest.mark.long(7)
def test_shipped_scenarios_end_as_they_should_all_at_once(house: House) -> None:
    names = shipped_names() if IS_WHOLE else SOME

    async def all_at_once() -> list[Event]:
        async with AioInferenceClient.connect(house.engine.address) as client:
            runs = [_last(run(Scenario.shipped(name, 1), EngineMemory(client))) for name in names]
            return await asyncio.gather(*runs)

    for name, done in zip(names, asyncio.run(all_at_once()), strict=True):
        assert isinstance(done, RunDone)
        assert (done.outcomes_met, done.extended) == (done.outcomes, done.later_turns)
        assert name != "prisoners-dilemma" or done.new_tokens <= 0.15 * done.prompt_tokens


async def _last(events: AsyncIterator[Event]) -> Event:
    return [event async for event in events][-1]


@pytest.mark.long(4)
async def test_a_turn_that_breaks_is_requested_again_and_that_is_reported(
    house: House, reference: dict[int, str]
) -> None:
    scenario, events = named("breaks"), []
    async with AioInferenceClient.connect(house.engine.address) as client:
        async for event in run(scenario, EngineMemory(client), retries=Retries(times=20, wait_s=0.2)):
            events.append(event)
            if isinstance(event, TurnDone) and len(words(events)) == 2:
                house.engine.kill()
            if isinstance(event, TurnRetried) and not house.engine.is_running:
                house.engine.start()
    assert any(isinstance(event, TurnRetried) for event in events)
    assert words(events) == reference


@pytest.mark.long(3)
def test_a_turn_that_stays_broken_ends_the_run_which_can_go_on(
    house: House, reference: dict[int, str], tmp_path: Path
) -> None:
    scenario = named("stays-broken")
    house.engine.kill()
    with Journal.begin(tmp_path / "run.jsonl", scenario, "1") as journal:
        with pytest.raises(Unavailable):
            events_of(house, scenario, journal, Retries(times=1, wait_s=0.01))
    house.engine.start()
    with Journal.resume(tmp_path / "run.jsonl", scenario) as journal:
        assert words(events_of(house, scenario, journal)) == reference


def test_a_turn_that_another_call_cancels_ends_the_run_and_is_done_when_it_goes_on(
    house: House, tmp_path: Path
) -> None:
    text = "name: laughs\nagents: {ada: {}}\nphases: [{name: all, agents: [ada], prompt: Laugh., "
    scenario = Scenario.parse(text + "max_tokens: 2000, reply_regex: '(ha ){80}'}]")

    async def cancelled(journal: Journal) -> None:
        async with AioInferenceClient.connect(house.engine.address) as client:
            async for event in run(scenario, EngineMemory(client), journal=journal):
                if isinstance(event, ReplyPiece):
                    [turn] = await client.list_turns()
                    await client.cancel_turn(turn.request_id)

    with Journal.begin(tmp_path / "run.jsonl", scenario, "1") as journal, pytest.raises(Cancelled):
        asyncio.run(cancelled(journal))
    with Journal.resume(tmp_path / "run.jsonl", scenario) as journal:
        assert not journal.answers
        assert words(events_of(house, scenario, journal)) == {0: "ha " * 80}


@pytest.mark.parametrize("max_tokens", [3, 8])
def test_a_reply_that_is_cut_before_it_matches_ends_the_run(house: House, max_tokens: int) -> None:
    text = f"name: cut-{max_tokens}\nagents: {{ada: {{}}}}\nphases: [{{name: all, agents: [ada], prompt: Choose., "
    scenario = Scenario.parse(text + f"max_tokens: {max_tokens}, reply_regex: I (cooperate|defect) today}}]")
    with pytest.raises(InvalidArgument) if max_tokens < 8 else nullcontext() as cut:
        assert words(events_of(house, scenario))[0] in ("I cooperate today", "I defect today")
    assert cut is None or cut.value.field == "max_tokens"


def test_a_turn_waits_for_its_engine_as_often_as_it_is_given_and_no_longer_than_the_longest_wait() -> None:
    retries, away = Retries(times=5000), Unavailable("the engine is away")
    waits = [retries.wait(away, attempt) for attempt in (1, 2, 6, 1025, 5000, 5001)]
    assert waits == [0.5, 1.0, 10.0, 10.0, 10.0, None]
    full = ResourceExhausted("the disk is full", retry_after_s=60.0)
    assert [retries.wait(full, attempt) for attempt in (1, 6, 5001)] == [60.0, 60.0, None]
    assert retries.wait(ResourceExhausted("context", reason="CONTEXT_EXCEEDED", retry_after_s=1.0), 1) is None


def test_an_agent_that_somebody_else_changed_is_not_gone_on_with(house: House, tmp_path: Path) -> None:
    scenario = named("changed")

    async def with_a_visitor(journal: Journal) -> None:
        async with AioInferenceClient.connect(house.engine.address) as client:
            async for event in run(scenario, EngineMemory(client), journal=journal, parallel=1):
                if isinstance(event, TurnDone) and event.turn.index == 0:
                    hello = {"role": "user", "content": "Hello."}
                    await client.reply(agent_id="changed/marco", append_messages=[hello], max_tokens=4)

    with (
        Journal.begin(tmp_path / "run.jsonl", scenario, "1") as journal,
        pytest.raises(Conflict, match="newest version"),
    ):
        asyncio.run(with_a_visitor(journal))


def test_a_first_turn_that_was_not_noted_is_not_done_twice_behind_somebody_elses(house: House, tmp_path: Path) -> None:
    scenario, path = named("visited"), tmp_path / "run.jsonl"

    async def first_turn(journal: Journal) -> Event:
        async with AioInferenceClient.connect(house.engine.address) as client:
            events = run(scenario, EngineMemory(client), journal=journal, parallel=1)
            async with aclosing(events):
                return await anext(event async for event in events if isinstance(event, TurnDone))

    with Journal.begin(path, scenario, "1") as journal:
        head = path.read_bytes()
        before = asyncio.run(first_turn(journal))
    path.write_bytes(head)
    with Journal.resume(path, scenario) as journal:
        assert words([asyncio.run(first_turn(journal))]) == words([before])
    with house.client() as client:
        assert client.get_agent("visited/marco").lines[0].version == 1
        client.reply(agent_id="visited/marco", append_messages=[{"role": "user", "content": "Hello."}], max_tokens=4)
    path.write_bytes(head)
    with Journal.resume(path, scenario) as journal, pytest.raises(Conflict, match="already"):
        asyncio.run(first_turn(journal))
    with house.client() as client:
        assert client.get_agent("visited/marco").lines[0].version == 2


def test_a_journal_is_one_scenarios_and_one_runners(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Journal.begin(path, named("one"), "1"):
        with pytest.raises(FailedPrecondition, match="in use"):
            Journal.resume(path, named("one"))
        with pytest.raises(FailedPrecondition, match="exists"):
            Journal.begin(path, named("one"), "2")
    with pytest.raises(FailedPrecondition, match="another text"):
        Journal.resume(path, named("other"))
    with path.open("ab") as file:
        file.write(b'{"turn": 0, "cut sho')
    with Journal.resume(path, named("one")) as journal:
        assert journal.answers == {}
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"\n"), "the line that was cut short is gone"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FailedPrecondition, match="exists"):
        Journal.begin(path, named("one"), "2")
    assert [each.name for each in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    ("was", "is_"), [('"variant": 0', '"variant": "<b>"'), ('"cached_tokens": 0', '"cached_tokens": "<b>"')]
)
def test_a_journal_of_somebody_else_holds_numbers_where_the_report_expects_them(
    tmp_path: Path, was: str, is_: str
) -> None:
    scenario, path = named("theirs"), tmp_path / "run.jsonl"
    with Journal.begin(path, scenario, "1") as journal:
        journal.record(scenario.plan.turns[0], "r", Answer("", 0, 0, 0, "cold", "none", "", 0.0, 0.0, 1))
    assert Journal.read(path).answers[0].cached_tokens == 0
    path.write_text(path.read_text().replace(was, is_))
    with pytest.raises(DataLoss):
        Journal.read(path)


@pytest.mark.parametrize(
    ("was", "is_"),
    [
        ('"turn": 0', '"turn": 1'),
        ('"turn": 1', '"turn": 999'),
        ('"turn": 1', '"turn": -1'),
        ('"turn": 1', '"turn": 1.5'),
        ('"agent": "lena"', '"agent": "scribe"'),
        ('"run_id": "1"', '"run_id": [1]'),
        ('"variant": 0', '"variant": 1e999'),
        ('"turn": 0', '"turn": ' + "[" * 100_000),
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_journal_is_neither_gone_on_with_nor_shown(tmp_path: Path, was: str, is_: str) -> None:
    """A lost line among them: the turn would be done again behind later ones."""
    scenario, path = named("damaged"), tmp_path / "run.jsonl"
    with Journal.begin(path, scenario, "1") as journal:
        for turn in scenario.plan.turns[:4]:
            journal.record(turn, "r", Answer("", 0, 0, 0, "cold", "none", "", 0.0, 0.0, 1))
    whole = path.read_text()
    Journal.read(path).check(scenario)
    path.write_text(whole.replace(was, is_))
    assert path.read_text() != whole
    with pytest.raises(DataLoss, match="no journal of a scenario"):
        Journal.resume(path, scenario)
    with pytest.raises(DataLoss, match="no journal of a scenario"):
        Journal.read(path).check(scenario)


class Echo:
    """A memory that answers at once, and whose forgetting is noted."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def ask(self, asked: ReplyRequest) -> AsyncGenerator[str | Answer, None]:
        yield Answer("Yes.", 9, 0, 2, "cold", "none", "", 0.0, 0.0, 1)

    async def forget(self, agent_id: str, namespace: str) -> None:
        self.forgotten.append(agent_id)


def test_a_journal_that_takes_no_more_ends_the_run_at_once_and_stays_whole(tmp_path: Path) -> None:
    scenario = named("full")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def to_the_end(journal: Journal) -> None:
        async with asyncio.timeout(60):
            async for _ in run(scenario, Echo(), journal=journal):
                pass

    with Journal.begin(tmp_path / "run.jsonl", scenario, "1") as journal:
        size = journal.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            with pytest.raises(Internal, match="OSError"):
                asyncio.run(to_the_end(journal))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (journal.path.stat().st_size, journal.answers) == (size, {})


def test_no_run_deletes_an_agent_that_the_file_names_by_its_id() -> None:
    scenario = Scenario.parse(TEXT.replace("NAME", "owned").replace("persona: You are Lena.", "id: lena"))
    memory = Echo()
    assert asyncio.run(forget(scenario, memory, "1", permanent=True)) == memory.forgotten
    assert memory.forgotten == ["owned/marco", "owned/1/scribe"]


@pytest.mark.long(2)
def test_the_example_of_the_page_runs(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(plain_asyncio.main(house.engine.address, "gossip"))
    assert "tokens reused" in capsys.readouterr().out


@pytest.mark.long(4)
def test_the_scenario_of_the_page_is_right_and_ends_well(house: House) -> None:
    page = (Path(plain_asyncio.__file__).parents[1] / "README.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    done = events_of(house, Scenario.parse(text))[-1]
    assert isinstance(done, RunDone)
    assert (done.outcomes_met, done.extended) == (done.outcomes, done.later_turns) == (2, 4)


def test_a_run_that_another_model_began_does_not_go_on(house: House, tmp_path: Path) -> None:
    file, path = tmp_path / "talk.yaml", tmp_path / "run.jsonl"
    file.write_text(TEXT.replace("NAME", "models"))
    answer = Answer("I will.", 9, 0, 3, "cold", "none", "", 0.1, 0.2, 1, model="other-model")
    scenario = named("models")
    with Journal.begin(path, scenario, "1") as journal:
        journal.record(scenario.plan.turns[0], "request", answer)
    before = path.read_bytes()
    run = ("--engine", house.engine.address, "scenario", "run", file, "--journal", path, "--json")
    refused = in_process(*run).value["error"]
    assert (refused["reason"], refused["field"]) == ("MODEL_CHANGED", "model")
    assert "answered by other-model, and now kvasir-tiny would answer" in refused["message"]
    assert path.read_bytes() == before
