"""The steps of a client over HTTP: those of every client that the gateway's API can express, and a few of its own."""

import time

import pytest

from tests.conformance import steps
from tests.conformance.expecting import RULES, WITHIN_S, refusal, user, wait_until
from tests.conformance.http_world import HttpWorld
from tests.conformance.stand_ins import StandInGateway, served_over_http
from tests.conformance.steps import LONG, Step
from tests.conformance.testee import Refused, Testee


def a_key_opens_its_own_namespace(program: Testee, world: HttpWorld) -> None:
    program.call("connect", address=world.url)
    with refusal("UNAUTHENTICATED", "NO_CREDENTIAL"):
        program.call("list_agents")
    program.call("connect", address=world.url, token="x" * 40)
    with refusal("UNAUTHENTICATED", "BAD_CREDENTIAL"):
        program.call("list_agents")
    program.call("connect", address=world.url, token=world.key_of_other_namespace)
    name = "theirs/versions?ö=1#b%2F"
    program.call("reply", agent_id=name, append_messages=user("Hello"), max_tokens=1)
    assert program.call("list_agents", name_prefix="theirs/versions?") == {"agent_ids": [name]}
    assert program.call("get_agent", agent_id=name)["version"] == 1
    program.call("connect", address=world.url, token=world.key)
    assert program.call("list_agents") == {"agent_ids": []}


def a_call_that_would_mean_another_is_refused_by_the_client_itself(program: Testee, world: HttpWorld) -> None:
    for end in ("#part", "/?a=b", "/path"):
        with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "address"):
            program.call("connect", address=world.url + end)
    program.call("connect", address=world.url, token=world.key)
    for request_id in ("", "a\r\nb", "ö", "a" * 129):
        with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "request_id"):
            program.call("reply", agent_id="ada", prompt="Hello", request_id=request_id)
    assert program.call("list_agents") == {"agent_ids": []}


def a_cancelled_task_ends_its_turn(program: Testee, world: HttpWorld) -> None:
    cut = program.call("stream", agent_id="ada", cancel_after=2, cancel_by="task", **LONG)
    assert not cut["is_finished"]
    with world.client() as look:
        wait_until(lambda: look.get_stats().namespaces[0].running_turns == 0)
    assert program.call("get_agent", agent_id="ada")["version"] == 3


def killed_and_started_again_it_goes_on(program: Testee, world: HttpWorld) -> None:
    steps.killed_in_a_turn(program, world)
    with refusal("UNAVAILABLE"):
        program.call("get_agent", agent_id="ada", timeout_s=20)
    world.start()
    give_up = time.monotonic() + WITHIN_S
    while True:
        try:
            turn = {"agent_id": "ada", "append_messages": user("Who am I?"), "max_tokens": 4}
            reply = program.call("reply", request_id="back", **turn)
            break
        except Refused as refused:
            assert refused.code == "UNAVAILABLE", refused
            assert time.monotonic() < give_up, refused
            time.sleep(0.1)
    assert reply["version"] == 4
    assert reply["cached_tokens"] > 0
    assert reply["source"] == "CACHE_SOURCE_WARM", reply


def reads_are_repeated_and_nothing_else_is(program: Testee, world: HttpWorld) -> None:
    gateway = StandInGateway()
    with served_over_http(gateway) as url:
        program.call("connect", address=url, token="a-key")
        assert program.call("get_agent", agent_id="ada")["token_count"] == 9
        with refusal("UNAVAILABLE"):
            program.call("get_agent", agent_id="away")
        with refusal("UNAVAILABLE"):
            program.call("fork", source_agent_id="ada", agent_id="eve")
        with refusal("UNAVAILABLE", request_id="mine"):
            program.call("reply", agent_id="away", prompt="Hello", request_id="mine")
    expected = {"GET ada": 3, "GET away": RULES["attempts"], "POST ada/fork": 1, "POST away/generate": 1}
    assert gateway.calls == expected, gateway.calls
    assert gateway.keys == {"Bearer a-key"}


def an_answer_that_is_none_is_refused(program: Testee, world: HttpWorld) -> None:
    """No reply that was cut is taken for a whole one, and no redirect takes the key along."""
    gateway = StandInGateway()
    with served_over_http(gateway) as url:
        program.call("connect", address=url, token="a-key")
        for agent_id in ("cut", "broken"):
            with refusal("UNAVAILABLE", request_id="mine"):
                program.call("reply", agent_id=agent_id, prompt="Hello", request_id="mine")
        with pytest.raises(Refused) as refused:
            program.call("stream", agent_id="refused", prompt="Hello")
        assert (refused.value.reason, refused.value.retry_after_s) == ("MEMORY_UNREADABLE", 0.5)
        with refusal("UNKNOWN"):
            program.call("get_agent", agent_id="elsewhere")
        with refusal("INTERNAL"):
            program.call("get_agent", agent_id="garbage")
        with refusal("DEADLINE_EXCEEDED"):
            program.call("get_agent", agent_id="silent", timeout_s=0.3)
        for agent_id in ("", ".", ".."):
            with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "agent_id"):
                program.call("delete", agent_id=agent_id)
    assert "GET ada" not in gateway.calls


HTTP_STEPS: tuple[Step, ...] = (
    steps.addresses_that_are_refused_by_the_client_itself,
    a_key_opens_its_own_namespace,
    a_call_that_would_mean_another_is_refused_by_the_client_itself,
    steps.a_first_turn_makes_version_one,
    steps.a_second_turn_streams_and_reuses_the_first,
    steps.a_cancelled_turn_leaves_nothing,
    a_cancelled_task_ends_its_turn,
    killed_and_started_again_it_goes_on,
    steps.a_fork_is_an_agent_of_its_own,
    steps.a_rewind_is_a_new_version,
    steps.a_turn_says_where_it_goes_on,
    steps.two_hundred_turns_at_once,
    steps.lists_are_read_to_their_end,
    steps.a_deleted_agent_is_gone,
    steps.refusals_name_the_field_and_the_reason,
    reads_are_repeated_and_nothing_else_is,
    an_answer_that_is_none_is_refused,
)
