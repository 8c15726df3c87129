"""mlx-lm's prompt caches in a cache store: `PromptCaches` takes its files; `server` is mlx_lm.server with them."""

from kvasir.store_for_mlx_lm.prompt_caches import KeptCache, PromptCaches

__all__ = ["KeptCache", "PromptCaches"]
