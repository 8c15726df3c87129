"""The neighbour's protocol over a real engine, by its own stubs: the same replies, memory, and refusals."""

import hashlib
import io
import re
import secrets
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvasir.credentials import CLIENT, PEER, Principal, write_credentials
from kvasir.status import from_rpc_error
from smg_grpc_proto import mlx_engine_pb2 as mlx
from smg_grpc_proto import mlx_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from tests.running.system_fixtures import House, running_house

TEXT = "The lighthouse keeper writes down every ship that passes, its name, its colours and the hour. " * 16


@pytest.fixture(scope="module")
def neighbour(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """On its Unix socket the owner needs no token; who has one is in that token's namespace."""
    root = tmp_path_factory.mktemp("neighbour")
    people = [Principal("south", "south", frozenset({CLIENT})), Principal("peer", "default", frozenset({PEER}))]
    tokens = write_credentials(root / "credentials.toml", people, lambda: secrets.token_urlsafe(32))
    for name, token in tokens.items():
        (root / name).write_text(token)
    options = ["--neighbour", "--credentials-file", str(root / "credentials.toml")]
    with running_house(root, model, engine_options=options) as house:
        yield house


@pytest.fixture(scope="module")
def stub(neighbour: House) -> Iterator[Any]:
    with grpc.insecure_channel(neighbour.engine.address) as channel:
        yield mlx_engine_pb2_grpc.MlxEngineStub(channel)


@pytest.fixture(scope="module")
def tokenizer(stub: Any) -> Tokenizer:
    """As a gateway has it: from the engine."""
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert not [name for name in archive.namelist() if "safetensors" in name]
        return Tokenizer.from_str(archive.read("tokenizer.json").decode())


def asked(ids: list[int], *, stream: bool = False, request_id: str = "", **sampling: Any) -> mlx.GenerateRequest:
    params = mlx.SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **sampling})
    tokenized = mlx.TokenizedInput(input_ids=ids)
    return mlx.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=params, stream=stream)


def completed(stub: Any, request: mlx.GenerateRequest) -> mlx.GenerateComplete:
    [response] = stub.Generate(request)
    return response.complete


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.long(2)
def test_a_reply_is_our_own_token_for_token(neighbour: House, stub: Any, tokenizer: Tokenizer) -> None:
    text = f"one. {TEXT}"
    with neighbour.client() as client:
        events = list(client.generate(prompt=text, max_tokens=24, sampling={"logprobs": True, "top_logprobs": 2}))
    ours = [token for event in events for token in event.delta.token_ids]
    logprobs = [each.logprob for event in events for each in event.delta.logprobs]
    ids = ids_of(tokenizer, text)
    end = completed(stub, asked(ids, logprobs=2))
    assert list(end.output_ids) == ours
    assert (end.prompt_tokens, end.completion_tokens, end.finish_reason) == (len(ids), len(ours), "length")
    assert list(end.output_logprobs.token_ids) == ours
    assert list(end.output_logprobs.token_logprobs) == logprobs
    assert [len(top.values) for top in end.output_logprobs.top_logprobs] == [2] * len(ours)
    # By text, and streamed, the same.
    by_text = mlx.GenerateRequest(text=text, sampling_params=asked([1]).sampling_params)
    assert list(completed(stub, by_text).output_ids) == ours
    *chunks, last = stub.Generate(asked(ids, stream=True))
    assert [token for each in chunks for token in each.chunk.token_ids] == ours
    assert [each.chunk.prompt_tokens for each in chunks] == [len(ids)] * len(chunks)
    assert chunks[-1].chunk.completion_tokens == last.complete.completion_tokens == len(ours)
    assert not last.complete.output_ids


