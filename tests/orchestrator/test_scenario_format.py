"""A scenario file that is wrong is refused with file, line, field and what was expected; the schema is the format's."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest
from kvasir_orchestrator import Scenario, ScenarioInvalid
from kvasir_orchestrator.model import json_schema

RIGHT = """\
name: talk
values: {place: [Porto, Oslo]}
agents:
  marco:
    persona: You are Marco.
  danny:
    name: Dan
  analyst: {lifetime: ephemeral}
phases:
  - name: room_a
    agents: [marco]
    prompt: "I live in ${place}."
  - name: yard
    agents: [danny, marco]
    rounds: 2
    prompt: Hello.
    visibility: {readers: [analyst]}
  - name: verdict
    agents: [analyst]
    agent_prompts:
      analyst: "Notes: ${yard.messages[danny]}"
outcomes:
  - label: Marco knows
    phase: room_a
    agent: marco
    contains: ${place}
"""
LOOKS_AHEAD = "    prompt: Hello ${verdict.messages[analyst]}"

# what stands in RIGHT, what stands there instead, and the line, field and words of the refusal
WRONG = {
    "a missing agent": ("[danny, marco]", "[danny, marko]", 14, "phases[1].agents[1]", "no agent 'marko'"),
    "a missing agent in a prompt": ("      analyst: ", "      marco: ", 21, "agent_prompts.marco", "no agent of this"),
    "a missing agent in a template": ("messages[danny]", "messages[dan]", 21, "analyst", "no agent 'dan'"),
    "a missing listener": ("readers: [analyst]", "listeners: [eve]", 17, "visibility.listeners[0]", "no agent 'eve'"),
    "an unknown phase": ("${yard.", "${garden.", 21, "analyst", "no phase 'garden'"),
    "an unknown phase of an outcome": (
        "phase: room_a",
        "phase: room",
        24,
        "outcomes[0].phase",
        "expected one of room_a",
    ),
    "a template of itself": ("${yard.", "${verdict.", 21, "analyst", "a cycle of templates: verdict → verdict"),
    "a cycle of templates": (
        "    prompt: Hello.",
        LOOKS_AHEAD,
        16,
        "prompt",
        "cycle of templates: yard → verdict → yard",
    ),
    "a template of a later phase": (
        '"I live in ${place}."',
        '"${yard.messages[danny]}"',
        12,
        "prompt",
        "a later phase",
    ),
    "a duplicate key": (
        "    prompt: Hello.",
        "    prompt: Hi\n    prompt: Ho",
        17,
        "prompt",
        "stands twice, first in line 16",
    ),
    "a phase that stands twice": ("name: yard", "name: room_a", 13, "phases[1].name", "'room_a' stands twice"),
    "a template that shows what its reader may not see": (
        *("readers: [analyst]", "readers: []", 21),
        *("analyst", "would show analyst what danny, marco says in 'yard'"),
    ),
    "a template that shows a whisper": (
        *("readers: [analyst]", "readers: [analyst], whispers: {marco: [danny]}", 21),
        *("analyst", "would show analyst what marco says"),
    ),
    "a template that shows nothing": ("messages[danny]", "messages[analyst]", 21, "analyst", "shows nothing"),
    "a persona of 1 MB": ("You are Marco.", "x" * 1_000_000, 5, "agents.marco.persona", "at most 32768 characters"),
    "a file of 2 MB": ("You are Marco.", "x" * 2_000_000, 1, "", "expected at most 1048576 characters"),
    "a number as a text": ("Hello.", "3", 16, "phases[1].prompt", "expected a text, or a list of texts"),
    "a text as a number": ("rounds: 2", "rounds: two", 15, "phases[1].rounds", "expected a whole number, got 'two'"),
    "a text as a list": ("[danny, marco]", "danny", 14, "phases[1].agents", "expected a list, got 'danny'"),
    "an unknown field": ("rounds: 2", "round: 2", 15, "phases[1].round", "no such field"),
    "a missing field": ("  - label: Marco knows\n    phase", "  - phase", 23, "outcomes[0].label", "is missing"),
    "rounds twice": ("rounds: 2", "rounds: 2\n    auto_rounds: 3", 13, "phases[1]", "rounds or auto_rounds, got both"),
    "more prompts than rounds": ("Hello.", "[a, b, c]", 16, "phases[1].prompt", "at most 2 texts, one a round, got 3"),
    "nothing to answer": (
        "    prompt: Hello.\n",
        "",
        14,
        "phases[1].agents[0]",
        "danny has nothing to answer in round 1",
    ),
    "an unknown value": ("in ${place}", "in ${town}", 12, "phases[0].prompt", "no value 'town': expected one of place"),
    "a template with no end": ("in ${place}", "in ${place", 12, "phases[0].prompt", "has no end"),
    "a template that calls": ("in ${place}", "in ${place.upper()}", 12, "prompt", "expected ${phase.messages[agent]}"),
    "a quote in a persona": ("You are Marco.", "${yard.messages[danny]}", 5, "persona", "only prompts quote"),
    "two checks": ("contains: ${", "lacks: x\n    contains: ${", 23, "outcomes[0]", "one of equals, contains"),
    "no regex": ("contains: ${place}", "matches: '('", 26, "outcomes[0].matches", "expected a regular expression"),
    "a round that never comes": (
        "agent: marco\n",
        "agent: marco\n    round: 2\n",
        26,
        "outcomes[0].round",
        "at most 1",
    ),
    "a key that YAML takes for a boolean": ("  danny:\n", "  no:\n", 6, "agents", "expected a text as key, got 'no'"),
    "no policy": ("name: Dan", "on_full: forget", 7, "agents.danny.on_full", "expected refuse, drop_oldest or"),
    "a share that is none": ("name: Dan", 'on_full: "summarize:2"', 7, "agents.danny.on_full", "expected refuse, drop"),
    "a name that ends a name": (
        "name: Dan",
        "name: 'Marco: I'",
        7,
        "agents.danny.name",
        "expected no colon, no control",
    ),
    "a name of somebody else": ("name: Dan", "name: Marco", 7, "agents.danny.name", "'Marco' is marco's"),
    "an alias": ("[Porto, Oslo]}", "&a [Porto], other: *a}", 2, "values.other", "expected no alias"),
    "an alias of a text": ("[Porto, Oslo]}", "[&a Porto, *a]}", 2, "values.place[1]", "expected no alias"),
    "a number of a million digits": ("rounds: 2", f"rounds: 0x{'f' * 9000}", 15, "phases[1].rounds", "expected a"),
    "a regex that Python cannot hold": (
        "contains: ${place}",
        "matches: 'a{4294967296}'",
        26,
        "matches",
        "expected a reg",
    ),
    "an id that is another's in a variant": (
        "name: Dan",
        "id: talk+3/marco",
        7,
        "agents.danny.id",
        "another beginning",
    ),
    "no YAML": ("[danny, marco]", "[danny, marco", 15, "", "not YAML"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_with_its_line(what: str) -> None:
    was, is_, line, field, words = WRONG[what]
    assert was in RIGHT
    with pytest.raises(ScenarioInvalid) as caught:
        Scenario.parse(RIGHT.replace(was, is_, 1), "talk.yaml")
    problem = caught.value.problems[0]
    assert (problem.line, problem.name.endswith(field)) == (line, True), caught.value.lines()
    assert words in problem.text
    assert caught.value.message.startswith(f"talk.yaml:{line}: ")


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "- a", "\x00", "a: " * 100, "[" * 700, "a: 2024-01-01", "a: !!python/x 1"]
)
def test_what_is_no_scenario_at_all_is_refused_too(text: str) -> None:
    with pytest.raises(ScenarioInvalid):
        Scenario.parse(text)


def test_a_time_of_day_is_a_text_and_takes_no_time() -> None:
    """In YAML 1.1 it is a number to base 60, and a long one takes minutes."""
    assert Scenario.parse(RIGHT.replace("[Porto, Oslo]", "[12:30]")).outcomes[0].contains == "12:30"
    with pytest.raises(ScenarioInvalid, match="at most 200 characters, got 50001"):
        Scenario.parse(RIGHT.replace("[Porto, Oslo]", f"[{'1:' * 25_000}1]"))


def test_a_file_of_too_many_parts_is_refused_before_it_is_read() -> None:
    with pytest.raises(ScenarioInvalid, match="at most 60000 lines"):
        Scenario.parse("values:\n" + "  a: b\n" * 31_000)


def test_of_a_vast_file_no_more_is_read_than_may_be_there(tmp_path: Path) -> None:
    with (tmp_path / "vast.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ScenarioInvalid, match="expected at most"):
        Scenario.read(tmp_path / "vast.yaml")


def test_a_few_values_cannot_spell_gigabytes() -> None:
    text = RIGHT.replace("[Porto, Oslo]", f"[{'P' * 200}]").replace("in ${place}", "in " + "${place}" * 200)
    with pytest.raises(ScenarioInvalid, match="at most 32768 characters of values"):
        Scenario.parse(text)


def test_all_problems_are_reported_at_once_in_order() -> None:
    text = RIGHT.replace("rounds: 2", "rounds: two").replace("name: Dan", "nam: Dan")
    with pytest.raises(ScenarioInvalid) as caught:
        Scenario.parse(text)
    assert [problem.line for problem in caught.value.problems] == [7, 15]


def test_a_file_that_is_right_has_its_values_filled_in() -> None:
    scenario = Scenario.parse(RIGHT)
    assert scenario.plan.turns[0].prompts == (("I live in Porto.",),)
    assert scenario.outcomes[0].contains == "Porto"
    drawn = {Scenario.parse(RIGHT, variant=number).outcomes[0].contains for number in range(20)}
    assert drawn == {"Porto", "Oslo"}


def test_an_ephemeral_agent_has_a_name_of_its_own_in_each_run() -> None:
    scenario = Scenario.parse(RIGHT)
    assert scenario.agent_id("marco", "1") == scenario.agent_id("marco", "2") == "talk/marco"
    assert scenario.agent_id("analyst", "1") != scenario.agent_id("analyst", "2")
    assert Scenario.parse(RIGHT, variant=3).agent_id("marco", "1") == "talk+3/marco"


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        *((each, True) for each in ("refuse", "summarize", "drop_oldest:0.1", "summarize:0.80", "drop_oldest:0.45")),
        *((each, False) for each in ("drop_oldest:.4", "drop_oldest:", "summarize:0.81", "summarize:0.09", "refuse\n")),
    ],
)
def test_the_schema_takes_an_on_full_that_the_reader_takes(said: str, is_taken: bool) -> None:
    schema = json_schema()["$defs"]["Agent"]["properties"]["on_full"]["anyOf"][0]
    assert bool(re.fullmatch(schema["pattern"], said)) == is_taken
    text = RIGHT.replace("name: Dan", f"on_full: {json.dumps(said)}", 1)
    if is_taken:
        assert Scenario.parse(text).agents["danny"].on_full == said
    else:
        with pytest.raises(ScenarioInvalid, match="expected refuse, drop_oldest or summarize"):
            Scenario.parse(text)


def test_the_published_schema_is_the_formats() -> None:
    published = (resources.files("kvasir_orchestrator") / "scenario.schema.json").read_text()
    assert json.loads(published) == json_schema(), "run `kvasir scenario schema > …/scenario.schema.json`"
