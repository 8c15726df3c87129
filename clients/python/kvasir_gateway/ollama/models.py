"""The engine's models, as Ollama lists and shows them."""

from collections.abc import Sequence
from typing import Any

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field

from kvasir_gateway.ollama.turns import named
from kvasir_gateway.turn import Body

# The version of Ollama's API that this is; its clients check whether it is new enough for them.
VERSION = "0.12.11"
# When a model was made is not known here, and a loaded one stays.
_CREATED_AT, _NEVER = "1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z"


class ShowRequest(Body):
    """The body of /api/show."""

    model: str | None = None
    name: str | None = Field(None, description="An older name of model.")
    verbose: bool | None = None

    @property
    def asked(self) -> str:
        """Raises InvalidArgument."""
        name = self.model or self.name
        if not name:
            raise InvalidArgument.of("model", "expected a name", reason="MISSING_PARAMETER")
        return named(name)


def tags(models: Sequence[pb.Model]) -> dict[str, Any]:
    return {"models": [_tagged(model) for model in models]}


def running(models: Sequence[pb.Model]) -> dict[str, Any]:
    """The models that are loaded."""
    there = [model for model in models if model.state == pb.MODEL_STATE_LOADED]
    return {
        "models": [{**_tagged(model), "context_length": model.context_tokens, "expires_at": _NEVER} for model in there]
    }


def shown(model: pb.Model) -> dict[str, Any]:
    """What is known of a model. Of its file and its template nothing is."""
    info = {"general.architecture": "kvasir", "kvasir.block_count": model.layer_count}
    if model.context_tokens:
        info["kvasir.context_length"] = model.context_tokens
    if model.embedding_dimensions:
        info["kvasir.embedding_length"] = model.embedding_dimensions
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(),
        "model_info": info,
        "capabilities": ["embedding"] if model.only_embeds else ["completion", "tools"],
        "modified_at": _CREATED_AT,
    }


def _tagged(model: pb.Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _CREATED_AT,
        "size": 0,
        "digest": model.kv_identity.weights_digest,
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    unknown = dict.fromkeys(("parent_model", "family", "parameter_size", "quantization_level"), "")
    return {**unknown, "format": "mlx", "families": []}
