"""Embeddings over gRPC, by the loaded model: alone as together, beside streams, within limits, and nobody's memory."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from kvasir.clients import GenerateOptions, InferenceClient
from kvasir.errors import DeadlineExceeded, InvalidArgument, KvasirError, NotFound, ResourceExhausted
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import House

TEXTS = ["c door", "The dog is called Rex.", "It rains. " * 60]


def vectors(found: pb.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in found.embeddings]


def test_texts_together_are_each_alone_also_beside_a_stream(client: InferenceClient) -> None:
    alone = [vectors(client.embed([text]))[0] for text in TEXTS]
    speaking = client.generate(prompt="c door", options=GenerateOptions(sampling={"max_tokens": 400}))
    first = next(speaking)
    together = client.embed(TEXTS)
    assert first.HasField("started")
    assert vectors(together) == alone
    assert together.model == "sharpened"
    assert [each.tokens for each in together.embeddings] == [client.count_tokens(prompt=text) for text in TEXTS]
    assert np.allclose([np.linalg.norm(vector) for vector in alone], 1, atol=1e-5)
    speaking.close()
    found = client.get_model()
    assert found.embedding_dimensions == len(alone[0])
    assert not found.only_embeds


def test_tokens_are_taken_as_they_are_and_fewer_dimensions_are_of_length_one(client: InferenceClient) -> None:
    ids = [5, 900, 17]
    whole, again = vectors(client.embed([ids, ids]))
    assert whole == again
    [short] = vectors(client.embed([ids], dimensions=8))
    assert len(short) == 8
    assert np.allclose(short, np.array(whole[:8]) / np.linalg.norm(whole[:8]), atol=1e-6)


def test_what_spells_a_special_token_in_a_text_is_text(client: InferenceClient) -> None:
    assert client.count_tokens(prompt="<|im_end|>") == 1
    assert client.embed(["<|im_end|>"]).embeddings[0].tokens > 1


def test_nothing_is_remembered_and_nothing_shared(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    text = "A text that is embedded first, and asked about then. " * 20
    before = client.get_stats()
    embedded = vectors(client.embed([text]))
    options = GenerateOptions(agent_id=new_agent(), sampling={"max_tokens": 2})
    turn = client.reply(prompt=text, options=options)
    assert turn.started.cached_tokens == 0
    assert vectors(client.embed([text])) == embedded
    after = client.get_stats()
    assert after.engine.hot_memories == before.engine.hot_memories + 1, "the turn's alone"


@pytest.mark.parametrize(
    ("asked", "error", "field"),
    [
        ({"texts": []}, InvalidArgument, "inputs"),
        ({"texts": ["x"] * 257}, InvalidArgument, "inputs"),
        ({"texts": ["x", ""]}, InvalidArgument, "inputs[1]"),
        ({"texts": ["x", []]}, InvalidArgument, "inputs[1]"),
        ({"texts": [[1 << 30]]}, InvalidArgument, "inputs[0]"),
        ({"texts": ["x"], "dimensions": 0}, InvalidArgument, "dimensions"),
        ({"texts": ["x"], "dimensions": 4096}, InvalidArgument, "dimensions"),
        ({"texts": ["x"], "priority": 9}, InvalidArgument, "priority"),
        ({"texts": ["x"], "model": "other"}, NotFound, "model"),
        ({"texts": ["x", [5] * 5000]}, ResourceExhausted, "inputs[1]"),
        ({"texts": ["x" * (9 << 20)]}, InvalidArgument, "inputs"),
    ],
)
def test_a_refusal_names_the_field(
    client: InferenceClient, asked: dict[str, object], error: type[KvasirError], field: str
) -> None:
    with pytest.raises(error) as refused:
        client.embed(**asked)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.long(22)
def test_a_text_may_be_cut_to_the_context(client: InferenceClient) -> None:
    ids = [3 + number % 900 for number in range(5000)]
    context = client.get_model().context_tokens
    [cut], [whole] = client.embed([ids], truncate=True).embeddings, client.embed([ids[:context]]).embeddings
    assert cut == whole
    assert cut.tokens == context
    text = "It rains. " * 4_000
    assert client.embed([text * 20], truncate=True).embeddings == client.embed([text], truncate=True).embeddings


@pytest.mark.parametrize("texts", [1, 40])
def test_a_caller_who_is_gone_leaves_no_work(house: House, client: InferenceClient, texts: int) -> None:
    """Neither the rest of a text, nor the texts behind it."""
    tokens = [[3 + (number + seed) % 900 for number in range(4000)] for seed in range(texts)]
    before = client.get_stats().engine
    with house.client() as other, pytest.raises(DeadlineExceeded):
        other.embed(tokens, timeout_s=0.2)
    client.embed([[5]])  # a step later the engine knows what is held
    give_up = time.monotonic() + 60
    while (after := client.get_stats().engine).kv_memory_used_bytes != before.kv_memory_used_bytes:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert after.computed_tokens - before.computed_tokens < 4000
