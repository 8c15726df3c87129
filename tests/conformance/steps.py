"""The numbered steps: what each program is told, and what must come of it. Step n may rest on the steps before it."""

import math
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import pytest
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2

from tests.conformance.expecting import WITHIN_S, refusal, user, wait_until
from tests.conformance.http_world import HttpWorld
from tests.conformance.stand_in_steps import (
    a_client_has_the_limits_of_every_client,
    a_turn_goes_to_the_engine_that_holds_its_agent,
    a_turn_that_moves_says_where_its_rest_is,
    reads_are_asked_again_and_nothing_else_is,
)
from tests.conformance.testee import Refused, Testee
from tests.conformance.world import PEER, World

# The services over gRPC, or the gateway before them.
AnyWorld = World | HttpWorld
Step = Callable[[Testee, Any], None]
# A turn that lasts: it may not end before many z. One letter a state, since a busy machine refuses dear formats.
LONG = {"prompt": "Once upon a time", "regex": "[a-y ]*z{450}", "max_tokens": 480}
# Fewer than the calls of one caller that an engine admits.
CROWD = 200


def heard(call: Callable[[], Any]) -> Any:
    """The call's answer. A refusal that came while the engine was still sending to its store may be lost: UNAVAILABLE
    (STREAM_CUT) then, which may be asked again."""
    for _ in range(4):
        try:
            return call()
        except Refused as refused:
            if refused.reason != "STREAM_CUT":
                raise
    return call()


def addresses_that_are_refused_by_the_client_itself(program: Testee, world: AnyWorld) -> None:
    for address in ("nonsense", "unix:relative.sock", "1.2.3.4:99999"):
        with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "address"):
            program.call("connect", address=address)
    for address in ("192.0.2.1:443", "127.example.com:443"):
        with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "tls"):
            program.call("connect", address=address)
    for token in ("", "two words"):  # on a Unix socket a call without a token is the owner's
        with refusal("UNAUTHENTICATED", "NO_CREDENTIAL"):
            program.call("connect", address="127.0.0.1:1", token=token)


def tls_and_a_token_at_the_store(program: Testee, world: World) -> None:
    """The certificate is pinned; agents' calls are the store's own too."""
    address, ca_file = world.store_address, str(world.ca_file)
    program.call("connect", address=address, ca_file=ca_file, token=world.token)
    assert program.call("list_agents") == {"agent_ids": []}
    program.call("connect", address=address, ca_file=ca_file)
    with refusal("UNAUTHENTICATED", "NO_CREDENTIAL"):
        program.call("list_agents")
    program.call("connect", address=address, ca_file=ca_file, token="x" * 40)
    with refusal("UNAUTHENTICATED", "BAD_CREDENTIAL"):
        program.call("list_agents")
    program.call("connect", address=address, token=world.token)  # loopback, but the store speaks TLS only
    with refusal("UNAVAILABLE"):
        program.call("list_agents", timeout_s=5)


def counting(program: Testee, world: World) -> None:
    program.call("connect", address=world.engine.address)
    prompt = program.call("count", prompt="My favourite colour is")["tokens"]
    messages = program.call("count", messages=user("My favourite colour is"))["tokens"]
    assert 0 < prompt < messages  # the template's own tokens
    turn = program.call("reply", messages=user("My favourite colour is"), max_tokens=1)
    assert turn["prompt_tokens"] == messages


def texts_become_embeddings(program: Testee, world: World) -> None:
    texts = ["My favourite colour is blue.", "Once upon a time", "My favourite colour is blue."]
    found = program.call("embed", texts=texts)
    first, other, again = found["embeddings"]
    assert found["model"]
    assert first == again != other
    with world.client() as look:
        expected = look.embed(texts[:1]).embeddings[0]
    assert first["tokens"] == expected.tokens > 0
    assert first["values"] == pytest.approx(list(expected.values), abs=1e-6)
    short = program.call("embed", texts=texts[:1], dimensions=4)["embeddings"][0]["values"]
    assert len(short) == 4
    assert math.hypot(*short) == pytest.approx(1, abs=1e-5)
    with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "inputs"):
        program.call("embed", texts=[])
    with refusal("NOT_FOUND", "MODEL_NOT_FOUND", model="no-such-model"):
        program.call("embed", texts=texts, model="no-such-model")
    with refusal("RESOURCE_EXHAUSTED", "CONTEXT_EXCEEDED"):
        program.call("embed", texts=["word " * 60_000])


