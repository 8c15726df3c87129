"""OpenAI's embeddings, and Ollama's two requests for them: bodies, and answers to these."""

import base64
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field

from kvasir_gateway.embedding.asking import MAX_TEXTS, Found, Wanted
from kvasir_gateway.ollama.turns import ModelName, named
from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import MAX_INT32, Body, FreeObject

TokenId = Annotated[int, Ge(0), Le((1 << 32) - 1)]
Texts = Annotated[list[str], MinLen(1), MaxLen(MAX_TEXTS)]
TokenLists = Annotated[list[Annotated[list[TokenId], MinLen(1)]], MinLen(1), MaxLen(MAX_TEXTS)]
Dimensions = Annotated[int, Ge(1), Le(MAX_INT32)]


# What a value takes while an answer is made of it, twice at once, and sent.
_BYTES_PER_FLOAT, _BYTES_PER_PACKED = 48, 16


class _Embeds(Body):
    """What all these bodies have."""

    def answer_bytes(self, found: Found) -> int:
        """What the answer takes until it is sent, at most."""
        return _BYTES_PER_FLOAT * found.values


class EmbeddingsRequest(_Embeds):
    """The body of /v1/embeddings."""

    model: ModelName
    input: str | Texts | Annotated[list[TokenId], MinLen(1)] | TokenLists = Field(
        description="A text, texts, the tokens of one, or those of several."
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = Field(None, description="The first values alone, of the length 1 again.")
    user: str | None = None

    def wanted(self, reading: Reading) -> Wanted:
        given: Any = self.input
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return Wanted(
            self.model, [given] if is_one else given, "input", not is_one, self.dimensions, any_model=reading.any_model
        )

    def answer_bytes(self, found: Found) -> int:
        return (_BYTES_PER_PACKED if self.encoding_format == "base64" else _BYTES_PER_FLOAT) * found.values

    def answer(self, found: Found) -> bytes:
        data = (
            {"object": "embedding", "index": index, "embedding": self._values(each)}
            for index, each in enumerate(found.embeddings)
        )
        used = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return _rendered({"object": "list", "model": found.model, "usage": used}, "data", data)

    def _values(self, embedding: pb.Embedding) -> str | list[float]:
        if self.encoding_format != "base64":
            return list(embedding.values)
        return base64.b64encode(struct.pack(f"<{len(embedding.values)}f", *embedding.values)).decode()


class _OllamaRequest(_Embeds):
    """What both of Ollama's requests have."""

    model: ModelName
    options: FreeObject | None = Field(None, description="Ignored.")
    keep_alive: float | str | None = Field(None, description="Ignored: models stay loaded.")

    def _wanted(self, reading: Reading, texts: Sequence[str], field: str, **more: Any) -> Wanted:
        reading.ignore_unless(({},), options=self.options)
        reading.ignore_unless((), keep_alive=self.keep_alive)
        return Wanted(named(self.model), texts, field, any_model=reading.any_model, **more)


class OllamaEmbed(_OllamaRequest):
    """The body of /api/embed."""

    input: str | Annotated[list[str], MaxLen(MAX_TEXTS)]
    truncate: bool | None = Field(None, description="Left out: true. false refuses a text that is too long.")
    dimensions: Dimensions | None = None

    def wanted(self, reading: Reading) -> Wanted:
        is_one = isinstance(self.input, str)
        texts = [self.input] if isinstance(self.input, str) else self.input
        more = {"is_list": not is_one, "dimensions": self.dimensions, "truncate": self.truncate is not False}
        return self._wanted(reading, texts, "input", **more)

    def answer(self, found: Found) -> bytes:
        facts = {
            "model": found.model,
            "total_duration": round(found.took_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
        }
        return _rendered(facts, "embeddings", (list(each.values) for each in found.embeddings))


class OllamaEmbeddings(_OllamaRequest):
    """The body of /api/embeddings, which is older."""

    prompt: str

    def wanted(self, reading: Reading) -> Wanted:
        if not self.prompt:
            raise InvalidArgument.of("prompt", "expected a text")
        return self._wanted(reading, [self.prompt], "prompt", is_list=False, truncate=True)

    def answer(self, found: Found) -> bytes:
        return _json({"embedding": list(found.embeddings[0].values)})


def _rendered(facts: Mapping[str, Any], name: str, items: Iterable[object]) -> bytes:
    """These facts as JSON, and one more, a list, of which one item at a time is in memory as objects."""
    pieces = [_json(facts)[:-1], b',"%s":' % name.encode()]
    for item in items:
        pieces += [b"," if len(pieces) > 2 else b"[", _json(item)]
    return b"".join((*pieces, b"]}" if len(pieces) > 2 else b"[]}"))


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
