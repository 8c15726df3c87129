"""The engine's models, as OpenAI and Anthropic list them, and the other names that they answer to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvasir.errors import InvalidArgument, NotFound
from kvasir.inference.v1 import inference_pb2 as pb

from kvasir_gateway.turn import Turn

# When a model was made is not known here; both APIs want a time.
_CREATED, _CREATED_AT = 0, "1970-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Aliases:
    """Names that stand for models, as the operator gave them. The answer names the model."""

    by_name: Mapping[str, str] = field(default_factory=dict)

    def check(self, models: Sequence[str]) -> None:
        """Raise InvalidArgument for an alias of no model, and for one that is a model's own name."""
        for name, model in self.by_name.items():
            if model not in models:
                known = ", ".join(models)
                raise InvalidArgument.of("--alias", f"{name}={model}: the engine's models are {known}")
            if name in models:
                raise InvalidArgument.of("--alias", f"{name!r} is a model's own name")

    def applied(self, turn: Turn) -> Turn:
        """The turn, with the model that its name stands for, and that no other one answers for."""
        if turn.model not in self.by_name:
            return turn
        return replace(turn, model=self.by_name[turn.model], alias=turn.model, any_model=False)

    def model(self, name: str) -> str:
        return self.by_name.get(name, name)

    def beside(self, found: Sequence[pb.Model]) -> Iterator[tuple[str, pb.Model]]:
        """The models by their own names, then by the others."""
        by_name = {model.name: model for model in found}
        yield from by_name.items()
        for name, model in self.by_name.items():
            if model in by_name and name not in by_name:
                yield name, by_name[model]


def unknown_alias(turn: Turn) -> NotFound:
    return NotFound.of(
        "model",
        f"{turn.alias!r} stands for {turn.model!r} (--alias), and the engine has no such model",
        reason="MODEL_NOT_FOUND",
    )


def listed(found: Sequence[pb.Model], aliases: Aliases, *, for_anthropic: bool) -> dict[str, Any]:
    named = list(aliases.beside(found))
    data = [one(name, model, for_anthropic=for_anthropic) for name, model in named]
    if not for_anthropic:
        return {"object": "list", "data": data}
    first, last = (named[0][0], named[-1][0]) if named else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def one(name: str, model: pb.Model, *, for_anthropic: bool) -> dict[str, Any]:
    """`name`: the model's own, or one that stands for it."""
    if for_anthropic:
        head = {"type": "model", "id": name, "display_name": model.name, "created_at": _CREATED_AT}
        return {**head, "lifecycle": "active", "max_input_tokens": model.context_tokens or None}
    shown = {"id": name, "object": "model", "created": _CREATED, "owned_by": "kvasir", "root": model.name}
    if model.context_tokens:  # known of a loaded one; by the names that clients of vLLM and of OpenRouter read
        shown |= {"max_model_len": model.context_tokens, "context_length": model.context_tokens}
    return shown
