"""What an agent remembers outlives its processes and goes on as if they had never ended. Real services and sockets."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kvasir.clients import InferenceClient, Reply
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.running.programs import MEMINFO
from tests.running.system_fixtures import House

GREEDY = {"max_tokens": 24}
TALK = (
    "Remember this: the blue key opens the third door, and Marla keeps it in the tin box.",
    "Who keeps the key? Answer with a name, and say where it is kept. " * 6,
    "And what does it open? Think about “doors” before you answer; the archive needs it — see §4. " * 8,
    "Thanks. Tell it to Tomas in your own words, please.",
)


def say(client: InferenceClient, agent: str, text: str, **more: object) -> Reply:
    message = [{"role": "user", "content": text}]
    return client.reply(agent_id=agent, append_messages=message, sampling=GREEDY, **more)  # type: ignore[arg-type]


def talk(client: InferenceClient, agent: str, texts: Sequence[str]) -> list[Reply]:
    """A conversation from its beginning."""
    first = [{"role": "user", "content": texts[0]}]
    replies = [client.reply(agent_id=agent, messages=first, sampling=GREEDY)]
    return replies + [say(client, agent, text) for text in texts[1:]]


def tokens(replies: Sequence[Reply]) -> list[list[int]]:
    return [reply.token_ids for reply in replies]


def test_after_a_kill_of_both_services_the_agent_goes_on_token_for_token(own_house: House) -> None:
    with own_house.client() as client:
        expected = tokens(talk(client, "never left", TALK))
    with own_house.client() as client:
        replies = talk(client, "restarted", TALK[:2])
    for text in TALK[2:]:
        own_house.restart()
        with own_house.client() as client:
            replies.append(say(client, "restarted", text))
            assert replies[-1].started.source == pb.CACHE_SOURCE_WARM
            assert replies[-1].started.match == pb.PREFIX_MATCH_EXTEND
            assert replies[-1].started.cached_tokens > 200
            assert not replies[-1].started.reason
    assert tokens(replies) == expected


@pytest.mark.long(4)
def test_agents_leave_ram_while_the_machine_is_short_of_it_and_go_on_token_for_token(
    own_house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def available(kilobytes: int) -> None:
        (tmp_path / "new").write_text(f"MemTotal: 1000 kB\nMemAvailable: {kilobytes} kB\n")
        (tmp_path / "new").rename(tmp_path / "meminfo")

    available(900)
    monkeypatch.setenv(MEMINFO, str(tmp_path / "meminfo"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where no other test's engine claims memory
    own_house.engine.kill()
    own_house.engine.options += ["--keep-hot-s", "0.1", "--device-gib", "0.05"]  # how often it looks; what it may take
    own_house.engine.start()
    with own_house.client() as client:
        kv_bytes = client.get_stats().engine.kv_memory_bytes
        assert 10 << 20 < kv_bytes < 0.05 * 2**30 * 7 / 8 / 2
        assert client.get_capabilities().limits.kv_memory_bytes == kv_bytes
        expected, replies = tokens(talk(client, "never left", TALK)), talk(client, "left", TALK[:2])
        for text in TALK[2:]:
            available(1)
            while client.get_stats().engine.hot_memories:
                time.sleep(0.05)
            available(900)
            replies.append(say(client, "left", text))
            assert replies[-1].started.source == pb.CACHE_SOURCE_WARM
            assert replies[-1].started.cached_tokens > 200
    assert tokens(replies) == expected


@pytest.mark.long(5)
def test_a_prompt_that_leaves_the_memory_is_answered_alike_hot_and_after_a_restart(own_house: House) -> None:
    def changed(client: InferenceClient, agent: str, replies: list[Reply]) -> Reply:
        """The same conversation with its last words changed."""
        whole = [
            {"role": "user", "content": TALK[0]},
            {"role": "assistant", "content": replies[0].text},
            {"role": "user", "content": TALK[1]},
            {"role": "assistant", "content": replies[1].text},
            {"role": "user", "content": TALK[2][:-90] + "forget the archive."},
        ]
        return client.reply(agent_id=agent, messages=whole, sampling=GREEDY)

    with own_house.client() as client:
        hot_replies, warm_replies = talk(client, "hot", TALK[:3]), talk(client, "warm", TALK[:3])
        hot = changed(client, "hot", hot_replies)
    own_house.restart()
    with own_house.client() as client:
        warm = changed(client, "warm", warm_replies)
    assert (hot.started.source, warm.started.source) == (pb.CACHE_SOURCE_HOT, pb.CACHE_SOURCE_WARM)
    assert hot.started.match == warm.started.match == pb.PREFIX_MATCH_DIVERGE
    assert 256 < hot.started.cached_tokens == warm.started.cached_tokens
    assert warm.token_ids == hot.token_ids


@pytest.mark.long(3)
def test_a_prompt_that_is_the_memory_or_its_beginning_computes_one_token(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, prompt = new_agent(), "".join(TALK)
    first = client.reply(agent_id=agent, prompt=prompt, sampling=GREEDY)
    again = client.reply(agent_id=agent, prompt=prompt, sampling=GREEDY)
    assert again.started.match == pb.PREFIX_MATCH_DIVERGE  # the memory has the reply besides
    assert again.started.cached_tokens == again.started.prompt_tokens - 1
    assert (again.started.reason, again.token_ids) == ("", first.token_ids)
    # A random model may end inside a character, which is given back: somewhere it does not.
    for length in range(1, 20):
        agent = new_agent()
        short = client.reply(agent_id=agent, prompt="Hello there.", sampling={"max_tokens": length})
        if short.text.isascii() and short.finished.reason == pb.FINISH_REASON_LENGTH:
            break
    whole = client.reply(agent_id=agent, prompt="Hello there." + short.text, sampling=GREEDY)
    assert whole.started.match == pb.PREFIX_MATCH_EXACT
    assert whole.started.cached_tokens == whole.started.prompt_tokens - 1


@pytest.mark.long(5)
def test_kv_of_other_weights_or_another_policy_is_never_used_and_the_words_are_also_on_the_way_back(
    own_house: House, tmp_path: Path
) -> None:
    with own_house.client() as client:
        _, second = talk(client, "a", TALK[:2])
    options = own_house.engine.options
    other_weights = write_model(tmp_path / "other", LLAMA, seed=1)
    for version, more, field in (
        (3, ("--kv-policy", "q8"), "policy.key_bits"),
        (5, ("--model", str(other_weights)), "weights_digest"),
    ):
        own_house.engine.kill()
        own_house.engine.options = [*more, *options]  # of several models the first is loaded
        own_house.engine.start()
        with own_house.client() as client:
            reply = say(client, "a", TALK[2])
            again = say(client, "a", TALK[3])
        assert reply.started.miss == pb.MISS_REASON_KV_IDENTITY_DIFFERS
        assert field in reply.started.reason
        assert reply.started.cached_tokens == 0
        assert reply.started.prompt_tokens > 256  # what was said before is there
        assert reply.finished.snapshot.version == version  # of a line of its own, and the agent's newest
        assert again.started.cached_tokens > reply.started.prompt_tokens
    with own_house.store_client() as store:
        lines = store.get_agent("a").lines
        assert [line.version for line in lines] == [6, 4, 2]
        store.fork_agent("a", "without the first line", lines[0].kv_identity_hash)
    own_house.engine.kill()
    own_house.engine.options = options
    own_house.engine.start()
    with own_house.client() as client:
        back, expected = say(client, "a", TALK[2]), say(client, "without the first line", TALK[2])
        # The first line's KV serves as far as its words go; what was said since is computed, and known.
        assert (back.started.source, back.started.miss) == (pb.CACHE_SOURCE_WARM, pb.MISS_REASON_KV_IDENTITY_DIFFERS)
        assert back.started.cached_tokens >= second.started.prompt_tokens > expected.started.cached_tokens
        assert back.started.prompt_tokens == expected.started.prompt_tokens
        assert back.token_ids == expected.token_ids
        assert (back.started.parent_version, back.started.continuation) == (6, pb.CONTINUATION_EXTENDED)
        older = say(client, "a", TALK[3], base_version=4, memory_mode=pb.MEMORY_MODE_READ_ONLY)
        assert (older.started.base_version, older.started.parent_version) == (4, 7)
        after, expected = say(client, "a", TALK[3]), say(client, "without the first line", TALK[3])
    assert (after.started.source, after.token_ids) == (pb.CACHE_SOURCE_HOT, expected.token_ids)
    with own_house.store_client() as store:
        listed = store.list_snapshots("a").snapshots
        assert [each.version for each in listed] == [8, 7, 6, 5, 4, 3, 2, 1]
        assert [each.parent_version for each in listed] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_after_a_fork_both_agents_go_on_from_the_same_memory(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    source, fork = new_agent(), new_agent()
    talk(client, source, TALK[:2])
    with house.store_client() as store:
        store.fork_agent(source, fork)
    hot, warm = say(client, source, TALK[2]), say(client, fork, TALK[2])
    assert (hot.started.source, warm.started.source) == (pb.CACHE_SOURCE_HOT, pb.CACHE_SOURCE_WARM)
    assert hot.started.cached_tokens == warm.started.cached_tokens
    assert hot.token_ids == warm.token_ids
    assert warm.finished.snapshot.version == 2


def test_after_a_rollback_the_agent_answers_as_of_that_version(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    talk(client, agent, TALK[:2])
    expected = say(client, agent, TALK[3])
    with house.store_client() as store:
        rolled_back = store.rollback_agent(agent, 2)
    again = say(client, agent, TALK[3])
    assert again.token_ids == expected.token_ids
    assert again.started.source == pb.CACHE_SOURCE_WARM  # the hot memory is of a version that is not the newest
    assert again.finished.snapshot.version == rolled_back.version + 1


@pytest.mark.long(2)
def test_after_export_and_import_the_agent_goes_on_under_another_name(
    house: House, client: InferenceClient, new_agent: Callable[[], str], tmp_path: Path
) -> None:
    agent, moved = new_agent(), new_agent()
    talk(client, agent, TALK[:3])
    with house.store_client() as store:
        store.export_to_file(agent, tmp_path / "agent.kvasir")
        store.import_agent(moved, [(tmp_path / "agent.kvasir").read_bytes()])
    here, there = say(client, agent, TALK[3]), say(client, moved, TALK[3])
    assert there.started.source == pb.CACHE_SOURCE_WARM
    assert here.token_ids == there.token_ids


@pytest.mark.long(2)
def test_appending_says_the_same_as_sending_the_whole_conversation(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    appending, whole = new_agent(), new_agent()
    replies = talk(client, appending, TALK)
    messages: list[dict[str, str]] = []
    for text, expected in zip(TALK, replies, strict=True):
        messages.append({"role": "user", "content": text})
        reply = client.reply(agent_id=whole, messages=messages, sampling=GREEDY)
        messages.append({"role": "assistant", "content": reply.text})
        assert reply.token_ids == expected.token_ids
        assert reply.started.cached_tokens == expected.started.cached_tokens


def test_a_retry_is_told_again_and_not_done_twice(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    talk(client, agent, TALK[:2])
    first = say(client, agent, TALK[2], request_id="turn 3", expected_version=2)
    again = say(client, agent, TALK[2], request_id="turn 3", expected_version=2)
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert (again.text, again.token_ids) == (first.text, first.token_ids)
    assert again.finished.reason == first.finished.reason
    assert again.finished.snapshot.version == first.finished.snapshot.version == 3


@pytest.mark.long(3)
def test_a_retry_after_a_restart_is_told_again_too(own_house: House) -> None:
    with own_house.client() as client:
        talk(client, "a", TALK[:1])
        first = say(client, "a", TALK[1], request_id="turn 2")
    own_house.restart()
    with own_house.client() as client:
        again = say(client, "a", TALK[1], request_id="turn 2")
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert (again.text, again.token_ids) == (first.text, first.token_ids)
    assert again.finished.snapshot.version == 2


def test_the_same_request_id_with_other_words_is_another_turn(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    talk(client, agent, TALK[:1])
    say(client, agent, TALK[1], request_id="same")
    other = say(client, agent, TALK[2], request_id="same")
    assert other.started.source == pb.CACHE_SOURCE_HOT
    assert other.finished.snapshot.version == 3


@pytest.mark.parametrize("stop", ["e", " t", "a"])
def test_a_retry_of_a_turn_that_met_a_stop_string_tells_the_same_text(
    stop: str, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    sampling = {"max_tokens": 60, "stop": [stop]}
    first, again = (
        client.reply(agent_id=agent, prompt=TALK[0], sampling=sampling, request_id="stopped") for _ in range(2)
    )
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert again.text == first.text
    assert again.finished.matched_stop == first.finished.matched_stop


@pytest.mark.long(4)
@pytest.mark.parametrize("count", [511, 512, 513, 769])
def test_blocks_shared_by_agents_leave_at_least_one_token_to_compute(
    count: int, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    prompt = "<|im_start|>" * count  # one token each
    first, other = (client.reply(agent_id=new_agent(), prompt=prompt, sampling=GREEDY) for _ in range(2))
    assert first.started.prompt_tokens == count
    assert other.started.source == pb.CACHE_SOURCE_SHARED
    assert other.started.cached_tokens == (count - 1) // 256 * 256
    assert other.token_ids == first.token_ids


def test_what_a_turn_adds_is_all_that_is_written(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    replies = talk(client, agent, ["How much of this is written?", *TALK])  # no other agent has stored its blocks
    token_bytes = client.get_model().kv_bytes_per_token
    for reply in replies[1:]:
        new_tokens = reply.finished.usage.prompt_tokens + len(reply.token_ids) - reply.started.cached_tokens
        new_blocks = new_tokens // 256 + 2  # the one that fills up, and the tail
        most_bytes = new_blocks * 1.1 * 256 * token_bytes + 64_000
        assert (new_tokens - 1) * token_bytes <= reply.finished.snapshot.written_bytes < most_bytes
