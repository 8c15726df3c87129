"""What a request may ask of sampling: its defaults, its digest, and what is refused by name."""

from typing import Any

import pytest
from kvasir.clients import message
from kvasir.common.v1 import message_pb2
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.messages import turn_request
from inference_svc.engine.api import Pace, Priority, SamplingParams
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.turns.turn_data import TurnRequest

OLD: tuple[tuple[pb.GenerateRequest, str], ...] = (
    (pb.GenerateRequest(prompt="once"), "6bd72aeb19c53c09f61d2bf8f91dd2f1740d8505c04768e9e05aa6340ce97e08"),
    (
        pb.GenerateRequest(
            prompt="once",
            sampling=pb.Sampling(
                max_tokens=9,
                temperature=0.7,
                top_p=0.9,
                top_k=4,
                min_p=0.1,
                seed=5,
                stop=["a", "b"],
                stop_token_ids=[7, 3],
            ),
        ),
        "19932cd9fa4ae20feb24c870dce850eff5ff5c4294589192d683d832db7bce70",
    ),
    (
        pb.GenerateRequest(
            agent_id="a",
            append_messages=pb.MessageList(messages=[message("user", "x")]),
            tools=[pb.Tool(name="t", parameters_json="{}")],
            sampling=pb.Sampling(seed=0),
        ),
        "47d91e54565706bd7c23733df9748dbf7d2389be3fa3f3cf4637bb41a853c3ee",
    ),
)


def read(request: pb.GenerateRequest) -> TurnRequest:
    return turn_request(
        request,
        namespace="n",
        caller="c",
        max_prompt_bytes=1000,
        new_request_id=lambda: "r",
        new_seed=lambda: 17,
    )


def asked(**sampling: Any) -> TurnRequest:
    return read(pb.GenerateRequest(prompt="once", sampling=pb.Sampling(**sampling)))


@pytest.mark.parametrize(("request_", "digest"), OLD)
def test_a_request_of_yesterday_has_yesterdays_digest(request_: pb.GenerateRequest, digest: str) -> None:
    """A turn that an older engine did is told again, not done twice."""
    assert read(request_).input_digest == digest


def test_every_setting_that_is_given_makes_another_digest() -> None:
    settings: tuple[dict[str, Any], ...] = (
        {},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "repetition_tokens": 65},
        {"logit_bias": {1: 2.0, 3: 4.0}},
        {"logit_bias": {1: 2.0, 3: 4.5}},
        {"logit_bias": {1: 2.0, 4: 4.0}},
        {"frequency_penalty": 0.0},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 1},
        {"n": 1},
        {"n": 2},
    )
    formats = ({"json_schema": "{}"}, {"regex": "{}"}, {"regex": "a"})
    digests = [asked(**each).input_digest for each in settings]
    digests += [read(pb.GenerateRequest(prompt="once", **each)).input_digest for each in formats]  # type: ignore[arg-type]
    kinds = (pb.TOOL_CHOICE_KIND_REQUIRED, pb.TOOL_CHOICE_KIND_NAMED)
    choices = [pb.ToolChoice(kind=kinds[0]), pb.ToolChoice(kind=kinds[0], one_call=True)]
    choices.append(pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NONE))
    choices += [pb.ToolChoice(kind=kinds[1], name=name) for name in "fg"]
    for choice in (None, *choices):
        request = pb.GenerateRequest(tools=[pb.Tool(name="f"), pb.Tool(name="g")], tool_choice=choice)
        request.messages.messages.add(role=message_pb2.ROLE_USER)
        digests.append(read(request).input_digest)
    assert len(set(digests)) == len(digests)


def test_the_order_of_biases_is_none() -> None:
    tokens = [number * 7919 % 150_000 for number in range(200)]  # enough for a map to order them as they came
    one, other = (asked(logit_bias=dict.fromkeys(given, 2.0)) for given in (tokens, tokens[::-1]))
    assert one.input_digest == other.input_digest
    assert one.sampling.logit_bias == other.sampling.logit_bias == tuple((token, 2.0) for token in sorted(tokens))


def test_what_is_absent_takes_the_defaults_of_the_plan() -> None:
    assert asked().sampling == SamplingParams(max_tokens=512, seed=17)
    assert asked().clamps_max_tokens
    assert asked().choices == 1
    assert asked(logprobs=True).sampling.logprobs == 0
    assert asked(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    request = read(pb.GenerateRequest(prompt="once", json_schema="{}"))
    assert request.sampling.constraint == Constraint(ConstraintKind.JSON_SCHEMA, "{}")


def test_borders_are_allowed() -> None:
    borders = asked(
        repetition_penalty=2.0,
        repetition_tokens=4096,
        logit_bias=dict.fromkeys(range(300), -100.0),
        logprobs=True,
        top_logprobs=20,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        n=8,
        most_drafts=64,
    )
    assert borders.sampling.most_drafts == 64
    assert asked(most_drafts=0).sampling.most_drafts == 0
    assert (borders.choices, borders.sampling.repetition_tokens) == (8, 4096)
    assert read(pb.GenerateRequest(prompt="x", agent_id="a", sampling=pb.Sampling(n=1))).choices == 1


def test_an_agent_has_one_reply_to_remember() -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(pb.GenerateRequest(prompt="x", agent_id="a", sampling=pb.Sampling(n=2)))
    assert refused.value.field == "sampling.n"


def test_a_gap_of_its_own_goes_with_the_priority_and_makes_no_other_turn_of_a_repeated_one() -> None:
    plain, own = pb.GenerateRequest(prompt="once"), pb.GenerateRequest(prompt="once", longest_gap_ms=200, priority=2)
    assert read(plain).pace == Pace(Priority.INTERACTIVE, None)
    assert read(own).pace == Pace(Priority.BACKGROUND, 0.2)
    assert read(own).input_digest == read(plain).input_digest
