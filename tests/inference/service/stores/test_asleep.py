"""Agents that sleep: the store keeps their tokens alone, and their next replies and bytes are the same."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient, Reply
from kvasir.errors import FailedPrecondition, KvasirError, NotFound
from kvasir.formats import archive, manifest
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2

from tests.cli.running import in_process
from tests.inference.engine.tiny_models import LLAMA
from tests.inference.service.memories.test_brought_memories import exported
from tests.made_models.remembered import token_ids
from tests.made_models.sampling import IS_WHOLE
from tests.running.system_fixtures import ENGINE_SERVICE, House, Service, running_house

WORDS = [f"word{number}" for number in range(300)]
PIECES = [range(first, first + 20) for first in range(0, 200, 20)] if IS_WHOLE else [range(1)]
LONGEST_S = 0.6  # of falling asleep, about


def ask(house: House, agent: str, text: str, seed: int, **more: object) -> Reply:
    said = {"max_tokens": 40, "temperature": 1.0, "seed": seed}
    with house.client() as client:
        return client.reply(agent_id=agent, append_messages=[{"role": "user", "content": text}], sampling=said, **more)  # type: ignore[arg-type]


def stored(house: House, agent: str) -> manifest_pb2.Manifest:
    with house.store_client() as store:
        return manifest.parse(store.get_snapshot(agent)[1])


def lived(house: House, agent: str, chance: random.Random, naps: Callable[[], None]) -> list[Sequence[int]]:
    """An agent's replies in some turns, after each of which `naps` is called."""
    said = []
    for turn in range(chance.randrange(2, 5)):
        text = " ".join(chance.choices(WORDS, k=chance.randrange(1, 120)))
        said.append(ask(house, agent, text, turn).token_ids)
        naps()
    return said


def lay_down(house: House, agent: str) -> None:
    with contextlib.suppress(KvasirError), house.client() as client:
        client.sleep(agent)


@pytest.mark.long(5)
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("lives", PIECES, ids=lambda lives: f"from{lives.start}")
def test_lives_with_naps_are_those_that_never_slept(house: House, new_agent: Callable[[], str], lives: range) -> None:
    for life in lives:
        naps, tired, awake = random.Random(1000 + life), new_agent(), new_agent()

        def nap(chance: random.Random = naps, agent: str = tired) -> None:
            falls_asleep = Thread(target=lay_down, args=(house, agent))
            if chance.random() < 0.7:
                falls_asleep.start()
                if is_killed := chance.random() < 0.3:
                    time.sleep(chance.random() * LONGEST_S)
                    house.kill()
                falls_asleep.join()
                house.repair()
                assert is_killed or stored(house, agent).HasField("asleep")
            if chance.random() < 0.3:
                house.restart()

        assert lived(house, tired, random.Random(life), nap) == lived(house, awake, random.Random(life), lambda: None)
        ask(house, tired, "and now?", 7)
        ask(house, awake, "and now?", 7)
        one, other = stored(house, tired), stored(house, awake)
        assert one.token_ids == other.token_ids
        assert (one.blocks, one.tail) == (other.blocks, other.tail), f"life {life}: stored bytes differ"


@pytest.mark.long(6)
def test_an_agent_asleep_costs_its_tokens_and_wakes_with_its_bytes(house: House, new_agent: Callable[[], str]) -> None:
    agent, twin = new_agent(), new_agent()
    for each in (agent, twin):
        for turn in range(4):
            ask(house, each, " ".join(WORDS[40 * turn : 40 * turn + 40]), turn)
    awake = stored(house, agent)
    with house.client() as client, house.store_client() as store:
        slept = client.sleep(agent)
        assert slept.version == 5
        line = store.get_agent(agent).lines[0]
        assert (line.version, line.total_bytes) == (5, slept.kept_bytes)
        assert line.origin_detail == f"asleep, wakes in {slept.wake.ToMilliseconds()} ms"
        kept = [each.version for each in store.list_snapshots(agent).snapshots]
        assert kept == [5], "older versions would keep the KV"
        assert slept.freed_bytes == sum(each.size_bytes for each in (*awake.blocks, awake.tail))
        again = client.sleep(agent)
        assert (again.version, again.freed_bytes) == (5, slept.freed_bytes), "it is asleep already"
        counts = {(each.waiting_turns, each.running_turns) for each in client.get_stats().namespaces}
        assert counts == {(0, 0)}, "no turn is under way"
        house.restart()
    told = ask(house, agent, "and now?", 9, expected_version=4)
    assert told.token_ids == ask(house, twin, "and now?", 9).token_ids
    assert told.finished.snapshot.version == 6
    assert stored(house, agent).blocks == stored(house, twin).blocks
    assert stored(house, agent).tail == stored(house, twin).tail


