"""Where a turn goes on: at the end, at an earlier point, beside the agent's line, or in its place; and how it ends."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.call_context import name_call
from kvasir.clients import InferenceClient, Reply
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.status import from_rpc_error

from inference_svc.edge.agent_service import AGENT_SERVICE_NAME
from tests.made_models.messages import by_user
from tests.running.system_fixtures import House

GREEDY = {"max_tokens": 6}
LONG = {"max_tokens": 1500, "stop_token_ids": []}
READ_ONLY = pb.MEMORY_MODE_READ_ONLY
TURNS = 24


def talk(client: InferenceClient, agent: str, texts: list[str]) -> list[Reply]:
    return [client.reply(agent_id=agent, append_messages=by_user(text), sampling=GREEDY) for text in texts]


def versions(client: InferenceClient, agent: str) -> list[int]:
    return [each.version for each in client.list_snapshots(agent).snapshots]


def held(client: InferenceClient) -> tuple[int, int]:
    """KV of hot memories and of running turns, and how many memories are hot."""
    engine = client.get_stats().engine
    return engine.kv_memory_used_bytes, engine.hot_memories


@pytest.mark.long(7)
def test_a_rewind_to_any_turn_computes_its_last_token_only_and_says_what_was_said(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    said = talk(client, agent, [f"Question {number}: what of it?" for number in range(TURNS)])
    told: list[dict[str, str]] = []
    for number, first in enumerate(said):
        told += by_user(f"Question {number}: what of it?")
        again = client.reply(agent_id=agent, messages=told, memory_mode=READ_ONLY, sampling=GREEDY)
        assert again.started.cached_tokens == again.started.prompt_tokens - 1, number
        assert again.started.continuation in (pb.CONTINUATION_REWOUND, pb.CONTINUATION_EXTENDED)
        # The agent had no longer memory when it said this first.
        assert again.token_ids == first.token_ids, number
        told.append({"role": "assistant", "content": first.text})
    back = client.reply(agent_id=agent, messages=told[: 2 * 3 + 1], sampling=GREEDY)
    assert (back.started.continuation, back.started.parent_version) == (pb.CONTINUATION_REWOUND, TURNS)
    assert back.started.cached_tokens == back.started.prompt_tokens - 1
    assert back.token_ids == said[3].token_ids
    assert versions(client, agent)[0] == TURNS + 1


def test_a_read_only_turn_changes_nothing(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent, twin = new_agent(), new_agent()
    for name in (agent, twin):
        talk(client, name, ["I keep bees.", "They are busy."])
    before = (held(client), client.get_agent(agent).lines[0].manifest, versions(client, agent))
    title = [{"role": "system", "content": "Write a title."}, *by_user("I keep bees.")]
    for given in (
        {"append_messages": by_user("A title, please.")},
        {"messages": title},
        {"prompt": "Once upon a time"},
    ):
        side = client.reply(agent_id=agent, memory_mode=READ_ONLY, sampling=GREEDY, **given)  # type: ignore[arg-type]
        outcome = side.finished.snapshot
        assert (outcome.state, outcome.version, outcome.written_bytes) == (pb.SNAPSHOT_STATE_NONE, 2, 0)
        assert (held(client), client.get_agent(agent).lines[0].manifest, versions(client, agent)) == before
    after, expected = (talk(client, name, ["What do I keep?"])[0] for name in (agent, twin))
    assert after.token_ids == expected.token_ids
    assert (after.started.source, after.started.cached_tokens) == (pb.CACHE_SOURCE_HOT, expected.started.cached_tokens)


def test_a_turn_goes_on_from_an_older_version_as_if_nothing_had_followed(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    talk(client, agent, ["I keep bees.", "And a goat.", "And a cow."])
    talk(client, twin, ["I keep bees."])
    branch = client.reply(agent_id=agent, append_messages=by_user("And a cat."), base_version=1, sampling=GREEDY)
    expected = talk(client, twin, ["And a cat."])[0]
    started = branch.started
    assert (started.parent_version, started.base_version, started.continuation) == (3, 1, pb.CONTINUATION_REWOUND)
    assert started.cached_tokens >= expected.started.cached_tokens > 0
    assert branch.token_ids == expected.token_ids
    assert branch.finished.snapshot.version == 4
    [hot] = client.list_hot_memories([twin + " is nobody", agent])
    assert (hot.agent_id, hot.version, hot.is_stored) == (agent, 4, True)
    assert hot.tokens == client.list_snapshots(agent).snapshots[0].token_count
    after, expected = (talk(client, name, ["What do I keep?"])[0] for name in (agent, twin))
    assert after.token_ids == expected.token_ids
    aside = client.reply(
        agent_id=agent, append_messages=by_user("And a dog."), base_version=3, memory_mode=READ_ONLY, sampling=GREEDY
    )
    assert (aside.started.base_version, aside.finished.snapshot.version) == (3, 5)
    bases = {each.version: each.base_version for each in client.list_snapshots(agent).snapshots}
    assert bases == {5: 4, 4: 1, 3: 2, 2: 1, 1: 0}
    with pytest.raises(errors.NotFound) as nothing:
        client.reply(agent_id=agent, append_messages=by_user("x"), base_version=99, sampling=GREEDY)
    assert nothing.value.reason == "VERSION_NOT_FOUND"


def test_an_older_versions_own_files_serve_where_the_newest_shares_less(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    told = f"{agent} keeps bees, and they are busy."
    said = [talk(client, name, [told]) for name in (agent, twin)]
    assert said[0][0].token_ids == said[1][0].token_ids
    client.reply(agent_id=agent, messages=by_user("Once upon a time."), replace_memory=True, sampling=GREEDY)
    back = client.reply(agent_id=agent, append_messages=by_user("Who is?"), base_version=1, sampling=GREEDY)
    expected = talk(client, twin, ["Who is?"])[0]
    assert (back.started.source, back.started.cached_tokens) == (pb.CACHE_SOURCE_WARM, expected.started.cached_tokens)
    assert back.token_ids == expected.token_ids
    assert back.finished.snapshot.version == 3


def test_another_conversation_is_a_branch_and_takes_the_place_only_if_asked(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    for name in (agent, twin):
        talk(client, name, ["I keep bees.", "They are busy."])
    other: dict[str, Any] = {"agent_id": agent, "messages": by_user("Write a title."), "sampling": GREEDY}
    branch = client.reply(**other)
    assert branch.started.continuation == pb.CONTINUATION_BRANCHED
    assert (branch.finished.snapshot.state, branch.finished.snapshot.version) == (pb.SNAPSHOT_STATE_NONE, 2)
    assert "branch" in branch.finished.snapshot.reason
    after, expected = (talk(client, name, ["What do I keep?"])[0] for name in (agent, twin))
    assert (after.token_ids, after.finished.snapshot.version) == (expected.token_ids, 3)
    instead = client.reply(**other, replace_memory=True)
    assert (instead.started.continuation, instead.finished.snapshot.version) == (pb.CONTINUATION_REPLACED, 4)
    assert instead.token_ids == branch.token_ids


def test_an_append_to_a_new_agent_is_its_first_turn_unless_its_caller_minds(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    with pytest.raises(errors.NotFound) as nobody:
        client.reply(agent_id=agent, append_messages=by_user("Hello."), expect_existing=True, sampling=GREEDY)
    assert (nobody.value.reason, nobody.value.metadata["agent_id"]) == ("AGENT_NOT_FOUND", agent)
    first = client.reply(agent_id=agent, append_messages=by_user("Hello."), sampling=GREEDY)
    assert (first.started.continuation, first.finished.snapshot.version) == (pb.CONTINUATION_NEW, 1)
    second = client.reply(agent_id=agent, append_messages=by_user("Again."), expect_existing=True, sampling=GREEDY)
    assert (second.started.continuation, second.finished.snapshot.version) == (pb.CONTINUATION_EXTENDED, 2)
    told = new_agent()
    client.reply(agent_id=told, prompt="Once upon a time", sampling=GREEDY)
    with pytest.raises(errors.FailedPrecondition) as text:
        client.reply(agent_id=told, append_messages=by_user("Hello."), sampling=GREEDY)
    assert (text.value.reason, text.value.metadata["agent_id"]) == ("NO_MESSAGES", told)


def test_a_turn_without_memory_neither_reads_nor_leaves_any(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    talk(client, agent, ["I keep bees."])
    none = client.reply(
        agent_id=agent, messages=by_user("I keep bees."), memory_mode=pb.MEMORY_MODE_NONE, sampling=GREEDY
    )
    assert (none.started.cached_tokens, none.started.continuation) == (0, pb.CONTINUATION_UNSPECIFIED)
    assert versions(client, agent) == [1]


# --- ending turns ---


@pytest.mark.parametrize("keeps", [True, False])
def test_a_cancelled_turn_reports_what_is_kept(
    client: InferenceClient, new_agent: Callable[[], str], *, keeps: bool
) -> None:
    agent, request_id = new_agent(), f"cancelled {keeps}"
    talk(client, agent, ["I keep bees."])
    events = client.generate(
        agent_id=agent, append_messages=by_user("A story."), sampling=LONG, request_id=request_id, keep_partial=keeps
    )
    while next(events).WhichOneof("event") != "delta":
        pass
    waiting = client.generate(agent_id=agent, append_messages=by_user("Another."), sampling=GREEDY, request_id="waits")
    with pytest.raises(errors.NotFound) as unknown:
        client.cancel_turn("nobody's")
    assert unknown.value.reason == "TURN_NOT_FOUND"
    [open_turn] = [each for each in client.list_turns() if each.request_id == request_id]
    assert (open_turn.agent_id, open_turn.state) == (agent, pb.TURN_STATE_RUNNING)
    assert open_turn.prompt_tokens > open_turn.cached_tokens > 0
    [ended] = client.cancel_turn(request_id, timeout_s=20)
    *_, last = events
    assert last.finished == ended
    assert ended.reason == pb.FINISH_REASON_CANCELLED
    assert ended.usage.completion_tokens > 0
    kept = (pb.SNAPSHOT_STATE_COMMITTED, 2) if keeps else (pb.SNAPSHOT_STATE_NONE, 1)
    assert (ended.snapshot.state, ended.snapshot.version) == kept
    assert versions(client, agent)[0] == kept[1]
    assert [each.WhichOneof("event") for each in waiting][-1] == "finished"
    assert request_id not in {each.request_id for each in client.list_turns()}


def test_a_turn_that_waits_is_cancelled_before_it_began(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    first = client.generate(agent_id=agent, append_messages=by_user("A story."), sampling=LONG)
    while next(first).WhichOneof("event") != "delta":
        pass
    told: list[pb.GenerateResponse] = []
    second = client.generate(agent_id=agent, append_messages=by_user("Another."), request_id="second")
    reader = threading.Thread(target=lambda: told.extend(second))
    reader.start()
    while not (found := [each for each in client.list_turns() if each.request_id == "second"]):
        time.sleep(0.01)
    assert found[0].state == pb.TURN_STATE_WAITING
    client.cancel_turn("second", timeout_s=20)
    reader.join(20)
    first.close()
    assert [each.WhichOneof("event") for each in told] == ["finished"]
    assert told[0].finished.reason == pb.FINISH_REASON_CANCELLED
    assert told[0].finished.snapshot.state == pb.SNAPSHOT_STATE_NONE


def test_a_warm_whose_call_is_cancelled_by_its_name_ends_as_cancelled(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, ended = new_agent(), list[errors.KvasirError | pb.WarmResponse]()
    first = client.generate(agent_id=agent, append_messages=by_user("A story."), sampling=LONG)
    while next(first).WhichOneof("event") != "delta":
        pass

    def warms() -> None:  # once the turn before it has ended
        name_call("warms")
        try:
            ended.append(client.warm(agent_id=agent))
        except errors.KvasirError as error:
            ended.append(error)

    warming = threading.Thread(target=warms)
    warming.start()
    for _ in range(500):
        with contextlib.suppress(errors.NotFound):
            assert client.cancel_turn("warms", timeout_s=20) == []
            break
        time.sleep(0.01)
    warming.join(20)
    first.close()
    assert [type(each) for each in ended] == [errors.Cancelled]


# --- one address ---


def test_agents_are_requested_at_the_engines_address(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, copy, moved = (f"one address {new_agent()}" for _ in range(3))
    talk(client, agent, ["I keep bees.", "They are busy."])
    assert [each.agent_id for each in client.list_agents(name_prefix=agent).agents] == [agent]
    assert client.update_agent(agent, labels={"team": "red", "old": "x"}, is_pinned=True).labels["team"] == "red"
    assert client.update_agent(agent, labels={"old": ""}).labels == {"team": "red"}
    assert client.fork_agent(agent, copy, version=1).lines[0].version == 1
    assert client.rollback_agent(agent, 1, expected_version=2).version == 3
    archive = b"".join(client.export_agent(agent))
    assert client.import_agent(moved, [archive]).version == 1
    with house.store_client() as store:
        found = client.get_agent(agent)
        assert found.lines[0].context_tokens == client.get_model().context_tokens
        found.lines[0].context_tokens = 0  # an engine alone knows it
        assert store.get_agent(agent) == found
        assert store.get_snapshot(agent) == client.get_snapshot(agent)
    with pytest.raises(errors.FailedPrecondition) as pinned:
        client.delete_agent(agent)
    assert pinned.value.reason == "AGENT_PINNED"
    for name in (agent, copy, moved):
        client.delete_agent(name, force=True)
    with pytest.raises(errors.NotFound) as gone:
        client.get_agent(agent)
    assert (gone.value.reason, gone.value.metadata["agent_id"]) == ("AGENT_NOT_FOUND", agent)


def test_an_import_at_the_engines_address_is_refused_as_the_store_refuses_it(house: House) -> None:
    header = cachestore_pb2.ImportAgentRequest(header=cachestore_pb2.ImportAgentHeader(agent_id="unread"))
    refusals = []
    for address in (house.store.address, house.engine.address):
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_unary(f"/{AGENT_SERVICE_NAME}/ImportAgent")  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError) as refused:
                call(iter([header.SerializeToString(), b"\xff no message"]), timeout=20)
            refusals.append(from_rpc_error(refused.value))
    assert [type(each) for each in refusals] == [errors.InvalidArgument] * 2
    assert [each.reason for each in refusals] == ["UNREADABLE"] * 2
