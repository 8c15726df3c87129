"""A request for embeddings from the wire, checked before any work, and its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.inputs.input_messages import check_size
from inference_svc.edge.messages import priority_of
from inference_svc.engine.api import Priority
from inference_svc.model.embedding.pooling import Embedded, shortened
from inference_svc.text.literal_text import utf8_bytes
from inference_svc.turns.embedding.embedding_model import EmbeddingModel

MAX_INPUTS = 256
# Of one answer, in four bytes each: clients take messages of 4 MiB.
MAX_VALUES = 1_000_000
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class EmbedTexts:
    texts: tuple[str | tuple[int, ...], ...]
    input_bytes: int
    dimensions: int | None
    truncate: bool
    priority: Priority


def read_embed(request: pb.EmbedRequest, max_prompt_bytes: int) -> EmbedTexts:
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        raise InvalidArgument.of("inputs", f"expected 1 to {MAX_INPUTS}, got {len(request.inputs)}")
    dimensions = request.dimensions if request.HasField("dimensions") else None
    if dimensions is not None and dimensions < 1:
        raise InvalidArgument.of("dimensions", f"expected 1 or more, got {dimensions}")
    texts = tuple(_text(given, f"inputs[{number}]") for number, given in enumerate(request.inputs))
    size_bytes = sum(utf8_bytes(text) if isinstance(text, str) else _TOKEN_BYTES * len(text) for text in texts)
    check_size("inputs", size_bytes, max_prompt_bytes)
    return EmbedTexts(texts, size_bytes, dimensions, request.truncate, priority_of(request))


def check_dimensions(given: EmbedTexts, dimensions: int) -> int:
    """How many values of a text are sent. Raises InvalidArgument for more than there are, or than one answer has."""
    if given.dimensions is not None and given.dimensions > dimensions:
        raise InvalidArgument.of("dimensions", f"expected at most the model's {dimensions}, got {given.dimensions}")
    sent = given.dimensions or dimensions
    if len(given.texts) * sent > MAX_VALUES:
        at_once = f"expected at most {MAX_VALUES // sent} at once, whose embeddings have {sent} values each"
        raise InvalidArgument.of("inputs", f"{at_once}; got {len(given.texts)}")
    return sent


def embed_response(model: str, found: Sequence[Embedded], dimensions: int) -> pb.EmbedResponse:
    return pb.EmbedResponse(
        model=model,
        embeddings=[pb.Embedding(values=shortened(each.vector, dimensions), tokens=each.tokens) for each in found],
    )


def embedding_model_message(model: EmbeddingModel) -> pb.Model:
    return pb.Model(
        name=model.name,
        context_tokens=model.context_tokens,
        state=pb.MODEL_STATE_LOADED,
        embedding_dimensions=model.dimensions,
        only_embeds=True,
    )


def _text(given: pb.EmbedInput, field: str) -> str | tuple[int, ...]:
    text: str | tuple[int, ...] = given.text if given.WhichOneof("input") == "text" else tuple(given.token_ids.ids)
    if not text:
        raise InvalidArgument.of(field, "expected a text or tokens, got none")
    return text