def a_first_turn_makes_version_one(program: Testee, world: AnyWorld) -> None:
    told = user("My name is Anna.")
    reply = program.call(
        "reply", agent_id="ada", append_messages=told, max_tokens=8, request_id="turn-1", expected_version=0
    )
    assert reply["version"] == 1, reply
    assert reply["parent_version"] == 0
    assert reply["cached_tokens"] == 0
    assert reply["prompt_tokens"] > 0
    assert reply["text"]
    assert reply["request_id"] == "turn-1"
    assert reply["finish_reason"] in ("FINISH_REASON_LENGTH", "FINISH_REASON_STOP")
    again = program.call(
        "reply", agent_id="ada", append_messages=told, max_tokens=8, request_id="turn-1", expected_version=0
    )
    assert (again["source"], again["version"], again["text"]) == ("CACHE_SOURCE_REPLAY", 1, reply["text"])


def a_second_turn_streams_and_reuses_the_first(program: Testee, world: AnyWorld) -> None:
    streamed = program.call("stream", agent_id="ada", append_messages=user("What is my name?"), max_tokens=24)
    assert streamed["is_finished"]
    assert streamed["version"] == 2
    assert streamed["deltas"] >= 2
    third = program.call("reply", agent_id="ada", append_messages=user("And now?"), max_tokens=4, expected_version=2)
    assert third["version"] == 3
    assert third["parent_version"] == 2
    assert third["cached_tokens"] > 0


def a_cancelled_turn_leaves_nothing(program: Testee, world: AnyWorld) -> None:
    told = program.call("stream", agent_id="ada", cancel_after=2, **LONG)
    assert not told["is_finished"]
    assert told["deltas"] == 2
    with world.client() as look:
        wait_until(lambda: look.get_stats().namespaces[0].running_turns == 0)
    assert program.call("get_agent", agent_id="ada")["version"] == 3


def killed_in_a_turn(program: Testee, world: AnyWorld) -> None:
    with futures.ThreadPoolExecutor(1) as pool, world.client() as look:
        turn = pool.submit(program.call, "stream", agent_id="ada", request_id="broken", **LONG)
        wait_until(lambda: look.get_stats().namespaces[0].running_turns == 1)
        world.kill()
        with refusal("UNAVAILABLE", request_id="broken"):
            turn.result()


def killed_and_started_again_it_goes_on(program: Testee, world: World) -> None:
    """The program keeps its client: it must find the services again by itself."""
    killed_in_a_turn(program, world)
    with refusal("UNAVAILABLE", "UNAVAILABLE"):
        program.call("count", prompt="Is anybody there?", timeout_s=20)
    world.start()
    give_up = time.monotonic() + WITHIN_S
    while True:
        try:
            warm = program.call("warm", agent_id="ada", timeout_s=20)
            break
        except Refused as refused:
            assert refused.code == "UNAVAILABLE", refused
            assert time.monotonic() < give_up, refused
            time.sleep(0.1)
    assert warm["source"] == "CACHE_SOURCE_WARM", warm
    assert warm["version"] == 3
    assert 0 < warm["cached_tokens"] <= warm["tokens"]
    reply = program.call("reply", agent_id="ada", append_messages=user("Who am I?"), max_tokens=4)
    assert reply["version"] == 4
    assert reply["cached_tokens"] > 0


def a_fork_is_an_agent_of_its_own(program: Testee, world: AnyWorld) -> None:
    assert program.call("fork", source_agent_id="ada", agent_id="eve", version=2) == {"agent_id": "eve", "version": 1}
    ada, eve = (program.call("get_agent", agent_id=name) for name in ("ada", "eve"))
    assert eve["token_count"] < ada["token_count"]
    reply = program.call("reply", agent_id="eve", append_messages=user("Hello?"), max_tokens=4)
    assert reply["version"] == 2
    assert reply["cached_tokens"] > 0
    assert program.call("get_agent", agent_id="ada") == ada
    with refusal("ALREADY_EXISTS", "AGENT_EXISTS"):
        program.call("fork", source_agent_id="ada", agent_id="eve")
    with refusal("NOT_FOUND", "AGENT_NOT_FOUND", agent_id="nobody"):
        program.call("fork", source_agent_id="nobody", agent_id="x")


def a_rewind_is_a_new_version(program: Testee, world: AnyWorld) -> None:
    with refusal("ABORTED", "HEAD_MOVED", head_version="4"):
        program.call("rollback", agent_id="ada", version=1, expected_version=2)
    assert program.call("rollback", agent_id="ada", version=1, expected_version=4) == {"version": 5}
    reply = program.call("reply", agent_id="ada", append_messages=user("What is my name?"), max_tokens=4)
    assert (reply["parent_version"], reply["version"]) == (5, 6)
    assert reply["cached_tokens"] > 0
    with refusal("NOT_FOUND", "VERSION_NOT_FOUND", agent_id="ada"):
        program.call("rollback", agent_id="ada", version=99)
    with refusal("ABORTED", "HEAD_MOVED", head_version="6"):
        program.call("reply", agent_id="ada", append_messages=user("Hm?"), max_tokens=4, expected_version=3)