def test_the_next_turn_reports_what_it_reused(stub: Any, tokenizer: Tokenizer) -> None:
    first = ids_of(tokenizer, f"two. {TEXT}")
    reply = completed(stub, asked(first))
    assert reply.cached_tokens == 0
    second = [*first, *reply.output_ids, *ids_of(tokenizer, " And the next ship?")]
    again = completed(stub, asked(second))
    # All that was computed: the last token drawn was not.
    assert again.cached_tokens == len(first) + len(reply.output_ids) - 1
    # Another conversation that begins alike shares what both computed as a prompt, and changes nothing of this one.
    other = completed(stub, asked([*first[:-40], *ids_of(tokenizer, "quite another end")]))
    assert 256 <= other.cached_tokens < len(first)
    third = [*second, *again.output_ids, *ids_of(tokenizer, " And then?")]
    assert completed(stub, asked(third)).cached_tokens == len(second) + len(again.output_ids) - 1


@pytest.mark.long(2)
def test_a_conversation_goes_on_after_kill_9_as_if_nothing_had_been(neighbour: House, tokenizer: Tokenizer) -> None:
    with grpc.insecure_channel(neighbour.engine.address) as channel:
        stub = mlx_engine_pb2_grpc.MlxEngineStub(channel)
        first = ids_of(tokenizer, f"three. {TEXT}")
        reply = completed(stub, asked(first))
        second = [*first, *reply.output_ids, *ids_of(tokenizer, " And the next ship?")]
        again = completed(stub, asked(second))
    neighbour.restart()
    with grpc.insecure_channel(neighbour.engine.address) as channel:
        stub = mlx_engine_pb2_grpc.MlxEngineStub(channel)
        same = completed(stub, asked(second))
        assert (same.cached_tokens, list(same.output_ids)) == (len(second) - 1, list(again.output_ids))
        third = [*second, *same.output_ids, *ids_of(tokenizer, " And then?")]
        assert completed(stub, asked(third)).cached_tokens == len(second) + len(same.output_ids) - 1


@pytest.mark.long(3)
def test_turns_of_one_prompt_at_once_do_not_wait_for_each_other(stub: Any, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, f"four. {TEXT}")
    streams = [stub.Generate(asked(ids, stream=True, max_tokens=200)) for _ in range(3)]
    ends = [list(each)[-1].complete for each in streams]
    assert [end.completion_tokens for end in ends] == [200] * 3
    # One that waited for another would go on from its memory; these have agents of their own, and share blocks at most.
    assert [end.cached_tokens % 256 for end in ends] == [0] * 3
    assert (len(ids) - 1) % 256


def test_a_stop_token_ends_the_reply_and_is_named(stub: Any, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, f"five. {TEXT}")
    whole = list(completed(stub, asked(ids)).output_ids)
    stop = whole[5]
    end = completed(stub, asked(ids, stop_token_ids=[stop]))
    assert list(end.output_ids) == whole[: whole.index(stop) + 1]
    assert (end.finish_reason, end.matched_stop_token_id) == ("stop", stop)


def test_abort_ends_a_turn(stub: Any, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, f"six. {TEXT}")
    stream = stub.Generate(asked(ids, stream=True, request_id="to-be-aborted", max_tokens=600))
    next(stream)
    assert stub.GetServerInfo(mlx.GetServerInfoRequest()).active_requests == 1
    stub.Abort(mlx.AbortRequest(request_ids=["to-be-aborted", "never heard of"]))
    *_, last = stream
    assert last.complete.finish_reason == "abort"
    assert last.complete.completion_tokens < 600
    assert stub.GetServerInfo(mlx.GetServerInfoRequest()).active_requests == 0


def test_the_engine_and_its_model_are_described(neighbour: House, model: Path, stub: Any, tokenizer: Tokenizer) -> None:
    health = stub.HealthCheck(mlx.HealthCheckRequest())
    assert (health.healthy, health.message) == (True, "OK")
    info = stub.GetModelInfo(mlx.GetModelInfoRequest())
    with neighbour.client() as client:
        ours = client.get_model()
    assert (info.served_model_name, info.max_context_length) == (ours.name, ours.context_tokens)
    assert (info.is_generation, info.model_type) == (True, "llama")
    assert info.vocab_size >= tokenizer.get_vocab_size()
    assert str(model.parent) not in str(info)


