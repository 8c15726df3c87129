"""Gets embeddings from the engine, a part of the texts at a time."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument, KvasirError, NotFound
from kvasir.inference.v1 import inference_pb2 as pb

Text = str | Sequence[int]
MAX_TEXTS = 2048  # of one request
_TEXTS_AT_ONCE = 64
# Of one answer, each of about twenty bytes of JSON.
_MAX_VALUES = 2 << 20
_INPUT = re.compile(r"inputs\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Texts to embed, and the field of the request that they came in."""

    model: str
    texts: Sequence[Text]
    field: str
    is_list: bool = True
    dimensions: int | None = None
    truncate: bool = False
    any_model: bool = False  # another one answers for a name that is no model's


@dataclass(slots=True)
class Found:
    """The model that answered, and its embeddings."""

    model: str = ""
    embeddings: list[pb.Embedding] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def values(self) -> int:
        return sum(len(each.values) for each in self.embeddings)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.embeddings)


async def embed(client: AioInferenceClient, wanted: Wanted) -> Found:
    """All embeddings, in order. Raises what the engine raises, with the field as the caller knows it."""
    if len(wanted.texts) > MAX_TEXTS:
        raise _not_so_many(wanted, f"expected at most {MAX_TEXTS} texts")
    found, model = Found(wanted.model), await _known(client, wanted)
    for begin in range(0, len(wanted.texts), _TEXTS_AT_ONCE):
        part = wanted.texts[begin : begin + _TEXTS_AT_ONCE]
        try:
            answer = await client.embed(part, model=model, dimensions=wanted.dimensions, truncate=wanted.truncate)
        except KvasirError as error:
            raise _as_given(error, wanted, begin) from None
        found.model = model = answer.model
        found.embeddings += answer.embeddings
        if len(wanted.texts) * len(answer.embeddings[0].values) > _MAX_VALUES:
            raise _not_so_many(wanted, f"expected texts whose embeddings have at most {_MAX_VALUES} values together")
    return found


async def _known(client: AioInferenceClient, wanted: Wanted) -> str:
    """The model's name; none where another one may answer for it. To look costs less than to send texts twice."""
    if wanted.any_model:
        try:
            await client.get_model(wanted.model)
        except NotFound:
            return ""
    return wanted.model


def _not_so_many(wanted: Wanted, why: str) -> InvalidArgument:
    return InvalidArgument.of(wanted.field, why)


def _as_given(error: KvasirError, wanted: Wanted, begin: int) -> KvasirError:
    """The engine's refusal of inputs[n], as one of the caller's text."""
    if error.field is None or (place := _INPUT.fullmatch(error.field)) is None:
        return error
    field = f"{wanted.field}[{begin + int(place[1])}]" if wanted.is_list else wanted.field
    message = error.message.replace(error.field, field, 1)
    return type(error)(
        message, reason=error.reason, field=field, retry_after_s=error.retry_after_s, metadata=error.metadata
    )
