"""How much one answer of embeddings may hold, checked before anything is computed."""

import pytest
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.embed_messages import MAX_INPUTS, check_dimensions, embed_response, read_embed
from inference_svc.model.embedding.pooling import Embedded

CLIENTS_TAKE = 4 << 20


def of(texts: int, dimensions: int | None = None) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * texts, dimensions=dimensions)


def test_more_values_than_a_message_holds_are_refused_with_how_many_texts_go_at_once() -> None:
    """Llama 3.1 8B has 4,096 a text: the answer was refused by gRPC once all was computed."""
    given = read_embed(of(MAX_INPUTS), 1 << 20)
    with pytest.raises(InvalidArgument, match="at most 244 at once") as refused:
        check_dimensions(given, 4096)
    assert refused.value.field == "inputs"
    assert check_dimensions(read_embed(of(MAX_INPUTS, 1024), 1 << 20), 4096) == 1024


def test_the_largest_answer_that_is_computed_fits_into_a_message() -> None:
    given = read_embed(of(244), 1 << 20)
    vector = [0.5] * check_dimensions(given, 4096)
    answer = embed_response("m" * 200, [Embedded(vector, 1 << 40)] * 244, 4096)
    assert CLIENTS_TAKE * 0.9 < answer.ByteSize() < CLIENTS_TAKE
