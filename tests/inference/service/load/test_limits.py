"""What does not fit is refused with numbers and, where waiting helps, a time to come back; the rest goes on."""

import threading
import time
from pathlib import Path

import grpc
import pytest
from kvasir import errors
from kvasir.clients import Reply
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.status import from_rpc_error

from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

OPTIONS = ("--memory-gib", "0.0005", "--max-turns", "3", "--context-tokens", "1500")


@pytest.fixture
def small(model: Path, tmp_path: Path) -> House:
    with running_house(tmp_path, model, engine_options=OPTIONS) as house:
        yield house  # type: ignore[misc]


def test_the_service_says_of_a_long_prompt_what_it_takes_not_the_channel(small: House) -> None:
    with small.client() as client, pytest.raises(errors.ResourceExhausted) as context:
        client.reply(prompt="door " * (1 << 20))
    assert context.value.reason == "CONTEXT_EXCEEDED"


def test_memory_context_and_queue_are_bounded_and_report_it(small: House) -> None:
    with small.client() as client:
        with pytest.raises(errors.ResourceExhausted) as memory:
            client.reply(prompt="door " * 700, sampling={"max_tokens": 700})
        assert "bytes" in memory.value.message
        assert any(character.isdigit() for character in memory.value.message)

        with pytest.raises(errors.ResourceExhausted) as context:
            client.reply(prompt="door " * 2500)
        assert context.value.reason == "CONTEXT_EXCEEDED"
        assert context.value.metadata["context_tokens"] == "1500"
        assert int(context.value.metadata["prompt_tokens"]) > 1500
        long = [{"role": "user", "content": "door " * 2500}]
        for given in ({"append_messages": long, "agent_id": "ada"}, {"messages": long}):
            with pytest.raises(errors.ResourceExhausted) as named:
                client.reply(**given)
            assert named.value.field == next(iter(given)), "the field is the one that was sent"

        running = [client.generate(prompt=f"{name} door", sampling={"max_tokens": 400}) for name in "ab"]
        for events in running:
            next(events)
        with pytest.raises(errors.ResourceExhausted) as queue:
            client.reply(prompt="c door")
        assert (queue.value.reason, bool(queue.value.retry_after_s)) == ("NAMESPACE_BUSY", True)
        with pytest.raises(errors.ResourceExhausted, match="2 turns"):
            client.count_tokens(prompt="c door")
        for events in running:
            events.close()
        give_up = time.monotonic() + 60
        while True:
            try:
                assert client.reply(prompt="c door", sampling={"max_tokens": 2}).text is not None
                break
            except errors.ResourceExhausted:
                assert time.monotonic() < give_up
                time.sleep(0.02)


@pytest.mark.long(2)
def test_a_clamped_max_tokens_keeps_what_fits_and_takes_a_part_of_it_else(small: House) -> None:
    """All that a turn may take is reserved: one that asks for more than there is leaves room for others."""
    stops_nowhere = {"logit_bias": {0: 100.0}, "temperature": 0.0}  # one token for ever
    with small.client() as client:
        for words, asked, got in ((10, 600, 600), (10, 32_000, 512)):
            sampling = {"max_tokens": asked, **stops_nowhere}
            if got < asked:
                with pytest.raises(errors.ResourceExhausted) as refused:
                    client.reply(prompt="door " * words, sampling=sampling)
                assert refused.value.field == "sampling.max_tokens"
            reply = client.reply(prompt="door " * words, sampling={**sampling, "clamp_max_tokens": True})
            assert reply.finished.reason == pb.FINISH_REASON_LENGTH
            assert reply.finished.usage.completion_tokens == got
        with pytest.raises(errors.ResourceExhausted) as too_long:
            client.reply(prompt="door " * 2500, sampling={"max_tokens": 9, "clamp_max_tokens": True})
    assert (too_long.value.reason, too_long.value.field) == ("CONTEXT_EXCEEDED", "prompt")


@pytest.mark.long(6)
def test_agents_that_do_not_fit_together_take_turns_in_memory_and_none_forgets(small: House) -> None:
    agents = [f"agent {number}" for number in range(6)]
    replies: dict[str, list[Reply]] = {agent: [] for agent in agents}

    def live(agent: str) -> None:
        with small.client() as client:
            for number in range(3):
                message = [
                    {"role": "user", "content": f"{agent} says {number}: " + "the archive lists every door. " * 20}
                ]
                given = {"append_messages": message} if number else {"messages": message}
                for _ in range(100):
                    try:
                        replies[agent].append(
                            client.reply(agent_id=agent, sampling={"max_tokens": 6}, **given)  # type: ignore[arg-type]
                        )
                        break
                    except errors.ResourceExhausted as full:
                        time.sleep(min(full.retry_after_s or 0.1, 0.1))

    threads = [threading.Thread(target=live, args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for agent in agents:
        assert not [reply.finished.snapshot.reason for reply in replies[agent] if reply.finished.snapshot.reason]
        assert [reply.finished.snapshot.version for reply in replies[agent]] == [1, 2, 3]
        assert all(reply.started.cached_tokens > 100 for reply in replies[agent][1:])


@pytest.mark.long(5)
def test_a_reader_that_stops_when_its_turn_is_over_is_given_up(model: Path, tmp_path: Path) -> None:
    """Its turn notices no more: what is left of the reply would be held for as long as the connection lasts."""
    options = ("--reader-stall-s", "1", "--max-unread-bytes", str(64 << 20), "--context-tokens", "1500")
    # A window that does not grow: what is not taken stays at the service.
    small_window = [("grpc.http2.lookahead_bytes", 16 << 10), ("grpc.http2.bdp_probe", 0)]
    sampling = pb.Sampling(max_tokens=1000, logprobs=True, top_logprobs=20)
    with (
        running_house(tmp_path, model, engine_options=options) as house,
        grpc.insecure_channel(house.engine.address, small_window) as channel,
    ):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(  # type: ignore[no-untyped-call]
            pb.GenerateRequest(prompt="door", sampling=sampling)
        )
        next(call)
        with house.client() as client:
            eventually(lambda: client.get_stats().namespaces[0].turn_ends, 60)
        time.sleep(2)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    error = from_rpc_error(caught.value)
    assert (type(error), error.reason) == (errors.DeadlineExceeded, "READER_STALLED")
