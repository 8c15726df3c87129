"""Whether a prompt and its reply fit the model's context: the one place that decides it."""

from kvasir.errors import ResourceExhausted


class ContextExceeded(ResourceExhausted):
    """A prompt and its reply do not fit."""

    reason = "CONTEXT_EXCEEDED"


def check_fits(
    prompt_tokens: int, max_tokens: int, context_tokens: int, *, field: str = "prompt", is_lower_bound: bool = False
) -> None:
    """Raise ContextExceeded, the field named, unless both fit. `max_tokens` 0: no token is
    generated. `field`: the request's, that the prompt came in. `is_lower_bound`: it has `prompt_tokens` or more.
    """
    if prompt_tokens + min(max_tokens, 1) > context_tokens:
        count = f"{'at least ' if is_lower_bound else ''}{prompt_tokens}"
        found = f"{count} tokens{', and one to generate,' if max_tokens else ''} are more"
    elif prompt_tokens + max_tokens > context_tokens:
        field, found = "sampling.max_tokens", f"{prompt_tokens} prompt tokens and {max_tokens} to generate are more"
    else:
        return
    raise ContextExceeded(
        f"{field}: {found} than the context of {context_tokens}",
        field=field,
        metadata={"prompt_tokens": str(prompt_tokens), "context_tokens": str(context_tokens)},
    )
