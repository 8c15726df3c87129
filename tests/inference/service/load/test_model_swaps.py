"""Several models, one loaded at a time: what is named, what is refused, and that agents' lines survive a swap."""

import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.credentials import ADMIN, CLIENT, Principal, write_credentials
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc

from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

GREEDY = {"max_tokens": 6}
TOLD = [{"role": "user", "content": "The word of the day is heliotrope, and it grows by the south wall. " * 10}]
ASKED = [{"role": "user", "content": "Which word?"}]


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two that load, and one that does not."""
    other = write_model(tmp_path_factory.mktemp("models") / "other", LLAMA, seed=1)
    return ["--model", f"first={model}", "--model", f"second={other}", "--model", f"broken={model.parent / 'nowhere'}"]


@pytest.fixture
def house(request: pytest.FixtureRequest, models: list[str], model: Path, tmp_path: Path) -> Iterator[House]:
    """Its model waits 3 s for what is on its way, or as long as the test says."""
    grace_s = getattr(request, "param", "3")
    house = House(tmp_path, model, engine_options=("--commit-wait-s", "2", "--stop-grace-s", grace_s))
    at = house.engine.options.index("--model")
    house.engine.options[at : at + 2] = models
    try:
        house.start()
        yield house
    finally:
        house.close()


@pytest.mark.long(3)
def test_agents_lines_survive_a_swap_of_models_and_back(house: House) -> None:
    with house.client() as client:
        assert [(each.name, each.state == pb.MODEL_STATE_LOADED) for each in client.list_models()] == [
            ("first", True),
            ("second", False),
            ("broken", False),
        ]
        told = client.reply(agent_id="ada", messages=TOLD, sampling=GREEDY)
        twin = client.reply(agent_id="twin", messages=TOLD, sampling=GREEDY)
        expected = client.reply(agent_id="twin", append_messages=ASKED, sampling=GREEDY)
        assert told.token_ids == twin.token_ids

        answer = client.load_model("second")
        assert (answer.model.name, answer.model.state, answer.left.stored) == (
            "second",
            pb.MODEL_STATE_LOADED,
            2,
        )
        # Her words are there, under another model: they are computed again, and become another line.
        other = client.reply(agent_id="ada", append_messages=ASKED, sampling=GREEDY)
        assert other.started.model == "second"
        assert other.started.miss == pb.MISS_REASON_KV_IDENTITY_DIFFERS
        assert other.finished.snapshot.version == 2

        client.load_model("first")
        same = client.reply(agent_id="twin", append_messages=ASKED, sampling=GREEDY)
        assert (same.started.source, same.started.reason) == (pb.CACHE_SOURCE_WARM, "")
        # What was said under the other model is known here too.
        again = client.reply(agent_id="ada", append_messages=ASKED, sampling=GREEDY)
        assert again.started.source == pb.CACHE_SOURCE_WARM
        assert again.started.miss == pb.MISS_REASON_KV_IDENTITY_DIFFERS
        assert (again.started.parent_version, again.started.continuation) == (2, pb.CONTINUATION_EXTENDED)
        assert again.started.prompt_tokens > same.started.cached_tokens
        client.rollback_agent("ada", 1)
        client.rollback_agent("twin", 1)
        back, also = (client.reply(agent_id=name, append_messages=ASKED, sampling=GREEDY) for name in ("ada", "twin"))
        assert back.token_ids == also.token_ids == expected.token_ids


@pytest.mark.long(2)
def test_what_is_not_loaded_is_refused_with_what_to_do_and_no_path_is_taken_from_the_wire(
    house: House, model: Path
) -> None:
    with house.client() as client:
        with pytest.raises(errors.FailedPrecondition) as other:
            client.reply(prompt="hello", model="second", sampling=GREEDY)
        assert (other.value.reason, other.value.field) == ("MODEL_NOT_LOADED", "model")
        assert "'first'" in other.value.message
        assert "LoadModel" in other.value.message
        for name in (str(model), "nowhere", "../first", "mlx-community/Qwen3-8B-4bit"):
            with pytest.raises(errors.NotFound):
                client.load_model(name)
            with pytest.raises(errors.NotFound):
                client.reply(prompt="hello", model=name, sampling=GREEDY)
        assert client.get_model("second") == pb.Model(name="second", state=pb.MODEL_STATE_NOT_LOADED)

        client.unload_model()
        client.unload_model("first")  # changes nothing
        left_bytes = int(re.findall(r"left_bytes\W+(\d+)", house.engine.log)[-1])
        assert left_bytes < 1 << 16, "of weights and pages"
        assert not any(each.state == pb.MODEL_STATE_LOADED for each in client.list_models())
        assert client.get_stats().model == ""
        for call in (lambda: client.reply(prompt="hello"), lambda: client.count_tokens(prompt="hello")):
            with pytest.raises(errors.FailedPrecondition) as none:
                call()
            assert none.value.reason == "MODEL_NOT_LOADED"
            assert "'first', 'second', 'broken'" in none.value.message
        client.load_model("first")
        assert client.reply(prompt="hello", sampling=GREEDY).started.model == "first"


@pytest.mark.parametrize("house", ["60"], indirect=True)
def test_a_reader_that_takes_its_time_keeps_no_model_in_memory(house: House) -> None:
    """On a Mac with room for one model the next one would not fit beside it."""
    small_window = [("grpc.http2.lookahead_bytes", 2 << 10), ("grpc.http2.bdp_probe", 0)]
    sampling = pb.Sampling(max_tokens=80, logprobs=True, top_logprobs=20)
    with house.client() as client, grpc.insecure_channel(house.engine.address, small_window) as channel:
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate  # type: ignore[no-untyped-call]
        events = generate(pb.GenerateRequest(prompt="door", sampling=sampling))
        next(events)
        client.unload_model()
        left_bytes = int(re.findall(r"left_bytes\W+(\d+)", house.engine.log)[-1])
        rest = list(events)
    assert left_bytes < 1 << 16, "of weights and pages"
    assert len(rest) < 40, "most of the reply was unread"
    assert rest[-1].finished.usage.completion_tokens == 80


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(house: House) -> None:
    with house.client() as client:
        with pytest.raises(errors.KvasirError):
            client.load_model("broken")
        assert client.reply(prompt="hello", sampling=GREEDY).started.model == "first"


@pytest.mark.long(2)
def test_a_load_tells_its_stages_and_is_followed_by_who_asks_again(house: House) -> None:
    with house.client() as client, house.client() as other, ThreadPoolExecutor() as pool:
        client.reply(agent_id="ada", messages=TOLD, sampling=GREEDY)
        told: list[pb.LoadProgress] = []
        loading = pool.submit(client.load_model, "second", on_progress=told.append)
        while not told and not loading.done():
            time.sleep(0.005)
        assert told, "a load that is short tells that it has begun, too"
        followed = pool.submit(other.load_model, "second")
        with pytest.raises(errors.Unavailable) as another:
            client.load_model("broken")
        assert another.value.reason == "MODEL_CHANGING"
        assert followed.result(60) == loading.result(60)
        assert loading.result().model.state == pb.MODEL_STATE_LOADED
        assert told[-1].stage == pb.LOAD_STAGE_LOADING
        stages = [each.stage for each in told]
        assert stages == sorted(stages)
        elapsed = [each.elapsed.ToNanoseconds() for each in told]
        assert elapsed == sorted(elapsed)


@pytest.mark.long(3)
@pytest.mark.parametrize("house", ["60"], indirect=True)
def test_a_swap_lets_running_turns_end_and_refuses_new_ones_meanwhile(house: House) -> None:
    replies: list[Reply] = []
    with house.client() as client:
        events = client.generate(agent_id="ada", messages=TOLD, sampling={"max_tokens": 100})
        next(events)

        def listen() -> None:
            reply = Reply()
            for event in events:
                reply.add(event)
            replies.append(reply)

        listening = threading.Thread(target=listen)
        swapping = threading.Thread(target=client.load_model, args=("second",))
        listening.start()
        swapping.start()
        refusals: list[errors.KvasirError] = []
        while swapping.is_alive():
            try:
                client.reply(prompt="hello", sampling={"max_tokens": 1}, timeout_s=5)
            except errors.Unavailable as changing:
                refusals.append(changing)
            time.sleep(0.02)
        listening.join(30)
        assert [each.reason for each in refusals if each.retry_after_s][:1] == ["MODEL_CHANGING"]
        assert replies[0].finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
        assert client.get_model().name == "second"


@pytest.mark.long(5)
@pytest.mark.parametrize("house", ["1"], indirect=True)
def test_memories_that_cannot_be_stored_keep_their_model_unless_they_may_be_lost(house: House) -> None:
    with house.client() as client:
        client.reply(agent_id="ada", messages=TOLD, sampling=GREEDY)
        house.store.kill()
        pending = client.reply(agent_id="ada", append_messages=ASKED, sampling=GREEDY)
        assert pending.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
        with pytest.raises(errors.FailedPrecondition) as kept:
            client.unload_model()
        assert (kept.value.reason, kept.value.metadata["unstored"]) == ("MEMORIES_NOT_STORED", "1")
        # Nothing changed: once the store answers that nobody took it back, she goes on from what is hot.
        house.repair()
        following = client.reply(agent_id="ada", append_messages=ASKED, sampling=GREEDY)
        assert following.started.source == pb.CACHE_SOURCE_HOT
        house.store.kill()
        pending = client.reply(agent_id="ada", append_messages=ASKED, sampling=GREEDY)
        assert pending.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
        assert client.unload_model(drop_unstored=True).left.dropped == 1


@pytest.mark.long(6)
@pytest.mark.parametrize("house", ["1"], indirect=True)
def test_a_store_that_hangs_keeps_no_unloaded_model_in_memory(house: House) -> None:
    with house.client() as client:
        client.reply(agent_id="ada", messages=TOLD, sampling=GREEDY)
        try:
            for event in client.generate(agent_id="ada", append_messages=ASKED, sampling={"max_tokens": 30}):
                if event.HasField("delta"):
                    os.kill(house.store.pid, signal.SIGSTOP)
            assert client.unload_model(drop_unstored=True).left.dropped == 1
        finally:
            os.kill(house.store.pid, signal.SIGCONT)
    assert int(re.findall(r"left_bytes\W+(\d+)", house.engine.log)[-1]) < 1 << 16, "of weights and pages"


@pytest.mark.long(2)
def test_words_of_another_models_line_are_warmed_with_what_follows_them_and_make_no_version(house: House) -> None:
    with house.client() as client:
        client.reply(agent_id="ada", messages=TOLD, sampling=GREEDY)
        client.load_model("second")
        ahead = client.warm(agent_id="ada", append_messages=ASKED)
        assert (ahead.version, ahead.miss) == (1, pb.MISS_REASON_KV_IDENTITY_DIFFERS)
        client.warm(agent_id="ada")
        assert client.warm(agent_id="ada", append_messages=ASKED).tokens == ahead.tokens
        left = client.unload_model().left
        assert left.dropped == 0
        with house.store_client() as store:
            assert len(store.get_agent("ada").lines) == 1, "nothing was said under the second model"
        client.load_model("second")
        client.warm(agent_id="ada", append_messages=ASKED)
        warmed = client.reply(agent_id="ada", append_messages=ASKED, sampling=GREEDY)
        assert (warmed.started.source, warmed.started.cached_tokens) == (pb.CACHE_SOURCE_HOT, ahead.tokens - 1)


@pytest.mark.long(2)
def test_a_count_that_its_model_leaves_behind_is_unavailable(house: House) -> None:
    over = threading.Event()

    def counts() -> set[int | str]:
        found: set[int | str] = set()
        with InferenceClient.connect(house.engine.address, timeout_s=60) as client:  # a busy machine takes its time
            while not over.is_set():
                try:
                    found.add(client.count_tokens(prompt="d o " * 1500))
                except errors.Unavailable as changing:
                    found.add(changing.reason)
                except errors.FailedPrecondition:  # it began when no model was there
                    break
        return found

    with house.client() as client, ThreadPoolExecutor() as threads:
        counting = [threads.submit(counts) for _ in range(3)]
        time.sleep(0.3)
        client.unload_model()
        over.set()
        assert set().union(*(each.result() for each in counting)) <= {3000, 3001, "MODEL_CHANGING"}


def test_only_an_admin_of_the_whole_service_changes_models_and_sees_all_namespaces(
    models: list[str], model: Path, tmp_path: Path
) -> None:
    house = House(tmp_path, model)
    people = [
        Principal("client", "n", frozenset({CLIENT})),
        Principal("their admin", "other", frozenset({ADMIN, CLIENT})),
        Principal("admin", "n", frozenset({ADMIN})),
    ]
    tokens = write_credentials(tmp_path / "credentials.toml", people, lambda: secrets.token_urlsafe(32))
    house.engine.options += ["--credentials-file", str(tmp_path / "credentials.toml")]
    house.engine.options += ["--service-admin", "admin"]
    try:
        house.start()
        with (
            house.client(tokens["client"]) as client,
            house.client(tokens["their admin"]) as theirs,
            house.client(tokens["admin"]) as admin,
            house.client() as owner,
        ):
            for who in (client, theirs):
                for call in (lambda who=who: who.load_model("sharpened"), who.unload_model):
                    with pytest.raises(errors.PermissionDenied):
                        call()
            assert client.get_model().name == "sharpened"
            client.reply(prompt="hello", sampling=GREEDY)
            theirs.reply(prompt="hello", sampling=GREEDY)
            assert [each.namespace for each in theirs.get_stats().namespaces] == ["other"]
            assert not theirs.get_stats().HasField("engine")
            for everything in (admin, owner):
                assert [each.namespace for each in everything.get_stats().namespaces] == ["n", "other"]
            admin.unload_model()
            with pytest.raises(errors.FailedPrecondition):
                client.reply(prompt="hello", sampling=GREEDY)
            # Each sees its own namespace, and the admin of all besides them the engine.
            assert [each.namespace for each in client.get_stats().namespaces] == ["n"]
            assert not client.get_stats().HasField("engine")
            assert admin.get_stats().HasField("engine")
    finally:
        house.close()


@pytest.mark.long(4)
def test_a_model_that_nobody_uses_is_unloaded_and_the_next_turns_load_it_once(model: Path, tmp_path: Path) -> None:
    with running_house(tmp_path, model, engine_options=("--keep-alive-s", "0.5")) as house, house.client() as client:
        [name] = {
            client.reply(agent_id=agent, messages=TOLD, sampling=GREEDY).started.model for agent in ("ada", "eve")
        }

        def is_asleep() -> bool:
            return client.list_models()[0].state == pb.MODEL_STATE_ASLEEP

        eventually(is_asleep)
        with ThreadPoolExecutor(2) as both:
            replies = list(
                both.map(
                    lambda agent: client.reply(agent_id=agent, append_messages=ASKED, sampling=GREEDY, model=name),
                    ("ada", "eve"),
                )
            )
        assert replies[0].started.source == pb.CACHE_SOURCE_WARM
        assert replies[0].started.parent_version == 1
        assert client.get_stats().engine.model_loads == 2, "both waited for one load"
        eventually(is_asleep)
        client.unload_model()
        with pytest.raises(errors.FailedPrecondition) as refused:
            client.reply(prompt="Hello.", sampling=GREEDY)
        assert refused.value.reason == "MODEL_NOT_LOADED", "who unloads it by hand wants it to stay so"


@pytest.mark.long(3)
@pytest.mark.parametrize("house", ["60"], indirect=True)
def test_a_turn_whose_format_is_checked_while_models_change_hears_of_the_model_that_answers(house: House) -> None:
    with house.client() as client, house.client() as admin, ThreadPoolExecutor() as pool, ExitStack() as exits:
        client.reply(prompt="hello", regex="a", sampling=GREEDY)  # there is a process that tries formats
        halting = exits.enter_context(formats_halted(house.engine.pid))
        first = [pool.submit(client.reply, prompt="hello", regex=f"b{number}", sampling=GREEDY) for number in range(3)]
        time.sleep(0.2)
        waiting = pool.submit(client.reply, prompt="hello", regex="[cd]{3}", sampling=GREEDY)
        time.sleep(0.2)
        admin.load_model("second")
        assert not waiting.done(), "it waits for its format"
        halting.set()
        reply = waiting.result(60)
        assert (reply.started.model, len(reply.text)) == ("second", 3)
        for each in first:
            each.exception(60)


@contextmanager
def formats_halted(engine_pid: int) -> Iterator[threading.Event]:
    """No format is tried until the event is set: each waits as long as one may take."""
    over, halted = threading.Event(), set[psutil.Process]()

    def halt() -> None:
        while not over.wait(0.005):
            for each in set(psutil.Process(engine_pid).children()) - halted:
                with suppress(psutil.Error):
                    if any("grammar_trial_process" in word for word in each.cmdline()):
                        each.suspend()
                        halted.add(each)
        for each in halted:
            with suppress(psutil.Error):
                each.resume()

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()