@pytest.mark.long(3)
def test_the_commands_put_an_agent_to_sleep_list_it_and_wake_it(house: House, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    ask(house, agent, " ".join(WORDS[:90]), 1)

    def kvasir(*words: str, code: int = 0) -> Any:
        ended = in_process(
            "--address", house.store.address, "--engine", house.engine.address, "agents", *words, "--json"
        )
        assert ended.code == code, ended.err
        return ended.value

    def listed() -> tuple[str, int | None]:
        [row] = (row for row in kvasir("ls") if row["agent_id"] == agent)
        return row["temperature"], row["wake_ms"]

    assert listed() == ("hot", None)
    slept = kvasir("sleep", agent)
    assert slept["kept_bytes"] < slept["freed_bytes"]
    assert listed() == ("asleep", slept["wake_ms"])
    assert kvasir("wake", agent)["tokens"] == slept["tokens"] - 1  # those that have KV
    assert listed() == ("hot", None)
    again = kvasir("sleep", agent)
    assert (again["version"], listed()[0]) == (slept["version"], "asleep"), "nobody used it since it woke"
    for command in ("sleep", "wake"):
        assert kvasir(command, new_agent(), code=5)["error"]["reason"] == "AGENT_NOT_FOUND"


@pytest.mark.long(14)
def test_agents_unused_for_long_fall_asleep_but_pinned_ones_do_not(
    own_house: House, new_agent: Callable[[], str]
) -> None:
    unused, pinned = new_agent(), new_agent()
    for each in (unused, pinned):
        ask(own_house, each, "hello", 1)
    with own_house.store_client() as store:
        store.update_agent(pinned, is_pinned=True)
    own_house.engine.stop()
    own_house.engine.options += ["--asleep-after-s", "1"]
    own_house.repair()
    give_up = time.monotonic() + 60
    while not stored(own_house, unused).HasField("asleep"):
        assert time.monotonic() < give_up, own_house.engine.log
        time.sleep(0.2)
    assert not stored(own_house, pinned).HasField("asleep")
    assert ask(own_house, unused, "and?", 2).token_ids == ask(own_house, pinned, "and?", 2).token_ids


@pytest.mark.long(8)
def test_agents_fall_asleep_after_their_model_was_to_go_and_had_to_stay(
    own_house: House, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    own_house.engine.stop()
    own_house.engine.options += ["--asleep-after-s", "5", "--stop-grace-s", "0.5", "--commit-wait-s", "0.5"]
    own_house.repair()
    ask(own_house, agent, "hello", 1)
    own_house.store.kill()
    ask(own_house, agent, "and?", 2)
    with own_house.client() as client, pytest.raises(FailedPrecondition) as kept:
        client.unload_model()
    assert kept.value.reason == "MEMORIES_NOT_STORED"
    own_house.repair()
    give_up = time.monotonic() + 30
    with own_house.store_client() as store:  # to read its newest version would be a use of the agent
        while not store.get_agent(agent).lines[0].origin_detail.startswith("asleep"):
            assert time.monotonic() < give_up, own_house.engine.log
            time.sleep(0.2)


@pytest.mark.long(3)
@pytest.mark.parametrize("how", ["fork", "archive"])
def test_a_fork_and_an_archive_of_an_agent_asleep_wake_too(
    house: House, new_agent: Callable[[], str], how: str
) -> None:
    agent, copy = new_agent(), new_agent()
    ask(house, agent, " ".join(WORDS[:90]), 1)
    with house.client() as client, house.store_client() as store:
        client.sleep(agent)
        if how == "fork":
            store.fork_agent(agent, copy)
        else:
            store.import_agent(copy, list(store.export_agent(agent)))
        assert stored(house, copy).HasField("asleep")
        warmed = client.warm(agent_id=copy)
        assert warmed.computed_tokens == 0
        assert [each.tokens for each in client.list_hot_memories([copy])] == [warmed.tokens + 1]  # the last has no KV
    assert ask(house, agent, "more", 2).token_ids == ask(house, copy, "more", 2).token_ids
    assert stored(house, agent).tail == stored(house, copy).tail


@pytest.mark.long(3)
def test_a_fork_of_an_agent_that_is_awake_again_computes_nothing(house: House, new_agent: Callable[[], str]) -> None:
    agent, hot, cold = new_agent(), new_agent(), new_agent()
    ask(house, agent, " ".join(WORDS[:90]), 1)
    with house.client() as client, house.store_client() as store:
        client.sleep(agent)
        for copy in (hot, cold):
            store.fork_agent(agent, copy)
        client.warm(agent_id=agent)
        first = ask(house, hot, "more", 2)
        assert first.started.source == inference_pb2.CACHE_SOURCE_HOT
        went_on = [ask(house, each, "more", 2) for each in (agent, cold)]
        assert went_on[1].started.source == inference_pb2.CACHE_SOURCE_WOKEN, "no hot memory is this version any more"
    assert [each.token_ids for each in went_on] == [first.token_ids] * 2
    one, *others = (stored(house, each) for each in (hot, agent, cold))
    assert all((one.blocks, one.tail) == (each.blocks, each.tail) for each in others)


@pytest.mark.long(2)
def test_an_import_of_an_agent_asleep_keeps_the_versions_of_the_agent_that_it_replaces(
    house: House, new_agent: Callable[[], str]
) -> None:
    asleep, agent, twin = new_agent(), new_agent(), new_agent()
    for each in (asleep, agent, twin):
        ask(house, each, " ".join(WORDS[:40]), 1)
    with house.client() as client, house.store_client() as store:
        client.sleep(asleep)
        store.import_agent(agent, list(store.export_agent(asleep)), replace=True)
        assert [each.version for each in store.list_snapshots(agent).snapshots] == [2, 1]
        client.rollback_agent(agent, 1)
    assert ask(house, agent, "more", 2).token_ids == ask(house, twin, "more", 2).token_ids


def test_an_agent_whose_rows_are_of_unknown_origin_stays_awake(house: House, new_agent: Callable[[], str]) -> None:
    agent, copy = new_agent(), new_agent()
    with house.client() as client, house.store_client() as store:
        with pytest.raises(NotFound, match="remembers nothing"):
            client.sleep(agent)
        ask(house, agent, "hello", 1)
        known = stored(house, agent)
        known.ClearField("computed")  # as an engine of an earlier release stored it
        blobs = {Digest.of(data): data for data in exported(house, agent)[1].values()}
        store.import_agent(copy, archive.pack(known, blobs, agent_id=copy))
        with pytest.raises(FailedPrecondition, match="not known how") as refused:
            client.sleep(copy)
        assert refused.value.reason == "CANNOT_SLEEP"
        assert store.get_agent(copy).lines[0].version == 1


@pytest.mark.long(2)
def test_an_agent_that_fills_its_context_stays_awake(tmp_path: Path) -> None:
    with running_house(tmp_path, engine_options=("--context-tokens", "64")) as house, house.client() as client:
        left = 64 - client.count_tokens(prompt="hello")
        for agent, max_tokens in (("full", left), ("almost", left - 1)):
            client.reply(agent_id=agent, prompt="hello", sampling={"max_tokens": max_tokens, "logit_bias": {65: 100.0}})
        assert len(token_ids(stored(house, "full"))) == 64
        with pytest.raises(FailedPrecondition, match="fills the context") as refused:
            client.sleep("full")
        assert refused.value.reason == "CANNOT_SLEEP"
        assert client.sleep("almost").tokens == 63
        assert client.warm(agent_id="almost").computed_tokens == 0


@pytest.mark.long(8)
def test_an_agent_asleep_is_awake_before_the_turn_that_its_returns_foretell(
    own_house: House, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    for each in (agent, twin):
        ask(own_house, each, " ".join(WORDS[:90]), 1)
    with own_house.client() as client:
        client.sleep(agent)
    own_house.engine.stop()
    state = own_house.root / "state"
    write_returns(state, agent, json.loads((state / "returns.json").read_text())["default"][agent][1])
    own_house.repair()
    give_up = time.monotonic() + 60
    with own_house.client() as client:
        while not (found := client.list_hot_memories([agent])) or not found[0].is_woken_ahead:
            assert time.monotonic() < give_up, own_house.engine.log
            time.sleep(0.2)
        reply = ask(own_house, agent, "and?", 2)
        assert reply.token_ids == ask(own_house, twin, "and?", 2).token_ids
        assert stored(own_house, agent).tail == stored(own_house, twin).tail
        [numbers] = client.get_stats().namespaces
        assert dict(numbers.wakes) == {"hidden": 1}
        assert not client.list_hot_memories([agent])[0].is_woken_ahead


@pytest.mark.long(14)
def test_an_agent_that_another_engine_has_is_not_woken_ahead(own_house: House, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    ask(own_house, agent, " ".join(WORDS[:90]), 1)
    with own_house.client() as client:
        client.sleep(agent)
        client.warm(agent_id=agent)
        with second_engine(own_house, agent) as second:
            give_up = time.monotonic() + 13  # it looks every five seconds
            while time.monotonic() < give_up:
                assert not second.list_hot_memories([agent])
                assert client.list_hot_memories([agent]), "it was taken"
                time.sleep(0.1)


@pytest.mark.long(33)
def test_a_turn_elsewhere_ends_a_wake_of_its_agent(own_house: House, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    endless = {"max_tokens": 2000, "logit_bias": {LLAMA["eos_token_id"]: -100.0}}
    with own_house.client() as client:
        client.reply(agent_id=agent, append_messages=[{"role": "user", "content": "Go on."}], sampling=endless)
        slept = client.sleep(agent)
        assert slept.wake.ToSeconds() > 2, "longer than a turn waits for another engine"
        with second_engine(own_house, agent) as second:
            begun, give_up = second.get_stats().engine.computed_tokens, time.monotonic() + 60
            while second.get_stats().engine.computed_tokens < begun + 100:
                assert time.monotonic() < give_up
                time.sleep(0.02)
            time.sleep(0.3)
            assert ask(own_house, agent, "And I?", 1).finished.snapshot.version == slept.version + 1
            assert not second.list_hot_memories([agent]), "half of a memory is none"


@contextlib.contextmanager
def second_engine(house: House, agent: str) -> Iterator[InferenceClient]:
    """Of the same store; it served the agent's last turn, and expects the next one now."""
    socket = Path(house.engine.address.removeprefix("unix:")).with_name("e2")
    state = house.root / "state2"
    state.mkdir()
    write_returns(state, agent, stored(house, agent).turn.request_id)
    second = Service("engine", "inference_svc", ENGINE_SERVICE, socket, house.root / "engine2.log")
    second.options = [*house.engine.options, "--state-dir", str(state)]
    second.start()
    try:
        with InferenceClient.connect(second.address) as client:
            yield client
    finally:
        second.kill()


def write_returns(state_dir: Path, agent: str, request_id: str) -> None:
    """That the agent came at this time on nine days, and last with this request."""
    day_s, now_s = 86_400, time.time()
    known = [[now_s - days * day_s, day_s] for days in range(9, 0, -1)]
    (state_dir / "returns.json").write_text(json.dumps({"default": {agent: [known[-1][0], request_id, *known]}}))
