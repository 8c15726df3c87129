"""The place at which a prompt parts from its memory: the texts, the message, and what differs there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import manifest_pb2
from mlx_lm.tokenizer_utils import load as load_tokenizer

from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import Tool, dialogue, json_of_messages, json_of_tools, render
from inference_svc.text.differences import Difference, difference, explained, placed
from inference_svc.text.given_json import GivenJson
from inference_svc.text.prefix_matching import common_prefix_length
from inference_svc.text.token_text import TokenText
from tests.made_models.thinking_models import TEMPLATES, write_tokenizer

Message = manifest_pb2.Message
TOOL = Tool("weather", "Tells the weather", '{"type": "object", "properties": {"place": {"type": "string"}}}')
CALL = manifest_pb2.ToolCall(id="AAAAAAAAA", name="weather", arguments_json='{"place": "Oslo"}')
TALK = (
    Message(role="system", content="You are a helper.\nIt is 10:30.\n"),
    Message(role="user", content="Shall I take an umbrella? "),
    Message(role="assistant", content="I look.", tool_calls=[CALL]),
    Message(role="tool", content="rain", name="weather", tool_call_id=CALL.id),
    Message(role="assistant", content="Yes, do."),
    Message(role="user", content="And in Rome? It is 2026-11-24, and I leave at noon."),
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prompting]:
    root = tmp_path_factory.mktemp("families")

    @cache
    def prompting(name: str) -> Prompting:
        directory: Path = kvasir_tiny.path() if name == "kvasir-tiny" else write_tokenizer(root / name, name)
        tokenizer = load_tokenizer(directory)
        return Prompting(
            tokenizer, TokenText.of_tokenizer((directory / "tokenizer.json").read_text(), tokenizer.decode)
        )

    return prompting


def found(
    prompting: Prompting, known: Sequence[Message], said: Sequence[Message], tools: Sequence[Tool] = (TOOL,)
) -> Difference:
    """Of a memory of `known`, whose tool is TOOL, and a prompt."""
    objects = GivenJson([*json_of_messages([*known, *said], "messages"), *json_of_tools([TOOL, *tools])])
    objects.read()
    ours, theirs = (dialogue(some, its, objects, prompting.specials) for some, its in ((known, [TOOL]), (said, tools)))
    remembered, text = render(prompting.template, ours), render(prompting.template, theirs)
    place = difference(remembered, text, common_prefix_length(remembered, text))
    assert place is not None
    return explained(placed(place, text, theirs, prompting.template), known, said)


def changed(index: int, content: str) -> list[Message]:
    messages = list(TALK)
    messages[index] = Message()
    messages[index].CopyFrom(TALK[index])
    messages[index].content = content
    return messages


@pytest.mark.parametrize("name", ["kvasir-tiny", *TEMPLATES])
def test_the_message_is_named_in_every_template(name: str, family: Callable[[str], Prompting]) -> None:
    prompting = family(name)
    for index in (0, 1, 3, 5):
        for content in (f"X{TALK[index].content}", f"{TALK[index].content.strip()} And more.", "Y"):
            place = found(prompting, TALK, changed(index, content))
            assert (place.message, place.role) == (index, TALK[index].role), (index, content, place)


def test_tools_are_named(family: Callable[[str], Prompting]) -> None:
    other = Tool(TOOL.name, "Tells what the weather is", TOOL.parameters_json)
    place = found(family("kvasir-tiny"), TALK, TALK, [other])
    assert (place.role, place.message) == ("tools", None)
    assert (place.remembered, place.given) == ("the weather<|im_end|", "what the weather is<")


@pytest.mark.parametrize("name", ["kvasir-tiny", "qwen3", "glm", "minimax"])
def test_a_call_is_its_messages(name: str, family: Callable[[str], Prompting]) -> None:
    said = list(TALK)
    said[2] = Message(role="assistant", content="I look.")
    said[2].tool_calls.append(manifest_pb2.ToolCall(id=CALL.id, name="weather", arguments_json='{"place": "Rome"}'))
    place = found(family(name), TALK, said)
    assert (place.message, place.role, place.what) == (2, "assistant", "")
    assert "Oslo" in place.remembered


@pytest.mark.parametrize("name", ["qwen3", "glm", "minimax", "deepseek-v3.2"])
def test_thoughts_that_a_caller_left_out_or_changed_are_named(name: str, family: Callable[[str], Prompting]) -> None:
    loops = [
        [*TALK[:2], Message(role="assistant", reasoning=thoughts, tool_calls=[CALL]), TALK[3]]
        for thoughts in ("I look it up.", "", "I look.")
    ]
    for said in loops[1:]:
        place = found(family(name), loops[0], said)
        assert (place.message, place.role, place.what) == (2, "assistant", "thoughts")


def test_space_around_a_text_is_named_as_nothing_else(family: Callable[[str], Prompting]) -> None:
    place = found(family("kvasir-tiny"), TALK, changed(1, f"{TALK[1].content} "))
    assert (place.message, place.role, place.what) == (1, "user", "")


def test_what_differs_is_reported_in_twenty_characters_from_the_words_beginning_on(
    family: Callable[[str], Prompting],
) -> None:
    prompting = family("kvasir-tiny")
    clock = found(prompting, TALK, changed(0, "You are a helper.\nIt is 10:47.\n"))
    assert (clock.remembered, clock.given, clock.what) == (
        "10:30.\n\nTools:\n- wea",
        "10:47.\n\nTools:\n- wea",
        "clock",
    )
    date = found(prompting, TALK, changed(5, "And in Rome? It is 2026-11-25, and I leave at noon."))
    assert (date.remembered, date.given, date.what) == ("2026-11-24, and I le", "2026-11-25, and I le", "date")
    both = changed(5, "And in Rome? It is 2026-11-25, and I leave at 10:00.")
    assert found(prompting, TALK, both).what == ""
    assert found(prompting, both, changed(5, "And in Rome? It is 2027-01-25, and I leave at 9:30.")).what == (
        "date and clock"
    )


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_both_texts_are_short_and_differ(before: str, one: str, other: str) -> None:
    remembered, text = before + one, before + other
    at = common_prefix_length(remembered, text)
    place = difference(remembered, text, at)
    assert (place is None) == (at in (len(remembered), len(text)))
    if place is not None:
        assert place.remembered != place.given
        assert max(len(place.remembered), len(place.given)) <= 20
        assert text[: place.character] == remembered[: place.character]


def test_a_text_that_goes_on_parts_from_nothing(family: Callable[[str], Prompting]) -> None:
    prompting = family("kvasir-tiny")
    objects = GivenJson(json_of_messages(TALK, "messages"))
    objects.read()
    whole = dialogue(TALK, [], objects, prompting.specials)
    shorter = replace(whole, messages=whole.messages[:3])
    texts = [render(prompting.template, each, add_generation_prompt=False) for each in (whole, shorter)]
    assert difference(texts[0], texts[1], len(texts[1])) is None
    assert difference(texts[1], texts[0], len(texts[1])) is None
