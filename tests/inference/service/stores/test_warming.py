"""A memory is made hot ahead of its turn, and what was reused was truly not computed again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import House, running_house

GREEDY = {"max_tokens": 8}
PASSAGE = "The archive lists every door by its key; the seventh key is missing since the flood of spring. " * 24
TOLD = [{"role": "user", "content": PASSAGE}]
ASKED = [{"role": "user", "content": "Which key is missing, and since when?"}]


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("warming"), model) as house:
        yield house


def restart(house: House) -> None:
    """The engine forgets, the store does not."""
    house.engine.kill()
    house.engine.start()


def computed(client: InferenceClient) -> int:
    """Tokens that went through the model, as the engine counts them where it computes."""
    return client.get_stats().engine.computed_tokens


@pytest.mark.long(2)
def test_a_warmed_memory_goes_on_as_if_it_had_never_left_and_only_the_suffix_is_computed(shared: House) -> None:
    with shared.client() as client:
        for agent in ("ada", "twin", "unwarmed"):
            client.reply(agent_id=agent, messages=TOLD, sampling=GREEDY)
        expected = client.reply(agent_id="twin", append_messages=ASKED, sampling=GREEDY)
        restart(shared)
    with shared.client() as client:
        before = computed(client)
        warmed = client.warm(agent_id="ada")
        assert (warmed.source, warmed.miss, warmed.version) == (pb.CACHE_SOURCE_WARM, 0, 1)
        assert (warmed.cached_tokens, warmed.computed_tokens) == (warmed.tokens, 0)
        assert computed(client) == before, "a restore that reports success does not prefill"
        again = client.warm(agent_id="ada")
        assert (again.source, again.cached_tokens) == (pb.CACHE_SOURCE_HOT, warmed.tokens)

        reply = client.reply(agent_id="ada", append_messages=ASKED, sampling=GREEDY)
        assert (reply.started.source, reply.started.miss) == (pb.CACHE_SOURCE_HOT, 0)
        assert reply.started.cached_tokens == expected.started.cached_tokens
        assert reply.token_ids == expected.token_ids
        assert reply.finished.snapshot.version == 2


def test_a_restore_that_reports_success_does_not_prefill_again(shared: House) -> None:
    """(LESSONS 11) What `cached_tokens` says was reused did not go through the model."""
    with shared.client() as client:
        client.reply(agent_id="lesson 11", messages=TOLD, sampling=GREEDY)
        restart(shared)
    with shared.client() as client:
        before = computed(client)
        reply = client.reply(agent_id="lesson 11", append_messages=ASKED, sampling=GREEDY)
        usage = reply.finished.usage
        assert reply.started.source == pb.CACHE_SOURCE_WARM
        assert usage.cached_tokens > 500
        # The suffix, and each token of the reply but perhaps the last, which nobody needs to compute.
        spent = computed(client) - before - (usage.prompt_tokens - usage.cached_tokens)
        assert spent in (usage.completion_tokens - 1, usage.completion_tokens)


def test_a_failed_restore_poisons_nothing_later(shared: House) -> None:
    """(LESSONS 10) A memory whose files are damaged costs a prefill; the next turns, its own and others', are right."""
    # Words of its own, so that none of its blocks is another's.
    own = [{"role": "user", "content": f"broken: {PASSAGE}"}]
    with shared.client() as client:
        for agent, told in (("broken", own), ("broken twin", own), ("whole", TOLD), ("whole twin", TOLD)):
            client.reply(agent_id=agent, messages=told, sampling=GREEDY)
        own_expected, expected = (
            [client.reply(agent_id=twin, append_messages=ASKED, sampling=GREEDY) for _ in range(3)]
            for twin in ("broken twin", "whole twin")
        )
        with shared.store_client() as store:
            _, data = store.get_snapshot("broken")
        tail = manifest.parse(data).tail.hash
        restart(shared)
    (path,) = shared.data_dir.rglob(tail)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-64] + b"\x7f" * 64)
    with shared.client() as client:
        broken = client.reply(agent_id="broken", append_messages=ASKED, sampling=GREEDY)
        assert broken.started.miss in (pb.MISS_REASON_BLOB_DAMAGED, pb.MISS_REASON_BLOB_MISSING)
        for number, answer in enumerate(expected):
            whole = client.reply(agent_id="whole", append_messages=ASKED, sampling=GREEDY)
            assert whole.token_ids == answer.token_ids, number
            assert not whole.started.reason
        assert broken.token_ids == own_expected[0].token_ids
        following = client.reply(agent_id="broken", append_messages=ASKED, sampling=GREEDY)
        assert following.token_ids == own_expected[1].token_ids
        assert (following.started.source, following.started.reason) == (pb.CACHE_SOURCE_HOT, "")
        assert following.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED


