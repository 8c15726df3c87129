"""OpenAI's embeddings, and Ollama's two requests for them: bodies, and answers to these."""

import base64
import struct
from collections.abc import Sequence
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


class EmbeddingsRequest(Body):
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

    def answer(self, found: Found) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._values(each)}
            for index, each in enumerate(found.embeddings)
        ]
        used = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return {"object": "list", "data": data, "model": found.model, "usage": used}

    def _values(self, embedding: pb.Embedding) -> str | list[float]:
        if self.encoding_format != "base64":
            return list(embedding.values)
        return base64.b64encode(struct.pack(f"<{len(embedding.values)}f", *embedding.values)).decode()


class _OllamaRequest(Body):
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

    def answer(self, found: Found) -> dict[str, Any]:
        return {
            "model": found.model,
            "embeddings": [list(each.values) for each in found.embeddings],
            "total_duration": round(found.took_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
        }


class OllamaEmbeddings(_OllamaRequest):
    """The body of /api/embeddings, which is older."""

    prompt: str

    def wanted(self, reading: Reading) -> Wanted:
        if not self.prompt:
            raise InvalidArgument("prompt: expected a text", field="prompt")
        return self._wanted(reading, [self.prompt], "prompt", is_list=False, truncate=True)

    def answer(self, found: Found) -> dict[str, Any]:
        return {"embedding": list(found.embeddings[0].values)}