def a_turn_says_where_it_goes_on(program: Testee, world: AnyWorld) -> None:
    told = {"agent_id": "ada", "append_messages": user("What is my name?"), "max_tokens": 4}
    before = program.call("get_agent", agent_id="ada")
    only = program.call("reply", memory_mode="MEMORY_MODE_READ_ONLY", **told)
    assert (only["version"], only["continuation"]) == (before["version"], "CONTINUATION_EXTENDED"), only
    assert only["cached_tokens"] > 0
    race = {"agent_id": "ada", "messages": user("Who won the race?"), "max_tokens": 4}
    none = program.call("reply", memory_mode="MEMORY_MODE_NONE", **race)
    assert (none["continuation"], none["parent_version"]) == ("CONTINUATION_UNSPECIFIED", 0), none
    branch = program.call("reply", **race)
    assert (branch["version"], branch["continuation"]) == (before["version"], "CONTINUATION_BRANCHED"), branch
    assert program.call("get_agent", agent_id="ada") == before
    back = program.call("reply", base_version=1, **told)
    assert (back["version"], back["continuation"]) == (before["version"] + 1, "CONTINUATION_REWOUND"), back
    replaced = program.call("reply", agent_id="ada", messages=user("I am Ben."), max_tokens=4, replace_memory=True)
    assert (replaced["version"], replaced["continuation"]) == (before["version"] + 2, "CONTINUATION_REPLACED"), replaced
    with refusal("NOT_FOUND", "AGENT_NOT_FOUND"):
        program.call("reply", agent_id="nobody", append_messages=user("Hi"), max_tokens=4, expect_existing=True)


def a_memory_tells_where_it_lies(program: Testee, world: World) -> None:
    version = program.call("get_agent", agent_id="eve")["version"]
    hot = program.call("list_hot_memories", agent_ids=["nobody", "eve"])["memories"]
    assert [(memory["agent_id"], memory["version"]) for memory in hot] == [("eve", version)]
    assert hot[0]["tokens"] > 0
    assert hot[0]["is_stored"]
    eve, everything = program.call("usage", agent_id="eve"), program.call("usage", agent_id="")
    assert (eve["agent_count"], eve["snapshot_count"]) == (1, version)
    assert 0 < eve["shared_bytes"] <= eve["blob_bytes"]  # ada's first turn is eve's too
    assert eve["blob_bytes"] < everything["blob_bytes"]
    assert everything["agent_count"] == 2
    with refusal("NOT_FOUND", "AGENT_NOT_FOUND", agent_id="nobody"):
        program.call("usage", agent_id="nobody")


def two_hundred_turns_at_once(program: Testee, world: AnyWorld) -> None:
    with futures.ThreadPoolExecutor(1) as pool, world.client() as look:
        turn = {"agent_id": "crowd", "memory_mode": "MEMORY_MODE_NONE", "prompt": "Once upon a time", "max_tokens": 4}
        crowd = pool.submit(program.call, "streams", count=CROWD, **turn)
        most = 0
        while not crowd.done():
            most = max(most, len(look.list_turns()))
            time.sleep(0.02)
        assert crowd.result() == {"finished": CROWD}
        assert most > CROWD // 4, f"{most} were under way at most: not at once"


def a_turn_is_ended_by_its_request_id(program: Testee, world: World) -> None:
    with futures.ThreadPoolExecutor(1) as pool, world.client() as other:
        turn = pool.submit(other.reply, request_id="theirs", **LONG)
        wait_until(lambda: len(program.call("list_turns")["turns"]) == 1)
        listed = program.call("list_turns")["turns"][0]
        assert listed["request_id"] == "theirs"
        assert listed["state"] in ("TURN_STATE_WAITING", "TURN_STATE_RUNNING")
        assert program.call("cancel_turn", request_id="theirs") == {"finish_reasons": ["FINISH_REASON_CANCELLED"]}
        assert turn.result().finished.reason == inference_pb2.FINISH_REASON_CANCELLED
    with refusal("NOT_FOUND", "TURN_NOT_FOUND", request_id="theirs"):
        program.call("cancel_turn", request_id="theirs")


def lists_are_read_to_their_end(program: Testee, world: AnyWorld) -> None:
    for name in ("list-1", "list-2", "list-ö"):
        program.call("fork", source_agent_id="ada", agent_id=name)
    listed = program.call("list_agents", name_prefix="list-", page_size=1)
    assert listed["agent_ids"] == ["list-1", "list-2", "list-ö"]


