"""The prompt caches of mlx_lm.server, with the store behind those in memory."""

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from queue import Queue
from typing import Any

import mlx.core as mx
from blake3 import blake3
from mlx.utils import tree_map
from mlx_lm.models import cache as _cache

from kvasir.clients import StoreClient
from kvasir.clients.newest_agents import FORGOTTEN_AT_ONCE
from kvasir.errors import DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.store_for_mlx_lm.fitting import WITH_ROWS, offsets
from kvasir.store_for_mlx_lm.prompt_caches import KeptCache, PromptCaches
from kvasir.store_for_mlx_lm.weights import weights_of
from kvasir.syncing import Scratch
from kvasir.waits import PATIENCE_S, SILENCE_S

mlx_lm_cache: Any = _cache
_LOG = logging.getLogger("kvasir.store_for_mlx_lm")
_WAITING = 8  # caches that wait to be stored; more are not kept
_LEAST_GAIN = 16  # tokens for which it is worth reading a cache

# Whether the models of this key may go on with a cache of so many tokens.
Fits = Callable[[Any, list[Any], int], bool]


class StoredPromptCaches(mlx_lm_cache.LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's own, and behind it the store. The thread that generates calls its methods: no failure of store
    or disk may end that thread."""

    def __init__(self, store: StoreClient, keep: int, fits: Fits, *sizes: int) -> None:
        super().__init__(*sizes)
        self._store = store
        self._fits = fits
        self._keep = keep
        self._models: dict[Any, _StoredOfModel | None] = {}

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        found, rest = self._nearest(model, tokens)
        if stored := self._of(model):
            loaded = stored.load(tokens, len(tokens) - len(rest) + _LEAST_GAIN)
            if loaded is not None:
                super().insert_cache(model, loaded[1], loaded[0])
                return self._nearest(model, tokens)
        return found, rest

    def _nearest(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """mlx-lm's own, that leaves a token to compute: its batches end of a prompt without one."""
        found, rest = super().fetch_nearest_cache(model, tokens)
        if found is None or rest:
            return found, rest
        return (found, tokens[-1:]) if mlx_lm_cache.trim_prompt_cache(found, 1) else (None, tokens)

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        if stored := self._of(model):
            stored.save(tokens, prompt_cache)
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def close(self, steady: Callable[[], float] = time.monotonic) -> None:
        """Wait until all is stored, at most half a minute."""
        give_up = steady() + SILENCE_S
        models = [each for each in self._models.values() if each]
        for each in models:
            each.waiting.put(None)
        for each in models:
            each.sender.join(max(0.0, give_up - steady()))

    def _of(self, model: Any) -> "_StoredOfModel | None":
        """None where the files of the model cannot be read: it goes on without stored caches."""
        if model not in self._models:
            self._models[model] = None
            with _warning("no prompt cache is stored"):
                caches = PromptCaches(self._store, weights_of(model))
                self._models[model] = _StoredOfModel(caches, self._keep, partial(self._fits, model))
        return self._models[model]


class _StoredOfModel:
    """The stored caches of one model. A thread of its own sends them, and alone changes what is known of them."""

    def __init__(
        self,
        caches: PromptCaches,
        keep: int,
        fits: Callable[[list[Any], int], bool],
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caches = caches
        self._keep = keep
        self._fits = fits
        self._steady = steady
        self._next_call_s = 0.0
        self._prefix = f"mlx-lm/{caches.weights_digest[:16]}/"
        # The oldest first, by no clock: one that was set back would drop new ones.
        self._known: dict[str, KeptCache] = {}
        self._older: Iterator[str] = iter(())  # caches that an earlier server left, and that are too many
        self._is_listed = False
        self._files = Scratch("kvasir-mlx-lm-caches-")
        self._numbers = count()
        self.waiting: Queue[tuple[Path, array[int], int] | None] = Queue()
        self._list()
        self.sender = threading.Thread(target=self._send_all, daemon=True)
        self.sender.start()

    def load(self, tokens: Sequence[int], least: int) -> tuple[list[Any], list[int]] | None:
        """The stored cache that has most of these tokens, if at least so many, and its own tokens."""
        if min(tokens, default=-1) < 0 or self._steady() < self._next_call_s:  # images; a store that did not answer
            return None
        self._list()
        wanted = array("I", tokens)
        newest_first = reversed(list(self._known.values()))  # of equals the newest: an older one may be none that fits
        shared = {each.name: each.shared_with(wanted) for each in newest_first}
        name = max(shared, key=shared.__getitem__, default="")
        if not name or shared[name] < least:
            return None
        with _warning("a stored prompt cache is left out"):
            with self._leaving_alone():
                data, held = self._caches.load(name, SILENCE_S)
            return _loaded(data, self._file(), lambda cache: self._fits(cache, len(held))), held
        if self._steady() >= self._next_call_s:
            self._known.pop(name, None)
        return None

    def _list(self) -> None:
        """List the stored caches, once; the newest, of which so many stay, are read."""
        if not self._is_listed:
            with _warning("stored prompt caches are not known"), self._leaving_alone():
                newest, self._older = self._caches.newest(self._prefix, self._keep)
                self._known = {each.name: each for each in reversed(newest)} | self._known
                self._is_listed = True
                _LOG.info("%d prompt caches are stored", len(self._known))

    @contextmanager
    def _leaving_alone(self) -> Iterator[None]:
        """The thread that generates waits for the store: one that did not answer is left alone for a while. Its caches
        are there later."""
        try:
            yield
        except (Unavailable, DeadlineExceeded):
            self._next_call_s = self._steady() + PATIENCE_S
            raise

    def save(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Write the new rows of a cache to a file, which is sent later. One that cannot be kept is left out."""
        held = offsets(cache) or {len(tokens)}
        size = min(held)
        if len(held) > 1 or not 0 < size <= len(tokens) or min(tokens) < 0 or self.waiting.qsize() >= _WAITING:
            _LOG.info("a prompt cache of %d tokens is not kept", len(tokens))
            return
        kept = array("I", tokens[:size])
        blocks = self._caches.stored_blocks(kept)
        file = self._file()
        with _warning("a prompt cache is not kept", file):
            mlx_lm_cache.save_prompt_cache(str(file), [_without(each, blocks * BLOCK_TOKENS) for each in cache])
            self.waiting.put((file, kept, blocks))

    def _file(self) -> Path:
        return self._files.path / f"{next(self._numbers)}.safetensors"

    def _send_all(self) -> None:
        while (waiting := self.waiting.get()) is not None:
            file, tokens, blocks = waiting
            with _warning("a prompt cache is not kept"):  # the next one has all rows that the store lacks
                try:
                    self._send(file.read_bytes(), tokens, blocks)
                finally:
                    file.unlink(missing_ok=True)

    def _send(self, data: bytes, tokens: "array[int]", blocks: int) -> None:
        """Store a cache; then forget those that it has whole, and the oldest of too many."""
        name = self._prefix + blake3(tokens.tobytes()).hexdigest()[:32]
        self._caches.save(name, data, tokens, left_out_blocks=blocks)
        new = next(self._caches.kept(name))
        for each in list(self._known.values()):
            if new.is_trimmable and each.name != name and tokens[: len(each.tokens)] == each.tokens:
                self._forget(each.name)
        self._known.pop(name, None)
        self._known[name] = new
        for oldest in list(self._known)[: -self._keep]:
            self._forget(oldest)
        for older in islice(self._older, FORGOTTEN_AT_ONCE):
            if older not in self._known:
                self._forget(older)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        with suppress(NotFound):  # another server with these weights was first
            self._caches.remove(name)


@contextmanager
def _warning(what: str, file: Path | None = None) -> Iterator[None]:
    """Log a failure of any kind, and go on; of a failed write nothing stays."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  also MLX's, of a disk that is full
        _LOG.warning("%s: %s: %s", what, type(error).__name__, error)
        if file:
            with suppress(OSError):
                file.unlink(missing_ok=True)


def _without(cache: Any, rows: int) -> Any:
    """The cache with its own number of tokens, and without its first rows and those behind its last."""
    if not isinstance(cache, WITH_ROWS):
        return cache
    keys, values, *others = cache.state
    cut = tree_map(lambda each: each[..., rows : cache.offset, :], (keys, values))
    return type(cache).from_state((*cut, *others))


def _loaded(data: bytes, file: Path, fits: Callable[[list[Any]], bool]) -> list[Any]:
    """Raises InvalidArgument for one that does not fit, before MLX reads its arrays."""
    try:
        file.write_bytes(data)
        cache: list[Any] = mlx_lm_cache.load_prompt_cache(str(file))
        if not fits(cache):
            raise InvalidArgument("it is none that the model makes")
        mx.eval([each.state for each in cache])
    finally:
        file.unlink(missing_ok=True)
    return cache
