"""`python -m kvasir.store_for_mlx_lm.server --model …`: mlx_lm.server, whose prompt caches a cache store keeps.

It is mlx-lm's program with another class of prompt caches, and takes all of its options, too. What a reply added is
stored behind it; a prompt that a stored cache begins goes on from there, after a restart and on another machine. A
store that does not answer costs time, and no request. `--keep`: how many caches of these weights stay stored."""

import argparse
import logging
import signal
import sys
import tempfile
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import mlx.core as mx
from blake3 import blake3
from mlx.utils import tree_map
from mlx_lm import server as mlx_lm_server
from mlx_lm.models import cache as _cache

from kvasir.clients import StoreClient
from kvasir.errors import KvasirError, NotFound
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.store_for_mlx_lm.prompt_caches import KeptCache, PromptCaches
from kvasir.store_for_mlx_lm.weights import weights_of
from kvasir.waits import SILENCE_S

mlx_lm_cache: Any = _cache
_LOG = logging.getLogger("kvasir.store_for_mlx_lm")
_WAITING = 8  # caches that wait to be stored; more are not kept
_LEAST_GAIN = 16  # tokens for which it is worth reading a cache
_WITH_ROWS = (mlx_lm_cache.KVCache, mlx_lm_cache.QuantizedKVCache)


class StoredPromptCaches(mlx_lm_cache.LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's own, and behind it the store. Its methods are called by the thread that generates."""

    def __init__(self, store: StoreClient, keep: int, *sizes: int) -> None:
        super().__init__(*sizes)
        self._store = store
        self._keep = keep
        self._models: dict[Any, _StoredOfModel] = {}

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        found, rest = super().fetch_nearest_cache(model, tokens)
        loaded = self._of(model).load(tokens, len(tokens) - len(rest) + _LEAST_GAIN)
        if loaded is None:
            return found, rest
        super().insert_cache(model, loaded[1], loaded[0])
        return super().fetch_nearest_cache(model, tokens)  # type: ignore[no-any-return]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        self._of(model).save(tokens, prompt_cache)
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def close(self) -> None:
        """Wait until all is stored, at most half a minute."""
        for each in self._models.values():
            each.close()

    def _of(self, model: Any) -> "_StoredOfModel":
        if model not in self._models:
            self._models[model] = _StoredOfModel(PromptCaches(self._store, weights_of(model)), self._keep)
        return self._models[model]


class _StoredOfModel:
    """The stored caches of one model. A thread of its own sends them, and alone changes what is known of them."""

    def __init__(self, caches: PromptCaches, keep: int) -> None:
        self._caches = caches
        self._keep = keep
        self._prefix = f"mlx-lm/{caches.weights_digest[:16]}/"
        self._known: dict[str, KeptCache] = {}
        self._files = tempfile.TemporaryDirectory(prefix="kvasir-mlx-lm-")
        self._numbers = count()
        self._waiting: Queue[tuple[Path, array[int], int] | None] = Queue(_WAITING)
        try:
            self._known = {each.name: each for each in caches.kept(self._prefix)}
        except KvasirError as error:
            _LOG.warning("stored prompt caches are not known: %s", error)
        _LOG.info("%d prompt caches are stored", len(self._known))
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    def load(self, tokens: Sequence[int], least: int) -> tuple[list[Any], list[int]] | None:
        """The stored cache that has most of these tokens, if at least so many, and its own tokens."""
        if min(tokens, default=-1) < 0:  # images
            return None
        wanted = array("I", tokens)
        shared = {each.name: each.shared_with(wanted) for each in list(self._known.values())}
        name = max(shared, key=shared.__getitem__, default="")
        if not name or shared[name] < least:
            return None
        try:
            data, held = self._caches.load(name, SILENCE_S)
            return _loaded(data, Path(self._files.name) / "loading.safetensors"), held
        except KvasirError as error:
            _LOG.warning("a stored prompt cache is left out: %s", error)
            self._known.pop(name, None)
            return None

    def save(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Write what is new of a cache to a file, which is sent later. One that cannot be kept is left out."""
        held = {each.offset for each in cache if isinstance(each, _WITH_ROWS)} or {len(tokens)}
        size = min(held)
        if len(held) > 1 or not 0 < size <= len(tokens) or min(tokens) < 0 or self._waiting.full():
            _LOG.info("a prompt cache of %d tokens is not kept", len(tokens))
            return
        kept = array("I", tokens[:size])
        blocks = self._caches.stored_blocks(kept)
        file = Path(self._files.name) / f"{next(self._numbers)}.safetensors"
        mlx_lm_cache.save_prompt_cache(str(file), [_without(each, blocks * BLOCK_TOKENS) for each in cache])
        self._waiting.put((file, kept, blocks))

    def close(self) -> None:
        self._waiting.put(None)
        self._sender.join(SILENCE_S)

    def _send_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            file, tokens, blocks = waiting
            try:
                self._send(file.read_bytes(), tokens, blocks)
            except (KvasirError, OSError) as error:  # of what the store does not have, the next is sent whole
                _LOG.warning("a prompt cache is not kept: %s", error)
            file.unlink(missing_ok=True)

    def _send(self, data: bytes, tokens: "array[int]", blocks: int) -> None:
        """Store a cache; then forget those that it has whole, and the oldest of too many."""
        name = self._prefix + blake3(tokens.tobytes()).hexdigest()[:32]
        self._caches.save(name, data, tokens, left_out_blocks=blocks)
        new = next(self._caches.kept(name))
        for each in list(self._known.values()):
            if new.is_trimmable and each.name != name and tokens[: len(each.tokens)] == each.tokens:
                self._forget(each.name)
        self._known[name] = new
        for each in sorted(self._known.values(), key=lambda each: each.created_unix_ms)[: -self._keep]:
            self._forget(each.name)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        with suppress(NotFound):  # another server with these weights was first
            self._caches.remove(name)


def _without(cache: Any, rows: int) -> Any:
    """The cache with its own number of tokens, and without its first rows and those behind its last."""
    if not isinstance(cache, _WITH_ROWS):
        return cache
    keys, values, *others = cache.state
    cut = tree_map(lambda each: each[..., rows : cache.offset, :], (keys, values))
    return type(cache).from_state((*cut, *others))


def _loaded(data: bytes, file: Path) -> list[Any]:
    file.write_bytes(data)
    cache: list[Any] = mlx_lm_cache.load_prompt_cache(str(file))
    mx.eval([each.state for each in cache])
    file.unlink()
    return cache


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--store", default=f"unix:{Path.home()}/.kvasir/run/store.sock", help="unix:/path or HOST:PORT")
    parser.add_argument("--store-token-file", type=Path, help="of a credential with the role engine; none: the owner's")
    parser.add_argument("--keep", type=int, default=64, help="caches that stay stored (default: 64)")
    own, others = parser.parse_known_args()
    if {"-h", "--help"} & set(others):
        print(__doc__, parser.format_help(), sep="\n\n")
    token = own.store_token_file.read_text().strip() if own.store_token_file else None
    made: list[StoredPromptCaches] = []

    def stored(*sizes: int) -> StoredPromptCaches:
        made.append(StoredPromptCaches(StoreClient.connect(own.store, token=token), own.keep, *sizes))
        return made[0]

    server: Any = mlx_lm_server
    server.LRUPromptCache = stored
    sys.argv[1:] = others
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.main()
    finally:
        for each in made:
            each.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