def an_archive_leaves_and_comes_back(program: Testee, world: World) -> None:
    file = world.files / "ada.tar"
    told = program.call("export", agent_id="ada", file=str(file))
    assert Digest(**told) == Digest.of(file.read_bytes())
    assert program.call("import", agent_id="zoe", file=str(file)) == {"version": 1, "origin": "ORIGIN_IMPORT"}
    reply = program.call("reply", agent_id="zoe", append_messages=user("Hello!"), max_tokens=4)
    assert reply["version"] == 2
    assert reply["cached_tokens"] > 0
    with refusal("ALREADY_EXISTS", "AGENT_EXISTS"):
        heard(lambda: program.call("import", agent_id="zoe", file=str(file)))
    assert program.call("import", agent_id="zoe", file=str(file), replace=True)["version"] == 3
    garbage = world.files / "garbage.tar"
    garbage.write_bytes(b"no archive " * 500_000)  # longer than one message: the refusal comes while it is sent
    with refusal("INVALID_ARGUMENT", "ARCHIVE_MALFORMED"):
        heard(lambda: program.call("import", agent_id="new", file=str(garbage)))
    with refusal("NOT_FOUND", "AGENT_NOT_FOUND"):
        program.call("export", agent_id="nobody", file=str(world.files / "none.tar"))


def an_agent_is_pulled_from_a_peer(program: Testee, world: World) -> None:
    with world.peer_client() as peer:
        peer.import_from_file("guest", world.files / "ada.tar", replace=True)
    pulled = program.call("pull", peer=PEER, agent_id="guest", local_agent_id="visitor")
    assert pulled == {"version": 1, "origin": "ORIGIN_PULL"}
    assert program.call("reply", agent_id="visitor", append_messages=user("Hi"), max_tokens=4)["cached_tokens"] > 0
    with refusal("NOT_FOUND", "PEER_UNKNOWN", peer="elsewhere"):
        program.call("pull", peer="elsewhere", agent_id="guest")


def a_deleted_agent_is_gone(program: Testee, world: AnyWorld) -> None:
    program.call("delete", agent_id="list-1")
    with refusal("NOT_FOUND", "AGENT_NOT_FOUND", agent_id="list-1"):
        program.call("get_agent", agent_id="list-1")
    with refusal("NOT_FOUND", "AGENT_NOT_FOUND"):
        program.call("delete", agent_id="list-1")


def refusals_name_the_field_and_the_reason(program: Testee, world: AnyWorld) -> None:
    with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "sampling.max_tokens"):
        program.call("reply", agent_id="ada", prompt="Hello", max_tokens=0)
    with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "agent_id"):
        program.call("reply", agent_id="a\nb", prompt="Hello")
    with refusal("NOT_FOUND", "MODEL_NOT_FOUND", model="no-such-model"):
        program.call("reply", agent_id="ada", model="no-such-model", prompt="Hello")
    with refusal("RESOURCE_EXHAUSTED", "CONTEXT_EXCEEDED"):
        program.call("reply", agent_id="ada", prompt="word " * 60_000)
    with refusal("INVALID_ARGUMENT"):
        program.call("reply", agent_id="ada")  # no input
    with refusal("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"):
        program.call("reply", agent_id="ada", timeout_s=0.3, **LONG)


STEPS: tuple[Step, ...] = (
    addresses_that_are_refused_by_the_client_itself,
    tls_and_a_token_at_the_store,
    counting,
    texts_become_embeddings,
    a_first_turn_makes_version_one,
    a_second_turn_streams_and_reuses_the_first,
    a_cancelled_turn_leaves_nothing,
    killed_and_started_again_it_goes_on,
    a_fork_is_an_agent_of_its_own,
    a_rewind_is_a_new_version,
    a_turn_says_where_it_goes_on,
    a_memory_tells_where_it_lies,
    a_turn_is_ended_by_its_request_id,
    two_hundred_turns_at_once,
    lists_are_read_to_their_end,
    an_archive_leaves_and_comes_back,
    an_agent_is_pulled_from_a_peer,
    a_deleted_agent_is_gone,
    refusals_name_the_field_and_the_reason,
    reads_are_asked_again_and_nothing_else_is,
    a_turn_that_moves_says_where_its_rest_is,
    a_turn_goes_to_the_engine_that_holds_its_agent,
    a_client_has_the_limits_of_every_client,
)


def run(program: Testee, world: AnyWorld, say: Callable[[str], Any], steps: Sequence[Step] = STEPS) -> None:
    """These steps, in order. Raises AssertionError that names the step."""
    for number, step in enumerate(steps, 1):
        began = time.monotonic()
        try:
            step(program, world)
        except (Exception, pytest.fail.Exception) as error:  # pytest's is no Exception
            line = traceback.extract_tb(error.__traceback__)[-1].line if not str(error) else ""
            raise AssertionError(f"step {number}, {step.__name__}: {error}{line}") from error
        say(f"  {number:2d} {step.__name__.replace('_', ' ')} ({time.monotonic() - began:.1f} s)")