def test_a_token_reports_whose_memory_it_is_and_what_its_caller_may(
    neighbour: House, stub: Any, tokenizer: Tokenizer
) -> None:
    request = asked(ids_of(tokenizer, f"seven. {TEXT}"))
    completed(stub, request)
    assert completed(stub, request).cached_tokens > 256

    def by(name: str) -> dict[str, Any]:
        token = (neighbour.root / name).read_text()
        return {"metadata": (("authorization", f"Bearer {token}"),)}

    [elsewhere] = stub.Generate(request, **by("south"))
    assert elsewhere.complete.cached_tokens == 0
    assert refusal(lambda: list(stub.Generate(request, **by("peer")))).code() is grpc.StatusCode.PERMISSION_DENIED
    wrong = {"metadata": (("authorization", "Bearer none"),)}
    for call in (stub.HealthCheck, stub.GetModelInfo):
        assert refusal(lambda: call(mlx.HealthCheckRequest(), **wrong)).code() is grpc.StatusCode.UNAUTHENTICATED  # noqa: B023


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("frequency_penalty", {"frequency_penalty": 2.5}),
        ("presence_penalty", {"presence_penalty": -2.5}),
        ("ignore_eos", {"ignore_eos": True}),
        ("logprobs", {"logprobs": 21}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("logit_bias", {"logit_bias": {1 << 30: 1.0}}),
        ("temperature", {"temperature": 3.0}),
        ("top_p", {"top_p": 1.5}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop_token_ids", {"stop_token_ids": [1 << 30]}),
        ("repetition_penalty", {"repetition_penalty": 9.0}),
    ],
)
def test_a_setting_that_cannot_be_applied_is_refused_by_name(stub: Any, field: str, sampling: dict[str, Any]) -> None:
    error = refusal(lambda: list(stub.Generate(asked([1, 2, 3], **sampling))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(error).field == f"sampling_params.{field}"


def test_an_input_that_is_none_is_refused_by_name(stub: Any) -> None:
    wrong = {
        "input": mlx.GenerateRequest(),
        "tokenized.input_ids": asked([]),
        "request_id": asked([1], request_id="ä"),
    }
    for field, request in wrong.items():
        error = refusal(lambda: list(stub.Generate(request)))  # noqa: B023
        assert (error.code(), from_rpc_error(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    error = refusal(lambda: list(stub.Generate(asked([1 << 31]))))
    assert from_rpc_error(error).field == "tokenized.input_ids"
    too_long = refusal(lambda: list(stub.Generate(asked([1] * 200_000))))
    assert (too_long.code(), from_rpc_error(too_long).reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CONTEXT_EXCEEDED",
    )


def refusal(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def test_a_model_whose_tokenizer_or_reply_was_fetched_leaves_nothing_when_it_goes(neighbour: House, stub: Any) -> None:
    assert list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    small_window = [("grpc.http2.lookahead_bytes", 1 << 10), ("grpc.http2.bdp_probe", 0)]
    with neighbour.client() as client, grpc.insecure_channel(neighbour.engine.address, small_window) as channel:
        slow = mlx_engine_pb2_grpc.MlxEngineStub(channel).Generate(asked([5], stream=True, max_tokens=100, logprobs=20))
        next(slow)
        [model] = client.list_models()
        for _ in range(3):  # other work of the service may hold a model for a moment, and the archive holds it for good
            client.unload_model(drop_unstored=True)
            client.load_model(model.name)
        assert sum(len(response.chunk.token_ids) for response in slow) > 50, "the rest came behind"
    left_bytes = [int(each) for each in re.findall(r"left_bytes\W+(\d+)", neighbour.engine.log)]
    assert min(left_bytes[-3:]) < 1 << 16, "of weights and pages"
