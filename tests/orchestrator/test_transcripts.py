"""What each agent of a scenario sees: all that it may hear, once, and never anything else, for random scenarios.

Every turn says a canary and every private prompt holds one. Who may see which is worked out here from the file alone.
"""

from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvasir_orchestrator import Scenario, ScenarioInvalid

from tests.made_models.sampling import sampled

AGENTS = ["ada", "bob", "cyd", "dan"]
few = st.lists(st.sampled_from(AGENTS), unique=True, max_size=2)


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    phases: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        agents = draw(st.lists(st.sampled_from(AGENTS), unique=True, min_size=1, max_size=3))
        rounds = draw(st.integers(1, 3))
        prompts = {}
        for agent in agents:
            earlier = (
                draw(st.sampled_from([phase["name"] for phase in phases])) if phases and draw(st.booleans()) else ""
            )
            quote = f" ${{{earlier}.messages[{draw(st.sampled_from(AGENTS))}]}}" if earlier else ""
            prompts[agent] = [f"[private-{agent}-{number}-{turn}]{quote}" for turn in range(rounds)]
        speakers = draw(st.lists(st.sampled_from(agents), unique=True, max_size=1))
        phases.append(
            {
                "name": f"p{number}",
                "agents": agents,
                "rounds": rounds,
                "together": draw(st.booleans()),
                "prompt": f"[phase-{number}]",
                "agent_prompts": prompts,
                "visibility": {
                    "listeners": draw(few),
                    "readers": draw(few),
                    "whispers": {speaker: draw(few) for speaker in speakers},
                },
            }
        )
    return {
        "name": "random",
        "agents": {agent: {"persona": f"[persona-{agent}]"} for agent in AGENTS},
        "phases": phases,
    }


def read(file: dict[str, Any]) -> Scenario:
    """The scenario, if its templates show something, and to those alone who may see it."""
    try:
        return Scenario.parse(yaml.safe_dump(file))
    except ScenarioInvalid as error:
        refused = error
    assert [line for line in refused.lines() if "may not see" not in line and "shows nothing" not in line] == []
    assume(False)
    raise refused


def may_see(phase: dict[str, Any], speaker: str, reader: str, *, is_quoted: bool) -> bool:
    seen = phase["visibility"]
    if speaker in seen["whispers"]:
        return reader in seen["whispers"][speaker]
    return reader in phase["agents"] + seen["listeners"] + (seen["readers"] if is_quoted else [])


def talks(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Each agent's transcript as one text."""
    said = {turn.index: f"[said-{turn.index}]" for turn in scenario.plan.turns}
    for agent in AGENTS:
        yield agent, "\n".join(f"{each['role']} {each['content']}" for each in scenario.transcript(agent, said))


@settings(max_examples=sampled(20, of=50))
@given(scenarios())
def test_no_transcript_holds_what_its_reader_may_not_see(file: dict[str, Any]) -> None:
    scenario = read(file)
    phases = {phase["name"]: phase for phase in file["phases"]}
    for reader, text in talks(scenario):
        for turn in scenario.plan.turns:
            if f"[said-{turn.index}]" in text and turn.agent != reader:
                assert may_see(phases[turn.phase], turn.agent, reader, is_quoted=True)
        for other in AGENTS:
            assert other == reader or (f"[private-{other}-" not in text and f"[persona-{other}]" not in text)


@settings(max_examples=sampled(20, of=50))
@given(scenarios())
def test_what_an_agent_hears_it_sees_once_when_it_next_speaks(file: dict[str, Any]) -> None:
    scenario = read(file)
    phases = {phase["name"]: phase for phase in file["phases"]}
    for reader, text in talks(scenario):
        last = max((turn.index for turn in scenario.plan.of_agent(reader)), default=-1)
        for turn in scenario.plan.turns:
            count = text.count(f"[said-{turn.index}]")
            assert count <= 1
            is_heard = turn.agent == reader or may_see(phases[turn.phase], turn.agent, reader, is_quoted=False)
            comes_back = any(
                mine.index > turn.index and not (phases[mine.phase]["together"] and _is_same_round(mine, turn))
                for mine in scenario.plan.of_agent(reader)
            )
            if is_heard and (turn.agent == reader or comes_back):
                assert count == 1
            assert not (turn.index > last and count)


def _is_same_round(one: Any, other: Any) -> bool:
    return (one.phase, one.round) == (other.phase, other.round)


@settings(max_examples=sampled(20, of=50))
@given(scenarios())
def test_every_turn_goes_on_with_exactly_what_its_agent_remembers(file: dict[str, Any]) -> None:
    scenario = read(file)
    said: dict[int, str] = {}
    for turn in scenario.plan.turns:
        assert turn.after <= set(said)
        before = scenario.transcript(turn.agent, said, until=turn.index)
        # Only words of the turns that it waits for are needed: it may run as soon as they are there.
        new = scenario.new_messages(turn, {index: said[index] for index in turn.after})
        assert new
        assert all(each["role"] == "user" for each in new)
        said[turn.index] = f"[said-{turn.index}]"
        own = {"role": "assistant", "content": said[turn.index]}
        assert scenario.transcript(turn.agent, said, until=turn.index + 1) == [*before, *new, own]


@settings(max_examples=sampled(20, of=50))
@given(st.text(max_size=60))
def test_no_words_pass_for_somebody_elses(words: str) -> None:
    file = {
        "name": "two",
        "agents": {"ada": {}, "bob": {}},
        "phases": [{"name": "p", "agents": ["bob", "ada"], "prompt": "x"}],
    }
    scenario = Scenario.parse(yaml.safe_dump(file))
    heard = scenario.new_messages(scenario.plan.turns[1], {0: words})[0]["content"]
    first, *others = heard.splitlines()
    assert first.startswith("Bob: ")
    assert all(line.startswith("  ") for line in others)


def test_templates_quote_what_was_not_seen_and_values_are_no_templates() -> None:
    text = """
name: quotes
values: {place: ["${secret.messages[ada]}"]}
agents: {ada: {}, bob: {}, eve: {}}
phases:
  - {name: secret, agents: [ada, bob], prompt: "At ${place}, $${kept}."}
  - name: open
    agents: [bob, eve]
    prompt: Say it.
    agent_prompts: {bob: "You know: ${secret.messages[bob]}"}
  - {name: later, agents: [ada], agent_prompts: {ada: "Again: ${secret.messages[ada]}"}}
"""
    scenario = Scenario.parse(text)
    assert scenario.plan.turns[0].prompts == (("At ${secret.messages[ada]}, ${kept}.",),)
    said = {turn.index: f"words {turn.index}" for turn in scenario.plan.turns}
    of_bob = [each["content"] for each in scenario.new_messages(scenario.plan.turns[2], said)]
    assert of_bob == ["Say it.", "You know:"], "bob heard ada in the phase itself"
    of_ada = [each["content"] for each in scenario.new_messages(scenario.plan.turns[4], said)]
    assert of_ada == ["Again: Bob: words 1"], "ada had spoken before bob"