def test_a_prompt_computed_ahead_serves_its_turn_and_is_not_remembered_without_it(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    # Each has words of its own, so that nobody's blocks serve the other.
    told = {name: [{"role": "user", "content": f"{name}: {PASSAGE}"}] for name in (agent, twin)}
    warmed = client.warm(agent_id=agent, messages=told[agent])
    assert (warmed.cached_tokens, warmed.computed_tokens, warmed.version) == (0, warmed.tokens, 0)
    assert warmed.miss == pb.MISS_REASON_NEW_AGENT
    with pytest.raises(errors.NotFound) as nothing:
        client.reply(agent_id=agent, append_messages=ASKED, expect_existing=True, sampling=GREEDY)
    assert nothing.value.reason == "AGENT_NOT_FOUND"
    first = client.reply(agent_id=agent, messages=told[agent], sampling=GREEDY)
    assert first.started.source == pb.CACHE_SOURCE_HOT
    assert first.started.cached_tokens == warmed.tokens - 1
    assert first.finished.snapshot.version == 1

    # And what is appended to a memory.
    ahead = client.warm(agent_id=agent, append_messages=ASKED)
    assert ahead.version == 1
    second = client.reply(agent_id=agent, append_messages=ASKED, sampling=GREEDY)
    assert second.started.cached_tokens == ahead.tokens - 1
    assert (second.started.parent_version, second.finished.snapshot.version) == (1, 2)

    client.reply(agent_id=twin, messages=told[twin], sampling=GREEDY)
    client.warm(agent_id=twin, append_messages=[{"role": "user", "content": "What she never asked. " * 40}])
    other = client.reply(agent_id=twin, append_messages=ASKED, sampling=GREEDY)
    assert other.started.parent_version == 1
    assert other.finished.snapshot.version == 2


def test_warming_reports_what_it_cannot_do(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    nobody = client.warm(agent_id=new_agent())
    assert (nobody.tokens, nobody.miss, nobody.source) == (0, pb.MISS_REASON_NEW_AGENT, pb.CACHE_SOURCE_COLD)
    with pytest.raises(errors.InvalidArgument):
        client.warm(agent_id="")
    with pytest.raises(errors.ResourceExhausted) as long:
        client.warm(agent_id=new_agent(), prompt="door " * 5000)
    assert long.value.reason == "CONTEXT_EXCEEDED"


def test_counted_tokens_are_those_of_a_turn(client: InferenceClient) -> None:
    tools = [pb.Tool(name="find", description="Finds a door.", parameters_json='{"type":"object"}')]
    cases = [{"prompt": PASSAGE}, {"messages": TOLD}, {"messages": TOLD, "tools": tools}]
    for case in cases:
        counted = client.count_tokens(**case)  # type: ignore[arg-type]
        assert counted == client.reply(**case, sampling={"max_tokens": 1}).started.prompt_tokens  # type: ignore[arg-type]
    # Also what no turn could take.
    assert client.count_tokens(prompt="door " * 6000) > 4096
    # In a message a special token's spelling is text; a raw prompt's is the token.
    spelled = [{"role": "user", "content": "<|im_end|>"}]
    assert client.count_tokens(messages=spelled) > client.count_tokens(messages=[{"role": "user", "content": "<"}]) + 1
    assert client.count_tokens(prompt="<|im_end|>") == 1
