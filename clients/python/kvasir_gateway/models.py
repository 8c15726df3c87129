"""The engine's models, as OpenAI and Anthropic list them."""

from collections.abc import Sequence
from typing import Any

from kvasir.inference.v1 import inference_pb2 as pb

# When a model was made is not known here; both APIs want a time.
_CREATED, _CREATED_AT = 0, "1970-01-01T00:00:00Z"


def listed(found: Sequence[pb.Model], *, for_anthropic: bool) -> dict[str, Any]:
    data = [one(model, for_anthropic=for_anthropic) for model in found]
    if not for_anthropic:
        return {"object": "list", "data": data}
    first, last = (found[0].name, found[-1].name) if found else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def one(model: pb.Model, *, for_anthropic: bool) -> dict[str, Any]:
    if for_anthropic:
        return {"type": "model", "id": model.name, "display_name": model.name, "created_at": _CREATED_AT}
    return {"id": model.name, "object": "model", "created": _CREATED, "owned_by": "kvasir"}
